"""Two checkpoints, bit by bit, read back without torch."""

from pathlib import Path

import ckpt
from tools.demo.training import DemoError


def compare_checkpoints(left: Path, right: Path) -> int:
    """Raise `DemoError` unless both hold the same arrays with the same bytes; how many arrays."""
    a, b = ckpt.open(left), ckpt.open(right)
    if only := set(a) ^ set(b):
        raise DemoError(f"in one of {left} and {right} only: {sorted(only)[:20]}")
    for name in a:
        x, y = a[name].read(), b[name].read()
        if (x.shape, x.dtype) != (y.shape, y.dtype) or x.tobytes() != y.tobytes():
            raise DemoError(f"{name} differs between {left} and {right}")
    if a.values_by_name != b.values_by_name:
        raise DemoError(f"what is not a tensor differs: {a.values_by_name} and {b.values_by_name}")
    if not len(a):
        raise DemoError(f"{left} and {right} hold no array")
    return len(a)
