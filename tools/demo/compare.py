"""Two checkpoints, bit by bit, read back without torch."""

from pathlib import Path

import numpy as np

import ckpt
from tools.demo.training import DemoError


def compare_checkpoints(left: Path, right: Path) -> int:
    """Raise `DemoError` unless both hold the same arrays with the same bytes; how many arrays."""
    a, b = ckpt.open(left), ckpt.open(right)
    if only := set(a) ^ set(b):
        raise DemoError(f"in one of {left} and {right} only: {sorted(only)[:20]}")
    for name in a:
        x, y = np.asarray(a[name]), np.asarray(b[name])
        if (x.shape, x.dtype) != (y.shape, y.dtype) or x.tobytes() != y.tobytes():
            raise DemoError(f"{name} differs between {left} and {right}")
    return len(a)
