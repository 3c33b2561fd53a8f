"""The pack: one array of bytes in which tensors lie one after the other, each rank's share in chunks of its own.

No entry lies across two inner chunks, for these have a checksum each. A tensor that does not fit is cut, in leading
dimensions, into boxes that fill one inner chunk after the other.
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

__all__ = ["Balance", "Pack", "PackedTensor", "Unit", "make_pack"]

_ALIGNMENT = 16
_SMALLEST_INNER_BYTES = 64  # any element fits
_WASTE = 16  # an inner chunk is left with a gap of at most one such part of it rather than cut a tensor for it


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor, or a box of one, in its owner's part of the pack, `offset` bytes from the start of that part."""

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
class Unit:
    """A box that is to be packed, with the ranks that hold it."""

    path: Path
    spec: TensorSpec
    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """What is where. `owners` are those of the chunks of the `grid`; a rank's chunks, its part, are side by side.
    Without anything to store there is no grid."""

    entries: tuple[PackedTensor, ...]
    owners: tuple[int, ...]
    grid: Grid | None


def make_pack(units: Sequence[Unit], balance: Balance, split_bytes: int, options: GridOptions) -> Pack:
    """Give every unit to a rank that holds it, and lay each rank's out one after the other.

    What several ranks hold is cut into boxes of about `split_bytes`, so that their shares become even.
    """
    inner_bytes = max(options.inner_bytes, _SMALLEST_INNER_BYTES) // _ALIGNMENT * _ALIGNMENT
    parts: dict[int, _Part] = {}
    entries: list[PackedTensor] = []
    for unit in units:
        for box, holders in _shared_out(unit, split_bytes):
            nbytes = box.elements * unit.spec.itemsize
            own = unit.spec.per_rank
            for owner in holders if own else (balance.give(holders, nbytes),):
                part = parts.setdefault(owner, _Part(inner_bytes))
                entries += (
                    PackedTensor(
                        unit.path,
                        unit.spec.dtype,
                        placed.shape,
                        placed.elements * unit.spec.itemsize,
                        owner,
                        offset,
                        placed,
                        unit.spec.shape,
                        owner if own else None,
                    )
                    for placed, offset in part.place(box, unit.spec.itemsize)
                )
    return Pack(tuple(entries), *_chunks({owner: part.end for owner, part in parts.items()}, inner_bytes, options))


def _chunks(sizes: dict[int, int], inner_bytes: int, options: GridOptions) -> tuple[tuple[int, ...], Grid | None]:
    """The owners of the chunks, all of one size: at most that of files, and such that little is left over."""
    most = max(sizes.values(), default=0)
    if not most:
        return (), None
    if most <= inner_bytes:
        return tuple(sorted(sizes)), Grid((most,))
    pieces = -(-most // inner_bytes)
    fewest = -(-pieces // max(1, options.file_bytes // inner_bytes))
    files = min(range(fewest, 2 * fewest + 1), key=lambda files: files * -(-pieces // files))
    chunk_bytes = -(-pieces // files) * inner_bytes
    owners = tuple(owner for owner, size in sorted(sizes.items()) for _ in range(max(1, -(-size // chunk_bytes))))
    return owners, Grid((chunk_bytes,), (inner_bytes,))


def _shared_out(unit: Unit, split_bytes: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    rest = [unit.box]
    while rest:
        box = rest.pop()
        if len(unit.holders) > 1 and not unit.spec.per_rank and box.elements * unit.spec.itemsize > split_bytes:
            first, others = _cut(box, unit.spec.itemsize, split_bytes, split_bytes)
            if first is not None:
                rest += reversed(others)
                box = first
        yield box, unit.holders


@dataclass(slots=True)
class _Part:
    """One rank's part, as far as it is filled."""

    inner_bytes: int
    end: int = 0
    _least: int = field(init=False)

    def __post_init__(self) -> None:
        self._least = self.inner_bytes // _WASTE

    def place(self, box: Box, itemsize: int) -> Iterator[tuple[Box, int]]:
        """Append a box, in several if need be; yields each with its offset."""
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
    """The beginning of a box, as much as fits into `room` bytes, and boxes of the rest, in order.

    It is a run of the box in C order. A row is cut only if it is more than `least` bytes; None if nothing fits.
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


class Balance:
    """Gives work to the least loaded of a set of ranks; `loads` is shared between sets, so a heap entry may be out of
    date."""

    def __init__(self, loads: list[int]) -> None:
        self._loads = loads
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def give(self, holders: tuple[int, ...], nbytes: int) -> int:
        """Give work of `nbytes` to one of `holders`, and return which."""
        heap = self._heaps.get(holders)
        if heap is None:
            heap = self._heaps[holders] = [(self._loads[rank], rank) for rank in holders]
            heapq.heapify(heap)
        while heap[0][0] != self._loads[heap[0][1]]:
            heapq.heapreplace(heap, (self._loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        self._loads[rank] += nbytes
        heapq.heapreplace(heap, (self._loads[rank], rank))
        return rank
