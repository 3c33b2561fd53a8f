"""Limits of the machine: copies of the same bytes in memory, writes and reads of the same bytes on the disk."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch

from ckpt.native import crc32c

_BLOCK_BYTES = 8 << 20
_READ_BLOCK_BYTES = 4 << 20
_SOURCE_BYTES = 256 << 20
_COPY_THREADS = 2
_WRITE_THREADS = (1, 4)
_FILE_THREADS = 6
_READ_THREADS = 8
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_TOUCHED = mmap.MAP_PRIVATE | mmap.MAP_POPULATE


# -- memory ------------------------------------------------------------------------------------------------------------


class CopyLimit:
    """Copies of all tensors, one after the other, into anonymous memory that has been touched before."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sources = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        sizes = [source.numel() for source in self._sources]
        self._targets = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
        self._pool = ThreadPoolExecutor(_COPY_THREADS)
        self._shares = _shares(sizes, _COPY_THREADS)
        self.measure()

    def measure(self) -> float:
        """Return the seconds of the faster of torch's `copy_`, with all its threads, and memmove in two threads."""
        begin = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        middle = time.perf_counter()
        list(self._pool.map(self._move, self._shares))
        return min(middle - begin, time.perf_counter() - middle)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _move(self, share: list[tuple[int, int, int]]) -> None:
        for number, first, length in share:  # ctypes lets the other thread run meanwhile
            ctypes.memmove(self._targets[number].data_ptr() + first, self._sources[number].data_ptr() + first, length)


def _shares(sizes: list[int], parts: int) -> list[list[tuple[int, int, int]]]:
    """Cut each tensor into `parts` runs: (number of the tensor, first byte, bytes)."""
    cuts = [[size * part // parts for part in range(parts + 1)] for size in sizes]
    return [[(n, cut[part], cut[part + 1] - cut[part]) for n, cut in enumerate(cuts)] for part in range(parts)]


class BusLimit:
    """Copies of all tensors of a GPU, one after the other, into pinned memory, or from there."""

    def __init__(self, tensors: Iterable[torch.Tensor], to_gpu: bool) -> None:
        on_gpu = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        if to_gpu:
            on_gpu = [torch.empty_like(tensor) for tensor in on_gpu]
        sizes = [tensor.numel() for tensor in on_gpu]
        pinned = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=True).split(sizes)
        self._copies = list(zip(on_gpu, pinned, strict=True) if to_gpu else zip(pinned, on_gpu, strict=True))
        self.measure()

    def measure(self) -> float:
        """Return the seconds until all copies are done."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for target, source in self._copies:
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Free the pinned memory."""
        self._copies.clear()


def crc_seconds(total_bytes: int) -> float:
    """Return the seconds that checksums of so many bytes take in one thread, extrapolated from at most 128 MiB."""
    block = os.urandom(_BLOCK_BYTES)
    repeats = max(1, min(16, total_bytes // _BLOCK_BYTES))
    begin = time.perf_counter()
    for _ in range(repeats):
        crc32c(block)
    return (time.perf_counter() - begin) * total_bytes / (repeats * _BLOCK_BYTES)


# -- disk --------------------------------------------------------------------------------------------------------------


class DiskLimit:
    """`total_bytes`, in whole pages, written and read with O_DIRECT where the file system has it.

    There are two files of all bytes, one written by one thread, the other by four. Each is meant to be read in one way
    only: the host of a virtual machine may have a file in its memory the second time.
    """

    def __init__(self, path: Path, total_bytes: int) -> None:
        self._path = path
        self._folders = 0
        self.paths = {threads: path.with_name(f"{path.name}-{threads}") for threads in _WRITE_THREADS}
        self._bytes = _whole_pages(total_bytes)
        self._source = _noise(min(_SOURCE_BYTES, self._bytes))

    def write(self) -> float:
        """Return the seconds of the faster of both: a new file, and fsync. The files stay."""
        self.remove()
        new = os.O_WRONLY | os.O_CREAT
        return min(self._write(path, threads, new) for threads, path in self.paths.items())

    def write_over(self) -> float:
        """Return the seconds of the faster of both once more, over the files that `write` made."""
        return min(self._write(path, threads, os.O_WRONLY) for threads, path in self.paths.items())

    def read(self, first: int, end: int, direct: bool = False) -> float:
        """Return the seconds to read these bytes, in whole pages and blocks of 8 MiB, into memory touched before.

        Without `direct` the first file is read through the page cache, with it the second one past it.
        """
        fd = _open(list(self.paths.values())[direct], os.O_RDONLY, direct)
        buffers = count()
        memory = [memoryview(mmap.mmap(-1, _BLOCK_BYTES, flags=_TOUCHED)) for _ in range(_READ_THREADS)]
        own: dict[int, memoryview] = {}

        def read(at: int) -> None:
            thread = threading.get_ident()
            if thread not in own:
                own[thread] = memory[next(buffers)]
            os.preadv(fd, [own[thread][: min(_BLOCK_BYTES, last - at)]], at)

        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(self._bytes, _whole_pages(end))
        try:
            with ThreadPoolExecutor(_READ_THREADS) as pool:
                begin = time.perf_counter()
                list(pool.map(read, range(start, last, _BLOCK_BYTES)))
                return time.perf_counter() - begin
        finally:
            os.close(fd)

    def write_files(self, files: int) -> float:
        """Return the seconds to write as many files of equal size, each in a folder of its own, and to sync them all.

        The files stay, empty: ext4 makes new ones slowly while it remembers inodes that were freed in the last minute.
        """
        size = self._bytes // files // mmap.PAGESIZE * mmap.PAGESIZE
        self._folders += 1
        name = f"{self._path.name}-files-{self._folders}"
        paths = [self._path.with_name(f"{name}-{number}") / "file" for number in range(files)]

        def write(number: int) -> None:
            paths[number].parent.mkdir()
            fd = _open(paths[number], os.O_WRONLY | os.O_CREAT, True)
            for block, at in self._blocks(number * size, size):
                os.pwrite(fd, block, at)
            os.close(fd)

        def sync(path: Path) -> None:
            for each in (path, path.parent):
                fd = os.open(each, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

        with ThreadPoolExecutor(_FILE_THREADS) as pool:
            begin = time.perf_counter()
            list(pool.map(write, range(files)))
            list(pool.map(sync, paths))
            seconds = time.perf_counter() - begin
        for path in paths:
            os.truncate(path, 0)
        return seconds

    def remove(self) -> None:
        """Remove the two files of all bytes."""
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def _write(self, path: Path, threads: int, flags: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            fd = _open(path, flags, True)
            try:
                list(pool.map(lambda block: os.pwrite(fd, *block), self._blocks(0, self._bytes)))
                os.fsync(fd)
                return time.perf_counter() - begin
            finally:
                os.close(fd)

    def _blocks(self, start: int, size: int) -> Iterator[tuple[memoryview, int]]:
        """Yield blocks of a file of `size` bytes, the ones from `start` on of all, and their places in the file."""
        for first in range(0, size, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, size - first)
            at = (start + first) % (len(self._source) - length + 1) // mmap.PAGESIZE * mmap.PAGESIZE
            yield self._source[at : at + length], first


class ReadLimit:
    """Reads of all of `files`, `jobs` at once, in blocks of 4 MiB into memory that has been touched before."""

    def __init__(self, files: list[Path], jobs: int) -> None:
        self._files = sorted(files, key=lambda file: file.stat().st_size, reverse=True)
        self._total = sum(file.stat().st_size for file in files)
        self._jobs = jobs

    def measure(self, direct: bool = False) -> float:
        """Return the seconds; with `direct` past the page cache, where the file system can."""
        own = threading.local()

        def set_up() -> None:
            own.buffer = memoryview(mmap.mmap(-1, _READ_BLOCK_BYTES, flags=_TOUCHED))

        def read(file: Path) -> int:
            fd, done = _open(file, os.O_RDONLY, direct), 0
            try:
                while length := os.preadv(fd, [own.buffer], done):
                    done += length
                    if length % mmap.PAGESIZE:  # the end; O_DIRECT refuses to go on from here
                        break
                return done
            finally:
                os.close(fd)

        ready = threading.Barrier(self._jobs)
        with ThreadPoolExecutor(self._jobs, initializer=set_up) as pool:
            list(pool.map(lambda _: ready.wait(), range(self._jobs)))
            begin = time.perf_counter()
            total = sum(pool.map(read, self._files))
            seconds = time.perf_counter() - begin
        assert total == self._total, f"read {total} bytes of {self._total}"
        return seconds


def drop_cache(files: Iterable[Path]) -> None:
    """Drop the files, which are durable, from the page cache: the next read comes from the device."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(files: Iterable[Path]) -> float:
    """Return the share of the files' pages that is in the page cache, as `mincore` says."""
    libc = ctypes.CDLL(None, use_errno=True)
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # never written to: ctypes takes the address of writable memory only
    cached = pages = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE, prot=writable) as view:
            resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            anchor = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), resident)
            del anchor
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
            cached += sum(byte & 1 for byte in bytes(resident))
            pages += len(resident)
    return cached / pages if pages else 0.0


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _noise(size: int) -> memoryview:
    """Return touched, page-aligned memory with bytes that do not compress."""
    memory = memoryview(mmap.mmap(-1, size))
    noise = os.urandom(min(_BLOCK_BYTES, size))
    for first in range(0, size, len(noise)):
        part = memory[first : first + len(noise)]
        part[:] = noise[: len(part)]
    return memory


def _open(path: Path, flags: int, direct: bool) -> int:
    if direct:
        try:
            return os.open(path, flags | _O_DIRECT, 0o666)
        except OSError:  # a file system without O_DIRECT
            pass
    return os.open(path, flags, 0o666)
