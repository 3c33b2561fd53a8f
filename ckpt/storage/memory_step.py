"""A step in memory: the files of a snapshot, of which no directory exists.

Its documents were gathered from all ranks; the files of each rank's pack are ranges of a slot: in memory that this
process has, or in that of another node. Free of torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt.native import read_checked
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import PackIndex
from ckpt.storage.regular_files import DamagedFileError, MissingFileError
from ckpt.storage.step_source import OpenFile, StepSource
from inprocess.ipc.shared_memory import SharedMemory

Array = np.ndarray[Any, np.dtype[Any]]


class ShareBytes(ABC):
    """The bytes of one rank's share, wherever it is. Any thread, several at once."""

    bytes_fetched = 0
    """How many bytes came from another node."""

    @abstractmethod
    def open(self, offset: int, nbytes: int) -> OpenFile:
        """Return `nbytes` bytes of the slot from `offset` on, as a file. StorageError or OSError if that cannot be."""

    def close(self) -> None:  # noqa: B027 - memory of this node belongs to others
        """Release it. Idempotent."""


class LocalShare(ShareBytes):
    """A share in memory of this node."""

    def __init__(self, region: SharedMemory) -> None:
        self._region = region

    def open(self, offset: int, nbytes: int) -> OpenFile:
        """See `ShareBytes.open`."""
        return _MemoryFile(os.dup(self._region.fd), offset, nbytes)


class MemoryStep(StepSource):
    """A snapshot, or a save that is still in memory, as the source of a restore.

    `documents` are those of the step, by name, and `index` is what one of them says. `packs` says where each file of
    each rank's pack is in its slot, offset and size by rank and number; `shares` has the slots that can be read from
    here. `outlived`: they are of an earlier start of the job.
    """

    def __init__(
        self,
        path: str,
        documents: Mapping[str, bytes],
        index: PackIndex,
        packs: Mapping[int, Mapping[int, tuple[int, int]]],
        shares: Mapping[int, ShareBytes],
        *,
        outlived: bool = False,
    ) -> None:
        self.path = path
        self.index = index
        self.outlived = outlived
        self._documents = documents
        self._places = {
            pack_file(rank, number): (rank, *place) for rank, files in packs.items() for number, place in files.items()
        }
        self._shares = shares

    @property
    def bytes_fetched(self) -> int:
        """How many bytes were read from the memory of other nodes."""
        return sum(share.bytes_fetched for share in self._shares.values())

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `StepSource.read`."""
        data = self._documents.get(name)
        if data is None:
            raise MissingFileError("is missing")
        if len(data) > max_bytes:
            raise DamagedFileError("is larger than recorded")
        return data

    def open(self, name: str) -> OpenFile:
        """See `StepSource.open`. DamagedFileError if the share of the rank cannot be reached from here."""
        if name not in self._places:
            raise MissingFileError("is missing")
        rank, offset, nbytes = self._places[name]
        if rank not in self._shares:
            raise DamagedFileError(f"is in the share of rank {rank}, which no memory that can be read from here holds")
        return self._shares[rank].open(offset, nbytes)

    def scan(self) -> tuple[dict[str, int], set[str]]:
        """See `StepSource.scan`."""
        sizes = {name: nbytes for name, (_, _, nbytes) in self._places.items()}
        return sizes | {name: len(data) for name, data in self._documents.items()}, set()


class _MemoryFile(OpenFile):
    """A range of the file behind shared memory."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._fd = fd
        self._offset = offset
        self._nbytes = nbytes

    @property
    def size(self) -> int:
        return self._nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self._fd, max(0, min(nbytes, self._nbytes - offset)), self._offset + offset)

    def read_checked(self, segments: Array) -> bool:
        moved = segments.copy()
        moved["base"] += np.uint64(self._offset)
        return read_checked(self._fd, moved)

    def close(self) -> None:
        os.close(self._fd)
