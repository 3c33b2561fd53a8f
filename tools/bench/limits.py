"""What the machine can do with the same bytes: copy them to warm memory, and put them on the disk."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["BusLimit", "CopyLimit", "DiskLimit", "torch_save"]

_WRITE_BYTES = 8 << 20
_DISK_THREADS = 4
_FILE_THREADS = 6
_COPY_THREADS = 2


class CopyLimit:
    """Plain copies of all tensors, one behind the other, into anonymous memory that has been touched before."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sources = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        sizes = [source.numel() for source in self._sources]
        self._targets = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
        self._pool = ThreadPoolExecutor(_COPY_THREADS)
        self._shares = _shares(sizes, _COPY_THREADS)
        self.measure()

    def measure(self) -> float:
        """Seconds of the faster of torch's `copy_`, which uses all its threads, and memmove in two threads."""
        begin = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        middle = time.perf_counter()
        list(self._pool.map(self._move, self._shares))
        return min(middle - begin, time.perf_counter() - middle)

    def close(self) -> None:
        self._pool.shutdown()

    def _move(self, share: list[tuple[int, int, int]]) -> None:
        for number, first, count in share:  # ctypes lets the other thread run meanwhile
            ctypes.memmove(self._targets[number].data_ptr() + first, self._sources[number].data_ptr() + first, count)


class BusLimit:
    """Copies of all tensors of a GPU, one behind the other, into pinned memory, or from there."""

    def __init__(self, tensors: Iterable[torch.Tensor], to_gpu: bool) -> None:
        on_gpu = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        if to_gpu:
            on_gpu = [torch.empty_like(tensor) for tensor in on_gpu]
        sizes = [tensor.numel() for tensor in on_gpu]
        pinned = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=True).split(sizes)
        self._copies = list(zip(on_gpu, pinned, strict=True) if to_gpu else zip(pinned, on_gpu, strict=True))
        self.measure()

    def measure(self) -> float:
        """Seconds until all of them are done."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for target, source in self._copies:
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give the pinned memory back."""
        self._copies.clear()


class DiskLimit:
    """One new file of `total_bytes` in `folder`, written with O_DIRECT from aligned memory, and fsync."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self._path = folder / "limit"
        self._runs = 0
        self._bytes = -(-total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._bytes)
        self._view = memoryview(self._map)
        noise = os.urandom(min(_WRITE_BYTES, self._bytes))
        for first in range(0, self._bytes, len(noise)):
            part = self._view[first : first + len(noise)]
            part[:] = noise[: len(part)]

    def measure(self) -> float:
        """Seconds of the faster of one thread and four threads, in writes of 8 MiB."""
        return min(self._write(1), self._write(_DISK_THREADS))

    def measure_files(self, count: int) -> float:
        """Seconds of the same bytes in `count` files of equal size, each in a directory of its own, all of them synced.

        The files stay, empty: ext4 makes new ones slowly while it remembers inodes that were freed in the last minute.
        """
        size = self._bytes // count // mmap.PAGESIZE * mmap.PAGESIZE
        self._runs += 1
        folders = [self._path.with_name(f"limit-{self._runs}-{number}") for number in range(count)]
        direct = getattr(os, "O_DIRECT", 0)

        def write(number: int) -> None:
            folders[number].mkdir()
            fd = os.open(folders[number] / "file", os.O_WRONLY | os.O_CREAT | direct, 0o666)
            os.pwrite(fd, self._view[number * size : (number + 1) * size], 0)
            os.close(fd)

        def sync(number: int) -> None:
            for path in (folders[number] / "file", folders[number]):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

        with ThreadPoolExecutor(_FILE_THREADS) as pool:
            begin = time.perf_counter()
            list(pool.map(write, range(count)))
            list(pool.map(sync, range(count)))
            seconds = time.perf_counter() - begin
        for folder in folders:
            os.truncate(folder / "file", 0)
        return seconds

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def _write(self, threads: int) -> float:
        direct = getattr(os, "O_DIRECT", 0)
        with ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            try:
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct, 0o666)
            except OSError:  # a file system without O_DIRECT
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                offsets = range(0, self._bytes, _WRITE_BYTES)
                list(pool.map(lambda first: os.pwrite(fd, self._view[first : first + _WRITE_BYTES], first), offsets))
                os.fsync(fd)
                return time.perf_counter() - begin
            finally:
                os.close(fd)
                self._path.unlink()


def torch_save(folder: Path, state: object) -> float:
    """Seconds of `torch.save` and fsync, which training would wait for."""
    path = folder / "peer.pt"
    begin = time.perf_counter()
    try:
        with path.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        return time.perf_counter() - begin
    finally:
        path.unlink(missing_ok=True)


def _shares(sizes: list[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Each tensor cut into `count` runs: (number of the tensor, first byte, bytes)."""
    cuts = [[size * part // count for part in range(count + 1)] for size in sizes]
    return [[(n, cut[part], cut[part + 1] - cut[part]) for n, cut in enumerate(cuts)] for part in range(count)]
