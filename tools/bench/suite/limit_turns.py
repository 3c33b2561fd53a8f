"""The limits of the machine, measured by all ranks at once, right before the turn of each system."""

import ctypes
import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from tools.bench.limits import BusLimit, CopyLimit
from tools.bench.raw import RawFile, crc_seconds
from tools.bench.reading import drop_cache
from tools.bench.state import State
from tools.bench.suite.spec import JobSpec, Turn
from tools.bench.workloads.transformer import local_tensors, sizes_of

__all__ = ["Limits", "cached_share"]


class Limits:
    """Memory to copy into, and one file with as many bytes as the whole state. `share` is what this rank stages.

    With the state on a GPU a copy goes over the bus: to pinned memory for saves, from there for loads.
    """

    def __init__(self, spec: JobSpec, state: State, share: list[torch.Tensor], folder: Path) -> None:
        needed = [tensor for tensor in local_tensors(state) if tensor.numel()]
        self._needed_bytes, share_bytes = sizes_of(needed), sizes_of(share)
        self._copy: CopyLimit | BusLimit
        self._copy_needed: CopyLimit | BusLimit
        if spec.device == "cuda":
            self._copy, self._copy_needed = BusLimit(share, to_gpu=False), BusLimit(needed, to_gpu=True)
        else:
            self._copy = CopyLimit(share)
            self._copy_needed = self._copy if self._needed_bytes == share_bytes else CopyLimit(needed)
        sizes: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, share_bytes)
        shares = [size or 0 for size in sizes]
        self._total = sum(shares)
        self._first = sum(shares[: dist.get_rank()]) if spec.sharded else 0
        self._file = RawFile(folder / "limit", self._total)
        self._share_bytes = share_bytes

    def of_saves(self) -> Turn:
        """A copy of what each rank stages, and rank 0 alone writes what all ranks have."""
        dist.barrier()
        taken = {"limit_copy_s": self._copy.measure(), "staged_bytes": float(self._share_bytes)}
        dist.barrier()
        if dist.get_rank() == 0:
            taken["limit_write_s"] = self._file.write()
            taken["limit_over_s"] = self._file.write_over()
            taken["limit_crc_s"] = crc_seconds(self._total)
        dist.barrier()
        return taken

    def of_loads(self) -> Turn:
        """Each rank reads what it needs of a file, at the same time as the others, and copies as much in memory.

        Cold, a file is read for the first time, as the checkpoint is.
        """
        taken = {}
        if dist.get_rank() == 0:
            drop_cache(list(self._file.paths.values()))
            taken["limit_cached_share"] = cached_share(list(self._file.paths.values()))
        for name, direct in (("direct", True), ("cold", False), ("warm", False)):
            dist.barrier()
            taken[f"limit_read_{name}_s"] = self._file.read(self._first, self._first + self._needed_bytes, direct)
            dist.barrier()
        return taken | {"limit_copy_needed_s": self._copy_needed.measure(), "needed_bytes": float(self._needed_bytes)}

    def close(self) -> None:
        self._copy.close()
        self._copy_needed.close()


def cached_share(paths: list[Path]) -> float:
    """Which part of these files is in the page cache; what a system call says, not a guess from speed."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = pages = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE, prot=_PROTECTION) as m:
            count = -(-size // mmap.PAGESIZE)
            resident = (ctypes.c_ubyte * count)()
            anchor = ctypes.c_char.from_buffer(m)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), resident)
            del anchor
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            cached += sum(byte & 1 for byte in bytes(resident))
            pages += count
    return cached / pages if pages else 0.0


_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE  # private, and never written to: ctypes asks for it
