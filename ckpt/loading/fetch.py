"""Read boxes of stored tensors into arrays in memory, through one reader, many at a time. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.loading.index import CheckpointIndex, StoredBox, StoredTensor
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import stored
from ckpt.storage.names import PACK_DIRECTORY
from ckpt.storage.reader import ArrayRead, ArrayReader

__all__ = ["Fetch", "Wanted"]

Array = np.ndarray[Any, np.dtype[Any]]
_PACK_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """The elements `box` of a stored tensor, to be put into `destination`.

    `destination` has the shape of the box (and the trailing dimension of a raw dtype) and the stored dtype; any
    strides.
    """

    name: str
    tensor: StoredTensor
    box: Box
    destination: Array


@dataclass(frozen=True, slots=True)
class _Packed:
    name: str
    stored: StoredBox
    dtype: str
    overlap: Box
    destination: Array

    @property
    def start(self) -> int:
        assert self.stored.pack_offset is not None
        return self.stored.pack_offset

    @property
    def end(self) -> int:
        return self.start + math.prod(self.stored.shape) * stored(self.dtype).itemsize


class Fetch:
    """All reads of one restore. `bytes_read` counts the bytes put into destinations."""

    def __init__(self, index: CheckpointIndex, *, threads: int = 16, timeout_s: float = 1800.0) -> None:
        self._index = index
        self._reader = ArrayReader(index.path, threads=threads)
        self._timeout_s = timeout_s
        self.bytes_read = 0

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill every destination. Raises CheckpointCorruptError naming tensor, chunk and file; destinations are
        undefined then."""
        reads: list[ArrayRead] = []
        packed: list[_Packed] = []
        for want in wanted:
            covered = 0
            for box in want.tensor.boxes:
                overlap = want.box.intersection(Box(box.box_offset, box.shape))
                if overlap is None:
                    continue
                covered += overlap.elements
                destination = _part(want.destination, overlap.slices(want.box.offset))
                self.bytes_read += destination.nbytes
                if box.pack_offset is not None:
                    packed.append(_Packed(want.name, box, want.tensor.dtype, overlap, destination))
                else:
                    offset = tuple(o - b for o, b in zip(overlap.offset, box.box_offset, strict=True))
                    reads.append(self._reader.read_into(box.meta, box.directory, want.name, offset, destination))
            if covered != want.box.elements:
                raise CheckpointCorruptError(
                    f"{self._index.path}: {want.name} has {covered} of {want.box.elements} elements stored"
                )
        self._read_packed(packed)
        for read in reads:
            read.result(self._timeout_s)

    def _read_packed(self, packed: list[_Packed]) -> None:
        """Read the pack in blocks of some MB that cover what is wanted, and take the tensors out of them."""
        packed = sorted((entry for entry in packed if entry.end > entry.start), key=lambda entry: entry.start)
        while packed:
            start, end, count = packed[0].start, packed[0].end, 0
            while count < len(packed) and max(end, packed[count].end) - start <= _PACK_BLOCK_BYTES:
                end = max(end, packed[count].end)
                count += 1
            count = max(count, 1)
            block = np.empty(end - start, np.uint8)
            meta = self._index.arrays[PACK_DIRECTORY]
            names = packed[0].name if count == 1 else f"{packed[0].name} and {count - 1} more small tensors"
            self._reader.read_into(meta, PACK_DIRECTORY, names, (start,), block).result(self._timeout_s)
            for entry in packed[:count]:
                _take(entry, block[entry.start - start : entry.end - start])
            packed = packed[count:]


def _take(entry: _Packed, data: Array) -> None:
    how = stored(entry.dtype)
    source = data.view(how.numpy_dtype).reshape((*entry.stored.shape, *how.trailing))
    entry.destination[...] = _part(source, entry.overlap.slices(entry.stored.box_offset))


def _part(array: Array, slices: tuple[slice, ...]) -> Array:
    """A view of a part of `array`, of all of its trailing dimensions; also where there is no dimension."""
    key: tuple[slice | EllipsisType, ...] = (*slices, ...)
    return array[key]
