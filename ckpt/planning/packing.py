"""The pack: one array of bytes that holds many tensors, one after the other. Each rank's part has its own chunks.

No entry crosses the boundary of an inner chunk, since each has its own checksum. A tensor that does not fit is split,
along leading dimensions, into boxes that fill one inner chunk after the other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt.paths import Path
from ckpt.planning.boxes import Box
from ckpt.planning.chunk_grid import Grid, GridOptions
from ckpt.planning.description import TensorSpec

__all__ = ["LoadBalancer", "Pack", "PackedTensor", "PackItem", "make_pack"]

_ALIGNMENT = 16
_SMALLEST_INNER_BYTES = 64  # so that any element fits
_WASTE = 16  # a gap of at most 1/16 of an inner chunk is left rather than split a tensor


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor, or a box of one, `offset` bytes from the start of its owner's part of the pack."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    owner: int
    offset: int
    box: Box
    tensor_shape: tuple[int, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PackItem:
    """A box to be packed, with the ranks that hold it."""

    path: Path
    spec: TensorSpec
    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """The layout of the pack. `owners` are the ranks that write the chunks of `grid`, those of one rank adjacent.

    There is no grid if nothing is packed.
    """

    entries: tuple[PackedTensor, ...]
    owners: tuple[int, ...]
    grid: Grid | None


def make_pack(items: Sequence[PackItem], balancer: LoadBalancer, split_bytes: int, options: GridOptions) -> Pack:
    """Assign every item to a rank that holds it, and place the items of each rank one after the other.

    An item that several ranks hold is split into boxes of about `split_bytes`, so that their shares become even.
    """
    inner_bytes = max(options.inner_bytes, _SMALLEST_INNER_BYTES) // _ALIGNMENT * _ALIGNMENT
    parts: dict[int, _Part] = {}
    entries: list[PackedTensor] = []
    for item in items:
        for box, holders in _split_evenly(item, split_bytes):
            nbytes = box.elements * item.spec.itemsize
            own = item.spec.per_rank
            for owner in holders if own else (balancer.assign(holders, nbytes),):
                part = parts.setdefault(owner, _Part(inner_bytes))
                entries += (
                    PackedTensor(
                        item.path,
                        item.spec.dtype,
                        placed.shape,
                        placed.elements * item.spec.itemsize,
                        owner,
                        offset,
                        placed,
                        item.spec.shape,
                        owner if own else None,
                    )
                    for placed, offset in part.place(box, item.spec.itemsize)
                )
    return Pack(tuple(entries), *_chunks({owner: part.end for owner, part in parts.items()}, inner_bytes, options))


def _chunks(sizes: dict[int, int], inner_bytes: int, options: GridOptions) -> tuple[tuple[int, ...], Grid | None]:
    """Return the owners of the chunks, and a grid that wastes little space in files of at most `file_bytes`."""
    most = max(sizes.values(), default=0)
    if not most:
        return (), None
    if most <= inner_bytes:
        return tuple(sorted(sizes)), Grid((most,))
    inner_chunks = -(-most // inner_bytes)
    fewest = -(-inner_chunks // max(1, options.file_bytes // inner_bytes))
    files = min(range(fewest, 2 * fewest + 1), key=lambda files: files * -(-inner_chunks // files))
    chunk_bytes = -(-inner_chunks // files) * inner_bytes
    owners = tuple(owner for owner, size in sorted(sizes.items()) for _ in range(max(1, -(-size // chunk_bytes))))
    return owners, Grid((chunk_bytes,), (inner_bytes,))


def _split_evenly(item: PackItem, split_bytes: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    rest = [item.box]
    while rest:
        box = rest.pop()
        if len(item.holders) > 1 and not item.spec.per_rank and box.elements * item.spec.itemsize > split_bytes:
            first, others = _cut(box, item.spec.itemsize, split_bytes, split_bytes)
            if first is not None:
                rest += reversed(others)
                box = first
        yield box, item.holders


@dataclass(slots=True)
class _Part:
    """One rank's part of the pack, filled up to `end`."""

    inner_bytes: int
    end: int = 0
    _least: int = field(init=False)

    def __post_init__(self) -> None:
        self._least = self.inner_bytes // _WASTE

    def place(self, box: Box, itemsize: int) -> Iterator[tuple[Box, int]]:
        """Append a box, split if necessary; yield each resulting box with its offset."""
        rest = [box]
        while rest:
            box = rest.pop()
            nbytes = box.elements * itemsize
            offset = -(-self.end // _ALIGNMENT) * _ALIGNMENT
            room = self.inner_bytes - offset % self.inner_bytes
            if nbytes > room:
                first = None
                if nbytes > self._least <= room:
                    first, others = _cut(box, itemsize, room, self._least)
                if first is None:
                    self.end = offset + room
                    rest.append(box)
                    continue
                rest += reversed(others)
                box, nbytes = first, first.elements * itemsize
            self.end = offset + nbytes
            yield box, offset


def _cut(box: Box, itemsize: int, room: int, least: int) -> tuple[Box | None, list[Box]]:
    """Split off the beginning of a box that fits into `room` bytes; return it, and boxes of the rest in order.

    The beginning is contiguous in C order. A row is split only if it has more than `least` bytes; None if nothing fits.
    """
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), len(box.shape))
    if dim == len(box.shape):
        return None, [box]
    row_bytes = math.prod(box.shape[dim + 1 :]) * itemsize
    if row_bytes <= room:
        return _rows(box, dim, 0, room // row_bytes), [_rows(box, dim, room // row_bytes, box.shape[dim])]
    if row_bytes <= least:
        return None, [box]
    first, others = _cut(_rows(box, dim, 0, 1), itemsize, room, least)
    return first, [*others, _rows(box, dim, 1, box.shape[dim])]


def _rows(box: Box, dim: int, first: int, last: int) -> Box:
    offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
    return Box(offset, (*box.shape[:dim], last - first, *box.shape[dim + 1 :]))


class LoadBalancer:
    """Assigns work to the least loaded rank of a set. `loads`, by rank, is updated."""

    def __init__(self, loads: list[int]) -> None:
        self._loads = loads
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def assign(self, holders: tuple[int, ...], nbytes: int) -> int:
        """Assign work of `nbytes` to one of `holders`, and return it."""
        heap = self._heaps.get(holders)
        if heap is None:
            heap = self._heaps[holders] = [(self._loads[rank], rank) for rank in holders]
            heapq.heapify(heap)
        # Other sets have some of the same ranks, so an entry of this heap may be out of date.
        while heap[0][0] != self._loads[heap[0][1]]:
            heapq.heapreplace(heap, (self._loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        self._loads[rank] += nbytes
        heapq.heapreplace(heap, (self._loads[rank], rank))
        return rank
