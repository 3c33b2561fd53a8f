"""The check that a decompressor refuses what is no frame, in little memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage.regular_files import DamagedFileError


def assert_refused(decompressed: Callable[[bytes, int], Any], good: bytes, wrong: bytes, nbytes: int) -> None:
    """Check that `wrong` is refused after the `good` frame of `nbytes` bytes was taken, without 64 MiB more memory."""
    decompressed(good, nbytes)
    Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedFileError, match="cannot be decompressed"):
        decompressed(wrong, nbytes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
