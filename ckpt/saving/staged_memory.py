"""Checkpoints in staging memory: after a fault the newest step is usually still there and need not be read.

A slot keeps a step until it is staged over. Its last page says which save is in it:

    word 0          the generation, set behind the copies
    word 1          the generation that word 0 must have for the slot to be complete
    byte 64 on      the name of the save
    byte 1024 on    samples of tensors on a GPU (see `samples`)

The bytes are used only if they have the checksums that the writer recorded, which is verified while they are copied.
Runs in the trainer. Only `share` is collective.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.errors import CheckpointCorruptError, CheckpointError
from ckpt.native import CHECKSUM_BYTES, crc32c
from ckpt.paths import Path
from ckpt.planning.state_dict import TensorLeaf
from ckpt.saving.layout import LocalBoxes, RankLayout, make_restore_layout
from ckpt.saving.plan_cache import CachedPlan
from ckpt.saving.task import WritePlan
from ckpt.staging.arena import Arena, Slot
from ckpt.staging.copy import Unstaged, unstage
from ckpt.staging.copy_table import Copies
from ckpt.staging.neighbors import SlotExchange
from ckpt.staging.runs import checksums_of
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document
from ckpt.storage.names import SaveId, part_name
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import StepSource
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["HEADER_BYTES", "SAMPLES_OFFSET", "StagedMemory"]

_log = logging.getLogger("ckpt")
Array = np.ndarray[Any, np.dtype[Any]]
HEADER_BYTES = 4096  # a page behind the chunks
_NAME_OFFSET = 64
_NAME_BYTES = 256
SAMPLES_OFFSET = 1024


@dataclass(frozen=True, slots=True)
class _SharedPlan:
    """The plan by which this rank and its neighbours have staged, and the options it was made with."""

    cached: CachedPlan
    compression: str | None
    max_slot_bytes: int | None

    def layout_of(self, holder: int, boxes: LocalBoxes, rank: int) -> RankLayout:
        """Return what the slot of `holder` has of these boxes."""
        own = self.cached.layout
        if holder == rank == own.plan.rank and boxes == self.cached.boxes:
            return own
        return make_restore_layout(self.cached.save_plan, holder, boxes, rank, self.max_slot_bytes)


@dataclass(frozen=True, slots=True)
class Filled:
    """What was copied into tensors, and from whose memory."""

    paths: frozenset[Path]
    own_bytes: int
    neighbour_bytes: int


class StagedMemory:
    """The slots of this rank and of its neighbours on the node. For one thread of the trainer."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._neighbours: dict[int, list[SharedMemory]] = {}
        self._own_rank = 0
        self._plan: _SharedPlan | None = None

    def share(self, exchange: SlotExchange, plan: CachedPlan, compression: str | None) -> None:
        """Exchange slots with the neighbours, after a state was planned."""
        self._plan = _SharedPlan(plan, compression, self._arena.max_slot_bytes)
        self._own_rank = exchange.rank
        self._close_neighbours()
        self._neighbours = exchange.run(slot.region for slot in self._arena.slots)

    def clear(self, slot: Slot) -> None:
        """Mark a slot as empty, before it is staged over."""
        header = self._header(slot.region)
        header[_NAME_OFFSET] = 0
        header[8:16] = bytes(8)

    def label(self, slot: Slot, save: SaveId, generation: int) -> None:
        """Mark a slot as that of a save, whose copies are in it or will be when it has the generation."""
        header = self._header(slot.region)
        name = save.name.encode()
        header[_NAME_OFFSET : _NAME_OFFSET + len(name) + 1] = name + b"\0"
        header[8:16] = struct.pack("<Q", generation)

    def fill(
        self, source: StepSource, summary: Mapping[str, Any], leaves: Mapping[Path, TensorLeaf], rank: int
    ) -> Filled:
        """Copy what memory holds of a published step into `leaves`; return which of them are complete now.

        The others have undefined contents, and must be read from storage. `summary` is that of the step. Of what each
        rank has for itself, that of `rank` is taken.
        """
        plan = self._plan
        if plan is None or plan.compression is not None or summary.get("plan") != plan.cached.save_plan.digest:
            return Filled(frozenset(), 0, 0)  # checksums of compressed files say nothing about the bytes in the slots
        boxes = {path: leaf.boxes for path, leaf in leaves.items()}
        tensors = {path: leaf.local for path, leaf in leaves.items()}
        save_name = str(summary["save"])
        sound: list[Copies] = []
        copied: dict[int, dict[Path, int]] = {}
        for holder, region in self._holding(save_name).items():
            layout = plan.layout_of(holder, boxes, rank)
            if layout.plan.batches > 1 or not layout.copies[0].ops:
                continue
            by_path = _verify_and_copy(source, layout, region, tensors)
            # A neighbour that has not noticed the fault yet may have begun to stage over it.
            if by_path is not None and self._holds(region, save_name):
                copied[holder] = by_path
                sound.append(layout.copies[0])
        complete = _complete(sound, leaves)
        nbytes = {holder: sum(n for path, n in by.items() if path in complete) for holder, by in copied.items()}
        own = nbytes.pop(self._own_rank, 0)
        return Filled(frozenset(complete), own, sum(nbytes.values()))

    def close(self) -> None:
        """Unmap the slots of the neighbours. Idempotent."""
        self._close_neighbours()

    def _holding(self, save_name: str) -> dict[int, SharedMemory]:
        """Return the slots with all that a rank has staged of this save, by rank; this rank's first."""
        slots = {self._own_rank: [slot.region for slot in self._arena.slots], **self._neighbours}
        return {rank: region for rank, regions in slots.items() for region in regions if self._holds(region, save_name)}

    def _holds(self, region: SharedMemory, save_name: str) -> bool:
        header = bytes(self._header(region)[: _NAME_OFFSET + _NAME_BYTES])
        name, _, _ = header[_NAME_OFFSET:].partition(b"\0")
        arrived, expected = struct.unpack_from("<QQ", header)
        return name == save_name.encode() and arrived == expected != 0

    def _header(self, region: SharedMemory) -> memoryview:
        return region.buffer[region.size - HEADER_BYTES :]

    def _close_neighbours(self) -> None:
        for regions in self._neighbours.values():
            for region in regions:
                region.close()
        self._neighbours = {}


def _verify_and_copy(
    source: StepSource, layout: RankLayout, region: SharedMemory, tensors: Mapping[Path, torch.Tensor]
) -> dict[Path, int] | None:
    """Copy the slot into the tensors, and return how many bytes of each were copied.

    None if the slot does not hold what was written; the contents of the tensors are then undefined.
    """
    rank = layout.plan.rank
    slot = torch.frombuffer(region.buffer, dtype=torch.uint8)
    unstaged = unstage(layout.copies[0], tensors, slot)
    try:  # while bytes are on their way to a GPU
        chunks = _inner_chunks(layout.plan, region, _recorded(source, rank))
        sound = chunks is not None and _are_sound(chunks, unstaged, slot)
    except CheckpointError as error:
        _log.warning("the staging memory of rank %d is not used: %s", rank, error)
        return None
    finally:
        unstaged.wait()
    if not sound:
        _log.warning(
            "%s: the staging memory of rank %d does not hold what was written; reading from storage", source.path, rank
        )
        return None
    return unstaged.nbytes


@dataclass(frozen=True, slots=True)
class _InnerChunks:
    """The inner chunks in a slot, in order: where each is, and the checksum that is behind it."""

    starts: Array
    sizes: Array
    checksums: Array

    def numbers(self, offsets: Array) -> Array:
        """Return which of them are at these offsets of the slot."""
        return np.searchsorted(self.starts, offsets, "right") - 1


def _inner_chunks(
    plan: WritePlan, region: SharedMemory, recorded: Mapping[int, tuple[int, int]]
) -> _InnerChunks | None:
    """Return the inner chunks; None if their checksums are not those of the files that were written."""
    memory = np.frombuffer(region.buffer, np.uint8)
    starts, sizes = plan.inner_chunks.each(0, len(plan.inner_chunks.starts))
    behind = memory[(starts + sizes)[:, np.newaxis] + np.arange(CHECKSUM_BYTES)]
    ends = np.cumsum(plan.inner_chunks.counts)
    for file in plan.files:
        first = int(ends[file.first - 1]) if file.first else 0
        if recorded.get(file.number) != (file.nbytes, crc32c(behind[first : ends[file.end - 1]].tobytes())):
            return None
    return _InnerChunks(starts, sizes, behind.copy().view("<u4").reshape(-1))


def _are_sound(chunks: _InnerChunks, unstaged: Unstaged, slot: torch.Tensor) -> bool:
    """Return whether what was copied has the checksums that are in the slot."""
    if not np.array_equal(chunks.checksums[chunks.numbers(unstaged.offsets)], unstaged.checksums):
        return False
    unknown = np.unique(chunks.numbers(unstaged.unchecked))
    found = checksums_of(chunks.starts[unknown] + slot.data_ptr(), chunks.sizes[unknown])
    return np.array_equal(chunks.checksums[unknown], found)


def _complete(copied: Iterable[Copies], leaves: Mapping[Path, TensorLeaf]) -> set[Path]:
    """Return the leaves of which these copies have filled every element."""
    elements: Counter[Path] = Counter()
    for copies in copied:
        elements.update(copies.elements)
    return {
        path
        for path, count in elements.items()
        if path in leaves and count == sum(box.elements for box, _ in leaves[path].boxes)
    }


def _recorded(source: StepSource, rank: int) -> dict[int, tuple[int, int]]:
    """Return size and checksum of each file that a rank wrote, by number, as its part manifest says."""
    name = part_name(rank)
    try:
        data = source.read(name, MAX_DOCUMENT_BYTES)
    except DamagedFileError as damage:
        raise CheckpointCorruptError(f"{source.path}/{name} {damage}") from None
    part = decode_document(data, f"{source.path}/{name}")
    return {int(number): (int(nbytes), int(checksum)) for number, nbytes, checksum in part["files"]}
