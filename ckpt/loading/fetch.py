"""Read boxes of stored tensors into arrays in memory, many at a time. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.native import CHECKSUM_BYTES
from ckpt.planning.boxes import Box
from ckpt.storage.chunk_reader import ArrayRead, ChunkReader
from ckpt.storage.direct_reads import NO_WHOLE_READS, WholeReads
from ckpt.storage.dtypes import stored

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A request to read the elements `box` of a stored tensor into `destination`.

    `destination` has the shape of the box (followed by the trailing dimension of a raw dtype), the stored dtype, and
    any strides.
    """

    name: str
    tensor: StoredTensor
    box: Box
    destination: Array


class Fetch:
    """The reads of one restore. `bytes_read` counts the bytes written to destinations."""

    def __init__(self, index: CheckpointIndex, *, threads: int = 4, timeout_s: float = 1800.0) -> None:
        self._index = index
        self._reader = ChunkReader(index.source, index.packs, threads=threads, timeout_s=timeout_s)
        self.bytes_read = 0

    @property
    def bytes_done(self) -> int:
        """How many bytes of files have been read so far, also while `read` runs. Any thread; to show progress."""
        return self._reader.bytes_done

    def array(self, name: str, tensor: StoredTensor, box: Box) -> Array:
        """Return the elements `box` of a stored tensor as a new array of its stored dtype. Raises as `read` does.

        MemoryError if there is no memory for it, unless its files show that the metadata are damaged.
        """
        how = stored(tensor.dtype)
        try:
            result: Array = np.empty((*box.shape, *how.trailing), how.numpy_dtype)
        except (MemoryError, ValueError):  # ValueError: more bytes than there are addresses
            for part in tensor.boxes:
                overlap = box.intersection(Box(part.box_offset, part.meta.shape))
                if overlap is not None:
                    inside = tuple(o - b for o, b in zip(overlap.offset, part.box_offset, strict=True))
                    self._reader.check_files(name, part, inside, overlap.shape)
            raise MemoryError(f"{name}: no memory for {list(box.shape)} elements of {tensor.dtype}") from None
        self.read([BoxRead(name, tensor, box, result)])
        return result

    def files(self, boxes: Iterable[tuple[str, StoredTensor, Box]]) -> set[str]:
        """Return the files that have something of these boxes of tensors, each with its name for errors."""
        found: set[str] = set()
        for name, tensor, box in boxes:
            for part in tensor.boxes:
                overlap = box.intersection(Box(part.box_offset, part.meta.shape))
                if overlap is not None:
                    inside = tuple(o - b for o, b in zip(overlap.offset, part.box_offset, strict=True))
                    found.update(self._reader.files(name, part, inside, overlap.shape))
        return found

    def read(self, wanted: Sequence[BoxRead], whole: WholeReads = NO_WHOLE_READS) -> None:
        """Fill every destination. No read is pending when this returns or raises.

        Raises CheckpointCorruptError, naming tensor, chunk and file; the destinations are undefined then.
        """
        reads: list[ArrayRead] = []
        for want in wanted:
            boxes = want.tensor.boxes
            if len(boxes) == 1 and boxes[0].is_whole:
                reads.append(ArrayRead(want.name, boxes[0], want.box.offset, want.destination))
            else:
                reads += self._parts(want)
        self._reader.read(reads, whole)
        self.bytes_read += sum(want.destination.nbytes for want in wanted)
        self.bytes_read += self.whole_bytes(whole)

    def whole_bytes(self, reads: WholeReads) -> int:
        """Return the bytes of the elements of whole arrays."""
        stored_bytes = self._index.packs.array_places[2, reads.numbers]
        return int(stored_bytes.sum()) - CHECKSUM_BYTES * len(stored_bytes)

    def _parts(self, want: BoxRead) -> Iterator[ArrayRead]:
        """Yield the reads of the arrays that a tensor is stored as."""
        tensor, covered = want.tensor, 0
        for box in tensor.boxes:
            overlap = want.box.intersection(Box(box.box_offset, box.meta.shape))
            if overlap is None:
                continue
            covered += overlap.elements
            key: tuple[slice | EllipsisType, ...] = (*overlap.slices(want.box.offset), ...)
            inside = tuple(o - b for o, b in zip(overlap.offset, box.box_offset, strict=True))
            yield ArrayRead(want.name, box, inside, want.destination[key])
        if covered != want.box.elements:
            raise CheckpointCorruptError(
                f"{self._index.path}: {want.name} has {covered} of {want.box.elements} elements stored"
            )
