"""Whether this is still the process that it was, at the price of reading one word of memory.

The kernel empties the page in a forked child (MADV_WIPEONFORK), however it was forked: also by C code that runs none of
Python's hooks. Where it cannot, the process id is asked for each time, a system call.
"""

from __future__ import annotations

import mmap
import os

__all__ = ["ForkGuard"]

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of <linux/mman.h>


class ForkGuard:
    """True in the process that has made it, false in its forked children."""

    __slots__ = ("_pid", "_word")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._word: memoryview | None = None
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            page.madvise(_WIPE_ON_FORK)
        except OSError:
            return
        self._word = memoryview(page)
        self._word[0] = 1

    def __bool__(self) -> bool:
        word = self._word
        return bool(word[0]) if word is not None else os.getpid() == self._pid
