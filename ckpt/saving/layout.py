"""Where the files of a rank lie in its slots, one after the other, and what is copied into each.

Made once from the plan. The layout of another rank is made in the same way, to restore from its slots.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, unravel_index
from ckpt.planning.packing import PackedTensor
from ckpt.planning.save_plan import ArrayPlan, SavePlan
from ckpt.saving.task import PlannedChunk, WritePlan
from ckpt.staging.copy_table import Copies, CopyOp, Shared
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import FileLayout
from ckpt.storage.documents import EncodedList
from ckpt.storage.names import PACK_DIRECTORY, directory

__all__ = ["LocalBoxes", "RankLayout", "make_layout", "make_restore_layout"]

LocalBoxes = dict[Path, list[tuple[Box, tuple[int, ...]]]]
"""What a rank holds of each tensor: boxes of the global one, and the offset of each in the local one."""


@dataclass(frozen=True)
class RankLayout:
    """A rank's share of every save of a structure: the writer's plan, and for each batch the copies that fill its slot.

    `gaps` are the bytes that must be zero, in the pack and behind the last elements of an array: offset and number.
    """

    plan: WritePlan
    copies: tuple[Copies, ...]
    gaps: tuple[tuple[tuple[int, int], ...], ...]

    def clear_gaps(self, batch: int, slot: memoryview) -> None:
        """Make the gaps zero in the slot of a batch."""
        for offset, nbytes in self.gaps[batch]:
            slot[offset : offset + nbytes] = bytes(nbytes)


def make_layout(
    plan: SavePlan, rank: int, local_boxes: LocalBoxes, max_slot_bytes: int | None, compression: str | None
) -> RankLayout:
    """Lay out the files of this rank in slots of at most `max_slot_bytes`.

    Raises StateError when a single file does not fit a slot.
    """
    packed = EncodedList.of([_packed_entry(entry, plan) for entry in plan.packed if entry.owner == rank])
    return _lay_out(_LayoutBuilder(rank, local_boxes, max_slot_bytes, compression), plan, rank, packed)


def _lay_out(builder: _LayoutBuilder, plan: SavePlan, rank: int, packed: EncodedList) -> RankLayout:
    for array, chunks in itertools.groupby(plan.chunks_of(rank), key=lambda chunk: chunk[:2]):
        builder.add_array(array[1], [number for _, _, number in chunks])
    if plan.pack_grid is not None and rank in plan.pack_owners:
        builder.add_pack(plan)
    aliases = tuple(plan.aliases.items()) if rank == 0 else ()
    return builder.build(plan, packed, aliases)


def make_restore_layout(
    plan: SavePlan,
    rank: int,
    local_boxes: LocalBoxes,
    own_rank: int,
    max_slot_bytes: int | None,
    compression: str | None,
) -> RankLayout:
    """Lay out the files of `rank` as it does itself, with copies of only those boxes that `local_boxes` hold.

    Done in reverse, the copies restore these boxes from the slot of `rank`. Of what each rank has for itself, there are
    copies for `own_rank` only.
    """
    builder = _LayoutBuilder(rank, local_boxes, max_slot_bytes, compression, only_for=own_rank)
    return _lay_out(builder, plan, rank, EncodedList.of(()))  # no process writes this layout


def _packed_entry(entry: PackedTensor, plan: SavePlan) -> dict[str, Any]:
    """Return the entry of a part manifest; its offset is in bytes from the start of the pack."""
    start = plan.pack_owners.index(entry.owner) * plan.pack_bytes if plan.pack_bytes else 0
    document = {"path": entry.path, "dtype": entry.dtype, "shape": entry.shape, "offset": start + entry.offset}
    if entry.shape != entry.tensor_shape:
        document |= {"tensor_shape": entry.tensor_shape, "box_offset": entry.box.offset}
    return document if entry.rank is None else {**document, "rank": entry.rank}


class _LayoutBuilder:
    """Places one chunk after the other; begins a new batch when a slot is full."""

    def __init__(
        self,
        rank: int,
        local_boxes: LocalBoxes,
        max_slot_bytes: int | None,
        compression: str | None,
        *,
        only_for: int | None = None,
    ) -> None:
        self._only_for = only_for
        self._rank = rank
        self._local_boxes = local_boxes
        self._limit = max_slot_bytes
        self._compression = compression
        self._directories: list[str] = []
        self._metas: list[ArrayMeta] = []
        self._described: list[int] = []
        self._chunks: list[PlannedChunk] = []
        self._copies: list[list[CopyOp]] = [[]]
        self._shared: list[list[Shared]] = [[]]
        self._gaps: list[list[tuple[int, int]]] = [[]]
        self._next = 0
        self._slot_bytes = 0

    def build(self, plan: SavePlan, packed: EncodedList, aliases: tuple[tuple[Path, Path], ...]) -> RankLayout:
        write_plan = WritePlan(
            self._rank,
            plan.world_size,
            plan.digest,
            tuple(self._directories),
            tuple(self._metas),
            tuple(self._described),
            tuple(self._chunks),
            packed,
            aliases,
            self._slot_bytes,
            len(self._copies),
        )
        copies = tuple(Copies.of(tuple(ops), shared) for ops, shared in zip(self._copies, self._shared, strict=True))
        return RankLayout(write_plan, copies, tuple(map(tuple, self._gaps)))

    def _is_for_others(self, rank: int | None) -> bool:
        return self._only_for is not None and rank is not None and rank != self._only_for

    def add_array(self, array: ArrayPlan, chunks: Iterable[int]) -> None:
        """Place the chunks of an array that the rank writes: their numbers, in C order."""
        meta = _array_meta(array, self._compression)
        number = self._add_meta(_array_directory(array), meta, described=array.owners[0] == self._rank)
        for index in (unravel_index(chunk, meta.grid_shape) for chunk in chunks):
            layout = meta.layout(index)
            offset = self._place(number, index, layout, array.path)
            if self._is_for_others(array.rank):
                continue
            chunk = meta.box_of(index)
            if meta.first_byte(index, *chunk) == 0:
                shape = tuple(high - low for low, high in zip(*chunk, strict=True))
                self._copy(array, Box(chunk[0], shape), offset, shape, layout.inner_chunk_bytes)
                padding = -math.prod(shape) * array.itemsize % layout.inner_chunk_bytes
                end = offset + layout.inner_chunks[-1].offset + layout.inner_chunk_bytes
                self._add_gap(end - padding, end)
                continue
            for inner in layout.inner_chunks:
                inner_bytes = layout.inner_chunk_bytes if inner.shape == layout.full_shape else None
                box = Box(inner.origin, inner.shape)
                self._copy(array, box, offset + inner.offset, layout.full_shape, inner_bytes)

    def add_pack(self, plan: SavePlan) -> None:
        """Place the chunks of the pack that this rank writes."""
        assert plan.pack_grid is not None
        chunk_bytes, first = plan.pack_bytes, plan.pack_owners.index(self._rank)
        shape = (chunk_bytes * len(plan.pack_owners),)
        inner_shape = plan.pack_grid.inner_chunk_shape
        meta = ArrayMeta(shape, "uint8", (chunk_bytes,), inner_shape, self._compression, {"ckpt": {"pack": True}})
        number = self._add_meta(PACK_DIRECTORY, meta, described=first == 0)
        entries = deque(entry for entry in plan.packed if entry.owner == self._rank and entry.nbytes)
        for position in range(first, first + plan.pack_owners.count(self._rank)):
            layout = meta.layout((position,))
            offset = self._place(number, (position,), layout, (PACK_DIRECTORY,))
            for inner in layout.inner_chunks:
                start = inner.origin[0] - first * chunk_bytes
                self._fill(entries, offset + inner.offset, start, start + layout.inner_chunk_bytes)

    def _fill(self, entries: deque[PackedTensor], offset: int, start: int, end: int) -> None:
        """Copy the entries between bytes `start` and `end` of this rank's share of the pack to `offset` in the slot."""
        filled, copies, count = start, self._copies[-1], 0
        first = len(copies)
        while entries and entries[0].offset < end:
            entry = entries.popleft()
            self._add_gap(offset + filled - start, offset + entry.offset - start)
            if not self._is_for_others(entry.rank):
                self._copy_packed(entry, offset + entry.offset - start)
            filled = entry.offset + entry.nbytes
            count += 1
        self._add_gap(offset + filled - start, offset + end - start)
        if len(copies) == first + count > first:  # none is missing
            self._shared[-1].append(Shared(offset, end - start, first, len(copies)))

    def _add_gap(self, first: int, end: int) -> None:
        if first < end:
            self._gaps[-1].append((first, end - first))

    def _copy_packed(self, entry: PackedTensor, target: int) -> None:
        found = self._local(entry.path, entry.box)
        if found is None:
            return
        source, local = found
        itemsize = entry.nbytes // math.prod(entry.shape)
        flat = _flat(source, local, entry.shape)
        self._copies[-1].append(CopyOp(entry.path, source, flat, target, entry.shape, itemsize))

    def _add_meta(self, where: str, meta: ArrayMeta, described: bool) -> int:
        self._directories.append(where)
        self._metas.append(meta)
        if described:
            self._described.append(len(self._metas) - 1)
        return len(self._metas) - 1

    def _place(self, number: int, index: tuple[int, ...], layout: FileLayout, path: Path) -> int:
        if self._limit is not None and self._next + layout.buffer_bytes > self._limit:
            if layout.buffer_bytes > self._limit:
                raise StateError(
                    f"{display(path)}: a file of {layout.buffer_bytes} bytes does not fit a staging slot of "
                    f"{self._limit} bytes; raise max_host_bytes to at least {2 * layout.buffer_bytes}, or lower "
                    "file_bytes"
                )
            if self._next:
                self._copies.append([])
                self._shared.append([])
                self._gaps.append([])
                self._next = 0
        offset = self._next
        self._next += layout.buffer_bytes
        self._slot_bytes = max(self._slot_bytes, self._next)
        self._chunks.append(PlannedChunk(number, index, offset, layout.buffer_bytes, len(self._copies) - 1))
        return offset

    def _copy(
        self, array: ArrayPlan, inside: Box, offset: int, full_shape: tuple[int, ...], inner_bytes: int | None
    ) -> None:
        """Copy a box of an array, which may be a box of its tensor."""
        box = Box(tuple(a + b for a, b in zip(array.box.offset, inside.offset, strict=True)), inside.shape)
        found = self._local(array.path, box)
        if found is None:
            return
        source, local = found
        flat = _flat(source, local, box.shape) if box.shape[1:] == full_shape[1:] else None
        self._copies[-1].append(CopyOp(array.path, source, flat, offset, full_shape, array.itemsize, inner_bytes))

    def _local(self, path: Path, box: Box) -> tuple[tuple[slice, ...], tuple[int, ...]] | None:
        """Return where `box` of the global tensor is in the local one, and its shape; None if it is not there."""
        boxes = self._local_boxes.get(path, [])
        if not boxes and self._only_for is not None:
            return None
        ends = zip(*((tuple(o + n for o, n in zip(at, own.shape, strict=True))) for own, at in boxes), strict=True)
        shape = tuple(max(dim) for dim in ends)
        for own, at in boxes:
            if own.intersection(box) == box:
                low = tuple(a + o - b for a, o, b in zip(at, box.offset, own.offset, strict=True))
                return tuple(slice(a, a + n) for a, n in zip(low, box.shape, strict=True)), shape
        if self._only_for is not None:
            return None
        raise AssertionError(f"{display(path)}: the plan gives this rank {box}, which it does not hold")


def _flat(source: tuple[slice, ...], local: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the box as one run of elements of a contiguous local tensor; None if it is not one.

    It is one if it spans all dimensions behind the first in which it has several indices.
    """
    several = [dim for dim, size in enumerate(shape) if size > 1]
    if several and shape[several[0] + 1 :] != local[several[0] + 1 :]:
        return None
    strides = [math.prod(local[dim + 1 :]) for dim in range(len(local))]
    return sum(s.start * stride for s, stride in zip(source, strides, strict=True)), math.prod(shape)


def _array_directory(array: ArrayPlan) -> str:
    """Return the directory of an array in the step. No key leads to names that begin with two underscores."""
    base = directory(array.path)
    if array.rank is not None:
        return f"{base}/__rank_{array.rank:05d}"
    return base if array.box_number is None else f"{base}/__box_{array.box_number:05d}"


def _array_meta(array: ArrayPlan, compression: str | None) -> ArrayMeta:
    """Return the metadata for Zarr.

    The attribute ``ckpt`` has the exact name, and what the array is when it is not a whole tensor.
    """
    about: dict[str, object] = {"name": list(array.path)}
    if array.rank is not None:
        about["rank"] = array.rank
    if array.box_number is not None:
        about["box_offset"] = list(array.box.offset)
        about["tensor_shape"] = list(array.tensor_shape)
    grid = array.grid
    return ArrayMeta(array.shape, array.dtype, grid.chunk_shape, grid.inner_chunk_shape, compression, {"ckpt": about})
