"""What the machine can do when the same files are read, and nothing is done with the bytes."""

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["ReadLimit", "drop_cache"]

_READ_BYTES = 4 << 20


class ReadLimit:
    """Reads all of `files`, `jobs` at once, in blocks of 4 MiB into memory that has been touched before."""

    def __init__(self, files: list[Path], jobs: int) -> None:
        self._files = sorted(files, key=lambda file: file.stat().st_size, reverse=True)
        self._total = sum(file.stat().st_size for file in files)
        self._jobs = jobs

    def measure(self, direct: bool = False) -> float:
        """Seconds; `direct`: with O_DIRECT, past the page cache, where the file system has it."""
        flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
        own = threading.local()

        def set_up() -> None:
            own.buffer = memoryview(mmap.mmap(-1, _READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE))

        def read(file: Path) -> int:
            fd, done = _open(file, flags), 0
            try:
                while count := os.preadv(fd, [own.buffer], done):
                    done += count
                    if count % mmap.PAGESIZE:  # the end; O_DIRECT refuses to go on from here
                        break
                return done
            finally:
                os.close(fd)

        ready = threading.Barrier(self._jobs)
        with ThreadPoolExecutor(self._jobs, initializer=set_up) as pool:
            list(pool.map(lambda _: ready.wait(), range(self._jobs)))
            begin = time.perf_counter()
            count = sum(pool.map(read, self._files))
            seconds = time.perf_counter() - begin
        assert count == self._total, f"read {count} bytes of {self._total}"
        return seconds


def drop_cache(files: list[Path]) -> None:
    """Have the next read of `files`, which are durable, come from the device."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _open(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags)
    except OSError:  # a file system without O_DIRECT
        return os.open(file, os.O_RDONLY)
