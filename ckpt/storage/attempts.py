"""Files that are written again if the storage does not take them for a moment. Whether is said by the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckpt.errors import StorageError

_T = TypeVar("_T")

TriesAgain = Callable[[StorageError], bool]
"""Called when a file could not be written, by any thread; returns whether to write it again, from the begin."""


def never(error: StorageError) -> bool:
    """Return False: what has failed is not tried again."""
    return False


def until_written(write: Callable[[], _T], tries_again: TriesAgain) -> _T:
    """Call `write` until it raises no StorageError after which it is to be tried again, and return its result.

    Each call makes a new file: an error that the kernel has reported for the one before may not be reported again. So
    it syncs no other file, and no directory.
    """
    while True:
        try:
            return write()
        except StorageError as error:
            if not tries_again(error):
                raise
