"""Where the files of a rank lie in its slots, one after the other, and what is copied there.

Made once from the plan. The layout of another rank is made in the same way, to restore from its slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.planning.save_plan import PlannedChunk, SavePlan
from ckpt.saving.task import InnerChunks, PlannedFile, WritePlan
from ckpt.staging.copy_table import Copies, CopyOp
from ckpt.storage.chunk_layout import ChunkLayout, in_pages
from ckpt.storage.pack_index import StoredArray
from ckpt.storage.pack_writers import ChunkToCompress

LocalBoxes = dict[Path, list[tuple[Box, tuple[int, ...]]]]
"""What a rank holds of each tensor: boxes of the global one, and the offset of each in the local one."""


@dataclass(frozen=True, eq=False)
class RankLayout:
    """A rank's share of every save of a structure: the writer's plan, and the copies that fill a slot.

    `constants` are the bytes that are the same in every save, the indexes of shards: offset and bytes. All other bytes
    that no copy fills are zero, or checksums.
    """

    plan: WritePlan
    copies: Copies
    constants: tuple[tuple[int, bytes], ...]

    @cached_property
    def runs_of_files(self) -> tuple[slice | None, ...]:
        """Which runs of the table of copies are in each file; None for a file that holds something else, too."""
        starts = np.array([file.offset for file in self.plan.files], np.int64)
        of_run = np.searchsorted(starts, self.copies.table.in_slot.astype(np.int64), "right") - 1  # they are in order
        ends = np.searchsorted(of_run, np.arange(len(starts) + 1)).tolist()
        others = [op.offset for op in self.copies.ops if op.flat is None]
        mixed = set((np.searchsorted(starts, np.array(others, np.int64), "right") - 1).tolist())
        return tuple(None if n in mixed else slice(ends[n], ends[n + 1]) for n in range(len(starts)))

    def prepare(self, slot: memoryview) -> None:
        """Write the constants into a slot, which is zero otherwise."""
        for offset, data in self.constants:
            slot[offset : offset + len(data)] = data


def make_layout(plan: SavePlan, rank: int, local_boxes: LocalBoxes) -> RankLayout:
    """Lay out the files of this rank in a slot."""
    return _LayoutBuilder(rank, local_boxes).build(plan)


def make_restore_layout(plan: SavePlan, rank: int, local_boxes: LocalBoxes, own_rank: int) -> RankLayout:
    """Lay out the files of `rank` as it does itself, with copies of only those boxes that `local_boxes` hold.

    Done in reverse, the copies restore these boxes from the slot of `rank`. Of what each rank has for itself, there are
    copies for `own_rank` only.
    """
    return _LayoutBuilder(rank, local_boxes, only_for=own_rank).build(plan)


class _LayoutBuilder:
    """Places one file after the other."""

    def __init__(self, rank: int, local_boxes: LocalBoxes, *, only_for: int | None = None) -> None:
        self._only_for = only_for
        self._rank = rank
        self._local_boxes = local_boxes
        self._files: list[PlannedFile] = []
        self._to_compress: list[ChunkToCompress] = []
        self._inner: list[tuple[int, int, int]] = []
        self._copies: list[CopyOp] = []
        self._constants: list[tuple[int, bytes]] = []
        self._next = 0

    def build(self, plan: SavePlan) -> RankLayout:
        """Lay out everything that the rank writes."""
        for file, chunks in itertools.groupby(plan.chunks_of(self._rank), key=lambda chunk: chunk.file):
            of_file = list(chunks)
            self._add_file(file, of_file, is_common=of_file[0].array.number in plan.apart)
        write_plan = WritePlan(
            self._rank,
            plan.world_size,
            plan.digest,
            tuple(self._files),
            InnerChunks(*np.array(self._inner, np.int64).reshape(-1, 3).T.copy()),
            tuple(self._to_compress),
            plan.index_bytes if self._rank == 0 else b"",
            tuple(plan.aliases.items()) if self._rank == 0 else (),
            tuple((*where, each.to_document()) for where, each in plan.containers.items()) if self._rank == 0 else (),
            self._next,
            any(array.region is not None and array.number not in plan.apart for array in plan.index.arrays),
        )
        return RankLayout(write_plan, Copies.of(self._copies), tuple(self._constants))

    def _add_file(self, number: int, chunks: Sequence[PlannedChunk], *, is_common: bool) -> None:
        layouts = [chunk.array.meta.layout(chunk.index) for chunk in chunks]
        nbytes = chunks[-1].offset + layouts[-1].encoded_bytes
        start = self._next
        self._next += in_pages(nbytes)
        first = len(self._inner)
        for chunk, layout in zip(chunks, layouts, strict=True):
            offset = start + chunk.offset
            self._inner.append((offset, layout.inner_chunk_bytes, len(layout.inner_chunks)))
            if layout.index_entries:
                self._constants.append((offset + layout.index_offset, layout.index))
            if chunk.array.meta.compression is not None:
                self._to_compress.append(
                    ChunkToCompress(chunk.array.number, chunk.copy, chunk.index, chunk.array.meta, chunk.offset)
                )
            self._add_copies(chunk, layout, offset)
        self._files.append(PlannedFile(number, start, nbytes, first, len(self._inner), is_common))

    def _add_copies(self, chunk: PlannedChunk, layout: ChunkLayout, offset: int) -> None:
        array = chunk.array
        if self._only_for is not None and array.rank not in (None, self._only_for):
            return
        first, last = array.meta.box_of(chunk.index)
        if array.meta.first_byte(chunk.index, first, last) == 0:
            shape = tuple(high - low for low, high in zip(first, last, strict=True))
            self._copy(array, Box(first, shape), offset, shape, layout.inner_chunk_bytes)
            return
        for inner in layout.inner_chunks:
            inner_bytes = layout.inner_chunk_bytes if inner.shape == layout.full_shape else None
            self._copy(array, Box(inner.origin, inner.shape), offset + inner.offset, layout.full_shape, inner_bytes)

    def _copy(
        self, array: StoredArray, inside: Box, offset: int, full_shape: tuple[int, ...], inner_bytes: int | None
    ) -> None:
        """Copy a box of an array, which may be a box of its tensor."""
        box = Box(tuple(a + b for a, b in zip(array.box_offset, inside.offset, strict=True)), inside.shape)
        found = self._local(array.path, box)
        if found is None:
            return
        source, local = found
        flat = _flat(source, local, box.shape) if box.shape[1:] == full_shape[1:] else None
        itemsize = array.meta.stored.itemsize
        self._copies.append(CopyOp(array.path, source, flat, offset, full_shape, itemsize, inner_bytes))

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
