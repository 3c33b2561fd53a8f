"""What the machine can do with the bytes of a state in one file: write, read and check them."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from ckpt.native import crc32c

__all__ = ["RawFile", "crc_seconds"]

_BLOCK_BYTES = 8 << 20
_SOURCE_BYTES = 256 << 20
_THREADS = 8


class RawFile:
    """One file of `total_bytes`, in whole pages, written in two ways. Both stay between the calls, and each is read in
    one way: the second time the host of a virtual machine may have a file in its memory."""

    def __init__(self, path: Path, total_bytes: int) -> None:
        self.paths = {threads: path.with_name(f"{path.name}-{threads}") for threads in (1, _THREADS // 2)}
        self._bytes = -(-total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = min(_SOURCE_BYTES, self._bytes)
        self._source = memoryview(mmap.mmap(-1, size))
        noise = os.urandom(min(_BLOCK_BYTES, size))
        for first in range(0, size, len(noise)):
            part = self._source[first : first + len(noise)]
            part[:] = noise[: len(part)]

    def write(self) -> float:
        """Seconds of the faster of one thread and four: a new file, with O_DIRECT where possible, and fsync."""
        for path in self.paths.values():
            path.unlink(missing_ok=True)
        new = os.O_WRONLY | os.O_CREAT
        return min(self._write(path, threads, new) for threads, path in self.paths.items())

    def write_over(self) -> float:
        """Seconds of the faster of both once more, over the files that `write` made."""
        return min(self._write(path, threads, os.O_WRONLY) for threads, path in self.paths.items())

    def read(self, first: int, end: int, direct: bool = False) -> float:
        """Seconds to read these bytes (in whole pages) into memory that was touched before, in blocks of 8 MiB; with
        `direct` those of the second file."""
        fd = _open(list(self.paths.values())[direct], os.O_RDONLY, direct)
        buffers = count()
        memory = [memoryview(mmap.mmap(-1, _BLOCK_BYTES, flags=_TOUCHED)) for _ in range(_THREADS)]
        own: dict[int, memoryview] = {}

        def read(at: int) -> None:
            number = threading.get_ident()
            if number not in own:
                own[number] = memory[next(buffers)]
            os.preadv(fd, [own[number][: min(_BLOCK_BYTES, last - at)]], at)

        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(self._bytes, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                begin = time.perf_counter()
                list(pool.map(read, range(start, last, _BLOCK_BYTES)))
                return time.perf_counter() - begin
        finally:
            os.close(fd)

    def _write(self, path: Path, threads: int, flags: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            fd = _open(path, flags, True)
            try:
                list(pool.map(lambda block: os.pwrite(fd, *block), self._blocks()))
                os.fsync(fd)
                return time.perf_counter() - begin
            finally:
                os.close(fd)

    def _blocks(self) -> Iterator[tuple[memoryview, int]]:
        for first in range(0, self._bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, self._bytes - first)
            at = first % (len(self._source) - size + 1) // mmap.PAGESIZE * mmap.PAGESIZE
            yield self._source[at : at + size], first


_TOUCHED = mmap.MAP_PRIVATE | mmap.MAP_POPULATE


def crc_seconds(total_bytes: int) -> float:
    """Seconds that the checksums of so many bytes take in one thread, taken from those of a smaller number."""
    block = os.urandom(_BLOCK_BYTES)
    rounds = max(1, min(16, total_bytes // _BLOCK_BYTES))
    begin = time.perf_counter()
    for _ in range(rounds):
        crc32c(block)
    return (time.perf_counter() - begin) * total_bytes / (rounds * _BLOCK_BYTES)


def _open(path: Path, flags: int, direct: bool) -> int:
    if direct:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:  # a file system without O_DIRECT
            pass
    return os.open(path, flags, 0o666)
