"""A disk without room."""

from __future__ import annotations

import contextlib
from pathlib import Path


def fill(disk: Path) -> Path:
    """Write a file until there is no room for one more byte."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return path
