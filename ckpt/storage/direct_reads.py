"""Which bytes of a file hold a box of an uncompressed chunk, and where they go in memory: as records for `native`.

A chunk is a series of blocks, its inner chunks, each followed by its checksum. The elements of a box that are
contiguous, both there and in the destination, are one run. Runs at equal distances are the rows of one record, so there
are few records however the box lies in the chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ckpt.native import SEGMENT
from ckpt.storage.array_metadata import ArrayMeta

Array = np.ndarray[Any, np.dtype[Any]]

Records = np.ndarray[Any, np.dtype[np.int64]]
"""Reads from files: in each row the number of a file, and the members of a SEGMENT."""

PIECE_BYTES = 4 << 20
"""Records have at most so many bytes between their ends, in whole blocks, so that threads can share the work."""


@dataclass(frozen=True, eq=False)
class WholeReads:
    """A request to read all of some arrays, each of which `is_one_block`, to contiguous memory.

    Most tensors of a model are such, and small. `numbers` are those of the arrays in the index, `addresses` where each
    goes. The caller keeps the memory.
    """

    numbers: Array
    addresses: Array


NO_WHOLE_READS = WholeReads(np.empty(0, np.int64), np.empty(0, np.int64))

_Span = tuple[int, int, int]
"""Elements of a dimension: the first byte among the blocks, the first byte in the destination, and their number."""


@functools.lru_cache(maxsize=1 << 10)  # all layers of a model have tensors of the same shapes
def records_of_box(
    meta: ArrayMeta, index: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> Records:
    """Return the records that read what the chunk at `index` has of the box at `offset`, into memory.

    In these, file, chunk and memory begin at 0. The memory has the `shape` of the box, followed by the trailing
    dimension of a raw dtype, and any `strides`, in bytes.
    """
    item, trailing = meta.stored.numpy_dtype.itemsize, meta.stored.trailing
    first, last, origin = [], [], []
    for i, chunk, at, count in zip(index, meta.chunk_shape, offset, shape, strict=False):
        start = i * chunk
        first.append(max(at - start, 0))
        last.append(min(at + count - start, chunk))
        origin.append(start - at)
    left = tuple([min(chunk, n - i * chunk) for n, chunk, i in zip(meta.shape, meta.chunk_shape, index, strict=True)])
    part = _Part(
        (*left, *trailing),
        (*(meta.inner_chunk_shape or meta.chunk_shape), *trailing),
        (*first, *(0,) * len(trailing)),
        (*last, *trailing),
        (*origin, *(0,) * len(trailing)),
        strides,
        item,
    )
    rows = [
        (0, 0, block_bytes, at, to, nbytes, rows, at_step, to_step)
        for block_bytes, at, to, nbytes, rows, at_step, to_step in _rows_of_part(part)
    ]
    records = np.array(rows, np.int64).reshape(-1, 1 + len(SEGMENT.names or ()))
    records.flags.writeable = False
    return records


class _Part(NamedTuple):
    """A box of a chunk, from `first` to `last` (excluded), and where it goes.

    `shape` is that of the chunk, without what is outside of the array, `inner` that of an inner chunk. In the
    destination, the first element of the chunk would be at `origin`; it has these `strides`.
    """

    shape: tuple[int, ...]
    inner: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    origin: tuple[int, ...]
    strides: tuple[int, ...]
    item: int


def _rows_of_part(part: _Part) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Yield records without file and chunk."""
    inner, item = part.inner, part.item
    present = [-(-size // n) for size, n in zip(part.shape, inner, strict=True)]
    steps = [math.prod(inner[dim + 1 :]) * item for dim in range(len(inner))]
    block_bytes = math.prod(inner) * item
    choices = []
    for dim, (low, high) in enumerate(zip(part.first, part.last, strict=True)):
        in_line = all(n == 1 for n in present[dim + 1 :]) and all(n == 1 for n in inner[:dim])
        unit = high if in_line or present[dim] == 1 else inner[dim]
        jump = math.prod(present[dim + 1 :]) * block_bytes if unit == inner[dim] else 0
        choices.append(list(_spans(low, high, unit, jump, steps[dim], part.origin[dim], part.strides[dim])))
    for spans in product(*choices):
        at, to = sum(span[0] for span in spans), sum(span[1] for span in spans)
        for row in _rows(at, to, [span[2] for span in spans], steps, part.strides, item):
            for piece in _pieces(block_bytes, *row):
                yield (block_bytes, *piece)


def address_of(array: Array) -> int:
    """Return the address of the first element."""
    return int(array.__array_interface__["data"][0])


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
