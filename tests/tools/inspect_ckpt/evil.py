"""Pickles that run code when they are loaded. The code creates a file, which shows that it was run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any


class Evil:
    """Runs `touch FILE` when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self._file}'",)

    @staticmethod
    def proves_itself(file: Path) -> None:
        """Assert that loading the pickle without restrictions runs the code."""
        pickle.loads(pickle.dumps(Evil(file)))
        assert file.exists()
        file.unlink()


def swapped_global(data: bytes, old: tuple[str, str], new: tuple[str, str]) -> bytes:
    """Return a pickle of protocol 2 with one of the names that it looks up replaced by another."""
    text = f"c{old[0]}\n{old[1]}\n".encode()
    assert text in data, "protocol 2"
    return data.replace(text, f"c{new[0]}\n{new[1]}\n".encode())
