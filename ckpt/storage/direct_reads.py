"""Which bytes of a file hold a box of an uncompressed chunk, and where they go in memory: as records for `native`.

A chunk is a series of blocks, its inner chunks, each followed by its checksum. The elements of a box that are
contiguous, both there and in the destination, are one run. Runs at equal distances are the rows of one record, so there
are few records however the box lies in the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from ckpt.storage.array_metadata import ArrayMeta

__all__ = ["PIECE_BYTES", "Record", "records_of_box", "records_of_whole"]

Array = np.ndarray[Any, np.dtype[Any]]

Record = tuple[int, int, int, int, int, int, int, int, int]
"""The number of a file, and a read from it: the members of a SEGMENT."""

PIECE_BYTES = 4 << 20
"""Records have at most so many bytes between their ends, in whole blocks, so that threads can share the work."""

_Span = tuple[int, int, int]
"""Elements of a dimension: the first byte among the blocks, the first byte in the destination, and their number."""


def records_of_whole(meta: ArrayMeta, file: int, base: int, destination: Array) -> list[Record] | None:
    """Return the records that read all of an array that is one block; None if it is not, or not contiguous in memory.

    The same as `records_of_box` does, in less time: most arrays of a model are small.
    """
    if meta.inner_chunk_shape is not None or meta.chunk_shape != meta.shape or not destination.flags.c_contiguous:
        return None
    nbytes = destination.nbytes
    return [(file, base, nbytes, 0, address_of(destination), nbytes, 1, 0, 0)]


def records_of_box(
    meta: ArrayMeta, index: tuple[int, ...], file: int, base: int, offset: tuple[int, ...], destination: Array
) -> Iterator[Record]:
    """Yield the records that read what the chunk at `index` has of the box at `offset`, which goes to `destination`.

    The chunk begins at byte `base` of the file. `destination` has the shape of the box, followed by the trailing
    dimension of a raw dtype, and any strides.
    """
    trailing = meta.stored.trailing
    origin, first, last = _overlap(meta, index, (*offset, *(0,) * len(trailing)), destination.shape)
    inner = (*(meta.inner_chunk_shape or meta.chunk_shape), *trailing)
    present = _inner_chunks(meta, index, inner, origin)
    strides, item = destination.strides, destination.dtype.itemsize
    steps = [math.prod(inner[dim + 1 :]) * item for dim in range(len(inner))]
    block_bytes = math.prod(inner) * item
    to = address_of(destination)
    choices = []
    for dim, (low, high) in enumerate(zip(first, last, strict=True)):
        start = origin[dim] - offset[dim] if dim < len(offset) else 0
        in_line = all(n == 1 for n in present[dim + 1 :]) and all(n == 1 for n in inner[:dim])
        unit = high if in_line or present[dim] == 1 else inner[dim]
        jump = math.prod(present[dim + 1 :]) * block_bytes
        choices.append(
            list(_spans(low, high, unit, jump if unit == inner[dim] else 0, steps[dim], start, strides[dim]))
        )
    for spans in product(*choices):
        at = sum(span[0] for span in spans)
        target = to + sum(span[1] for span in spans)
        counts = [span[2] for span in spans]
        for row_at, row_to, nbytes, rows, at_step, to_step in _rows(at, target, counts, steps, strides, item):
            for piece in _pieces(block_bytes, row_at, row_to, nbytes, rows, at_step, to_step):
                yield (file, base, block_bytes, *piece)


def _overlap(
    meta: ArrayMeta, index: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the origin of a chunk, and which of its elements are in a box: the first and the last index (excluded).

    These are relative to the origin. All include the trailing dimension of a raw dtype, as the box does.
    """
    trailing = meta.stored.trailing
    chunk = (*meta.chunk_shape, *trailing)
    origin = (*(i * c for i, c in zip(index, meta.chunk_shape, strict=True)), *(0,) * len(trailing))
    first = tuple(max(o - c, 0) for o, c in zip(offset, origin, strict=True))
    ends = zip(offset, shape, origin, chunk, strict=True)
    return origin, first, tuple(min(o + n - c, size) for o, n, c, size in ends)


def address_of(array: Array) -> int:
    """Return the address of the first element."""
    return int(array.__array_interface__["data"][0])


def _inner_chunks(
    meta: ArrayMeta, index: tuple[int, ...], inner: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[int, ...]:
    """Return how many inner chunks of a chunk there are in each dimension, those outside the array not counted."""
    trailing = meta.stored.trailing
    shape, chunk = (*meta.shape, *trailing), (*meta.chunk_shape, *trailing)
    sizes = zip(shape, chunk, inner, origin, strict=True)
    return tuple(-(-min(c, size - start) // part) for size, c, part, start in sizes)


def _spans(low: int, high: int, unit: int, jump: int, step: int, start: int, stride: int) -> Iterator[_Span]:
    """Yield the elements `low` to `high` (excluded) of a dimension, divided at multiples of `unit`.

    Elements are `step` bytes apart among the blocks, and units `jump`. In the destination the element 0 would be at
    `start`, in elements, and elements are `stride` bytes apart.
    """
    while low < high:
        end = min(high, (low // unit + 1) * unit)
        skipped = low // unit * unit if jump else 0
        yield low // unit * jump + (low - skipped) * step, (start + low) * stride, end - low
        low = end


def _rows(
    at: int, to: int, counts: list[int], steps: list[int], strides: tuple[int, ...], item: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield rows, as `at` to `to_step` of a SEGMENT, for a box of `counts` elements."""
    nbytes, rows, at_step, to_step = item, 1, 0, 0
    more: list[list[tuple[int, int]]] = []
    for count, step, stride in zip(reversed(counts), reversed(steps), reversed(strides), strict=True):
        if count == 1:
            continue
        if rows == 1 and not more and step == stride == nbytes:
            nbytes *= count
        elif rows == 1 and not more:
            rows, at_step, to_step = count, step, stride
        elif not more and step == rows * at_step and stride == rows * to_step:
            rows *= count
        else:
            more.append([(n * step, n * stride) for n in range(count)])
    for places in product(*reversed(more)):
        row_at, row_to = at + sum(place[0] for place in places), to + sum(place[1] for place in places)
        yield row_at, row_to, nbytes, rows, at_step, to_step


def _pieces(
    block_bytes: int, at: int, to: int, nbytes: int, rows: int, at_step: int, to_step: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Divide a record at boundaries of blocks into parts of about `PIECE_BYTES`."""
    unit = max(1, PIECE_BYTES // block_bytes) * block_bytes
    if at // unit == (at + (rows - 1) * at_step + nbytes - 1) // unit:
        yield at, to, nbytes, rows, at_step, to_step
        return
    if rows == 1:
        end = at + nbytes
        while at < end:
            part = min(end, (at // unit + 1) * unit) - at
            yield at, to, part, 1, 0, 0
            at, to = at + part, to + part
        return
    while rows:
        part = min(rows, max(1, -((at - (at // unit + 1) * unit) // at_step)))
        yield at, to, nbytes, part, at_step, to_step
        at, to, rows = at + part * at_step, to + part * to_step, rows - part
