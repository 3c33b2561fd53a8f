"""Read boxes of stored tensors into arrays in memory, many at a time. Does not import torch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointError
from ckpt.loading.index import CheckpointIndex, StoredBox, StoredTensor
from ckpt.planning.boxes import Box
from ckpt.storage.chunk_reader import ArrayRead, ArrayReader
from ckpt.storage.dtypes import stored
PACK_DIRECTORY = "packed"

__all__ = ["Fetch", "BoxRead"]

Array = np.ndarray[Any, np.dtype[Any]]
_BLOCK_BYTES = 4 << 20
_WINDOW_BLOCKS = 2  # per thread


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


@dataclass(frozen=True, slots=True)
class _PackedRead:
    """A request for (part of) a box in the pack."""

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

    @property
    def in_place(self) -> bool:
        """Whether all of the box is wanted, in contiguous memory."""
        return self.destination.nbytes == self.end - self.start and self.destination.flags.c_contiguous

    def memory(self) -> Array:
        """Return the memory to read the box into: its destination, or a temporary buffer."""
        return (
            self.destination.reshape(-1).view(np.uint8) if self.in_place else np.empty(self.end - self.start, np.uint8)
        )


class Fetch:
    """The reads of one restore. `bytes_read` counts the bytes written to destinations."""

    def __init__(self, index: CheckpointIndex, *, threads: int = 4, timeout_s: float = 1800.0) -> None:
        self._index = index
        self._reader = ArrayReader(index.path, threads=threads)
        self._window_bytes = threads * _WINDOW_BLOCKS * _BLOCK_BYTES
        self._timeout_s = timeout_s
        self.bytes_read = 0

    def array(self, name: str, tensor: StoredTensor, box: Box) -> Array:
        """Return the elements `box` of a stored tensor as a new array of its stored dtype. Raises as `read` does.

        MemoryError if there is no memory for it, unless its files show that the metadata are damaged.
        """
        how = stored(tensor.dtype)
        try:
            result: Array = np.empty((*box.shape, *how.trailing), how.numpy_dtype)
        except (MemoryError, ValueError):  # ValueError: more bytes than there are addresses
            for part in tensor.boxes:
                overlap = box.intersection(Box(part.box_offset, part.shape))
                if overlap is not None:
                    inside = tuple(o - b for o, b in zip(overlap.offset, part.box_offset, strict=True))
                    offset, shape = (inside, overlap.shape) if part.pack_offset is None else ((0,), part.meta.shape)
                    self._reader.check_sizes(part.meta, part.directory, name, offset, shape)
            raise MemoryError(f"{name}: no memory for {list(box.shape)} elements of {tensor.dtype}") from None
        self.read([BoxRead(name, tensor, box, result)])
        return result

    def read(self, wanted: Sequence[BoxRead]) -> None:
        """Fill every destination. No read is pending when this returns or raises.

        Raises CheckpointCorruptError, naming tensor, chunk and file; the destinations are undefined then.
        """
        packed: list[_PackedRead] = []
        window = _Window(self._window_bytes, self._timeout_s)
        try:
            for want in wanted:
                self._start(want, window, packed)
            self._read_packed(packed, window)
        except BaseException:
            window.drain()
            raise
        window.finish()

    def _start(self, want: BoxRead, window: _Window, packed: list[_PackedRead]) -> None:
        covered = 0
        for box in want.tensor.boxes:
            overlap = want.box.intersection(Box(box.box_offset, box.shape))
            if overlap is None:
                continue
            covered += overlap.elements
            destination = _part(want.destination, overlap.slices(want.box.offset))
            self.bytes_read += destination.nbytes
            if box.pack_offset is not None:
                packed.append(_PackedRead(want.name, box, want.tensor.dtype, overlap, destination))
                continue
            inside = Box(tuple(o - b for o, b in zip(overlap.offset, box.box_offset, strict=True)), overlap.shape)
            unit = box.meta.inner_chunk_shape or box.meta.chunk_shape
            for block in _blocks(inside, unit, _BLOCK_BYTES // box.meta.stored.itemsize):
                part = _part(destination, block.slices(inside.offset))
                window.make_room(part.nbytes)
                read = self._reader.read_into(box.meta, box.directory, want.name, block.offset, part)
                window.add(read, part.nbytes)
        if covered != want.box.elements:
            raise CheckpointCorruptError(
                f"{self._index.path}: {want.name} has {covered} of {want.box.elements} elements stored"
            )

    def _read_packed(self, packed: list[_PackedRead], window: _Window) -> None:
        """Read boxes in the pack, those within a few MB of it at once, so that no inner chunk is read twice.

        No box crosses the boundary of an inner chunk.
        """
        packed = sorted((entry for entry in packed if entry.end > entry.start), key=lambda entry: entry.start)
        if not packed:
            return
        meta = self._index.arrays[PACK_DIRECTORY]
        (unit,) = meta.inner_chunk_shape or meta.chunk_shape
        block_bytes = max(1, _BLOCK_BYTES // unit) * unit
        for _, group in groupby(packed, key=lambda entry: entry.start // block_bytes):
            for entries in _without_overlaps(list(group)):
                runs = [(entry.start, entry.memory()) for entry in entries]
                others = f" and {len(entries) - 1} more tensors" if len(entries) > 1 else ""
                nbytes = entries[-1].end - entries[0].start
                window.make_room(nbytes)
                read = self._reader.read_runs(meta, PACK_DIRECTORY, entries[0].name + others, runs)
                window.add(read, nbytes, functools.partial(_copy_out, entries, [memory for _, memory in runs]))


class _Window:
    """The pending reads, oldest first, with a limit of bytes: a read takes that much memory until it is done."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._reads: deque[tuple[ArrayRead, int, Callable[[], None] | None]] = deque()
        self._bytes = 0
        self._draining = False

    def make_room(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be read. Raises as a read does."""
        while self._reads and self._bytes + nbytes > self._max_bytes:
            self._wait_for_oldest()

    def add(self, read: ArrayRead, nbytes: int, then: Callable[[], None] | None = None) -> None:
        """Add a pending read; `then` is called when it is done."""
        self._reads.append((read, nbytes, then))
        self._bytes += nbytes

    def finish(self) -> None:
        """Wait for all reads; if one fails, wait for the others, too, then raise its error."""
        try:
            while self._reads:
                self._wait_for_oldest()
        except BaseException:
            self.drain()
            raise

    def drain(self) -> None:
        """Wait until no read is pending, and ignore errors."""
        self._draining = True
        while self._reads:
            with contextlib.suppress(CheckpointError):
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        read, nbytes, then = self._reads[0]
        try:
            read.result(self._timeout_s)
        except CheckpointError:
            self._remove_oldest(nbytes)
            raise
        self._remove_oldest(nbytes)  # not after an interrupt: then it is still pending
        if then is not None and not self._draining:
            then()

    def _remove_oldest(self, nbytes: int) -> None:
        self._reads.popleft()
        self._bytes -= nbytes


def _blocks(box: Box, unit: tuple[int, ...], elements: int) -> Iterator[Box]:
    """Split a box at the boundaries of a grid of `unit`s, into parts of at most `elements` elements (or one unit)."""
    if box.elements > elements:
        for dim, (start, size, step) in enumerate(zip(box.offset, box.shape, unit, strict=True)):
            middle = max((start + size // 2) // step, start // step + 1) * step
            if middle < start + size:
                offset = (*box.offset[:dim], middle, *box.offset[dim + 1 :])
                for first, length in ((box.offset, middle - start), (offset, start + size - middle)):
                    yield from _blocks(Box(first, (*box.shape[:dim], length, *box.shape[dim + 1 :])), unit, elements)
                return
    yield box


def _without_overlaps(entries: list[_PackedRead]) -> Iterator[list[_PackedRead]]:
    """Divide sorted entries into groups without overlaps: two requests may be for the same box."""
    while entries:
        chosen, rest = entries[:1], entries[:0]
        for entry in entries[1:]:
            (chosen if entry.start >= chosen[-1].end else rest).append(entry)
        yield chosen
        entries = rest


def _copy_out(entries: list[_PackedRead], memory: list[Array]) -> None:
    """Copy what was read into temporary buffers to its destinations."""
    for entry, data in zip(entries, memory, strict=True):
        if not entry.in_place:
            how = stored(entry.dtype)
            source = data.view(how.numpy_dtype).reshape((*entry.stored.shape, *how.trailing))
            entry.destination[...] = _part(source, entry.overlap.slices(entry.stored.box_offset))


def _part(array: Array, slices: tuple[slice, ...]) -> Array:
    """Return a view of a part of `array`, with all of its trailing dimensions; also if it has no dimensions."""
    key: tuple[slice | EllipsisType, ...] = (*slices, ...)
    return array[key]
