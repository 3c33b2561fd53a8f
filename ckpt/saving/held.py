"""What staging memory still holds: after a fault the newest step is usually there, and needs not be read.

A slot keeps a step until it is staged over. Its last page says which save is in it:

    word 0          the generation, set behind the copies
    word 1          the generation that word 0 must have for the slot to be complete
    byte 64 on      the name of the save
    byte 1024 on    samples of tensors on a GPU (see `samples`)

The bytes are believed only when their checksums, of which the writer recorded one for each file, are found again while
they are copied. Runs in the trainer; makes no collective, except for `share`.
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

from ckpt.errors import CheckpointError
from ckpt.paths import Path
from ckpt.planning.state_dict import TensorLeaf
from ckpt.ranks import Ranks
from ckpt.saving.layout import LocalBoxes, Part, copies_from
from ckpt.saving.planner import Planned
from ckpt.saving.task import PartPlan
from ckpt.staging.arena import Arena, Slot
from ckpt.staging.copies import Copies
from ckpt.staging.copy import Unstaged, unstage
from ckpt.staging.peers import exchange_slots
from ckpt.staging.runs import checksums_of
from ckpt.storage.checksums import CHECKSUM_BYTES, crc32c
from ckpt.storage.commit import SaveId, read_part_of_step
from ckpt.storage.images import checksums_behind
from inprocess.ipc.shared_memory import SharedMemory

__all__ = ["HEADER_BYTES", "SAMPLES_OFFSET", "HeldMemory"]

_log = logging.getLogger("ckpt")
Array = np.ndarray[Any, np.dtype[Any]]
HEADER_BYTES = 4096  # a page behind the images
_NAME_OFFSET = 64
_NAME_BYTES = 256
SAMPLES_OFFSET = 1024


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a plan lays out slots, this rank's among them."""

    planned: Planned
    compression: str | None
    max_slot_bytes: int | None

    def part_of(self, holder: int, boxes: LocalBoxes, rank: int) -> Part:
        """What the slot of `holder` has of these boxes."""
        own = self.planned.part
        if holder == rank == own.plan.rank and boxes == self.planned.boxes:
            return own
        return copies_from(self.planned.save_plan, holder, boxes, rank, self.max_slot_bytes, self.compression)


@dataclass(frozen=True, slots=True)
class Filled:
    """Where the bytes of tensors came from."""

    paths: frozenset[Path]
    own_bytes: int
    neighbour_bytes: int


class HeldMemory:
    """The slots of this rank, and those of its neighbours on the node. Belongs to one thread of the trainer."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._neighbours: dict[int, list[SharedMemory]] = {}
        self._own_rank = 0
        self._layout: _Layout | None = None

    def share(self, ranks: Ranks, planned: Planned, compression: str | None) -> None:
        """A state was planned: exchange slots with the neighbours. Collective."""
        self._layout = _Layout(planned, compression, self._arena.max_slot_bytes)
        self._own_rank = ranks.rank
        self._close_neighbours()
        if ranks.world_size > 1:
            self._neighbours = exchange_slots(ranks, [slot.region for slot in self._arena.slots])

    def clear(self, slot: Slot) -> None:
        """The slot is about to be staged over."""
        header = self._header(slot.region)
        header[_NAME_OFFSET] = 0
        header[8:16] = bytes(8)

    def label(self, slot: Slot, save: SaveId, generation: int) -> None:
        """The copies of this save are in the slot, or on their way there with the generation behind them."""
        header = self._header(slot.region)
        name = save.name.encode()
        header[_NAME_OFFSET : _NAME_OFFSET + len(name) + 1] = name + b"\0"
        header[8:16] = struct.pack("<Q", generation)

    def fill(self, step_path: str, summary: Mapping[str, Any], leaves: Mapping[Path, TensorLeaf], rank: int) -> Filled:
        """Put what memory holds of a published step into `leaves`; returns which of them are complete now.

        The others may hold anything, and are to be read from storage. `summary` is that of the step. Of what belongs
        to one rank alone, that of `rank` is taken.
        """
        layout = self._layout
        if layout is None or layout.compression is not None or summary.get("plan") != layout.planned.save_plan.digest:
            return Filled(frozenset(), 0, 0)  # of compressed bytes there are no checksums to compare those here with
        boxes = {path: leaf.boxes for path, leaf in leaves.items()}
        tensors = {path: leaf.local for path, leaf in leaves.items()}
        save_name = str(summary["save"])
        sound: list[Copies] = []
        copied: dict[int, dict[Path, int]] = {}
        for holder, region in self._holding(save_name).items():
            part = layout.part_of(holder, boxes, rank)
            if part.plan.pieces > 1 or not part.copies[0].ops:
                continue
            by_path = _verify_and_copy(step_path, part, region, tensors)
            # A neighbour that the fault has not reached yet may have begun to stage over it.
            if by_path is not None and self._holds(region, save_name):
                copied[holder] = by_path
                sound.append(part.copies[0])
        complete = _complete(sound, leaves)
        nbytes = {holder: sum(n for path, n in by.items() if path in complete) for holder, by in copied.items()}
        own = nbytes.pop(self._own_rank, 0)
        return Filled(frozenset(complete), own, sum(nbytes.values()))

    def close(self) -> None:
        """Let go of the neighbours' slots. Idempotent."""
        self._close_neighbours()

    def _holding(self, save_name: str) -> dict[int, SharedMemory]:
        """The slots that hold all that a rank has staged of this save, by rank; this rank's first."""
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
    step_path: str, part: Part, region: SharedMemory, tensors: Mapping[Path, torch.Tensor]
) -> dict[Path, int] | None:
    """Copy what the images hold into the tensors, if all are, checksum by checksum, what was written; else None.

    Then the tensors hold anything. Returns how many bytes of each were copied.
    """
    rank = part.plan.rank
    slot = torch.frombuffer(region.buffer, dtype=torch.uint8)
    unstaged = unstage(part.copies[0], tensors, slot)
    try:  # while bytes are on their way to a GPU
        pieces = _pieces(part.plan, region, _recorded(step_path, rank))
        sound = pieces is not None and _are_sound(pieces, unstaged, slot)
    except CheckpointError as error:
        _log.warning("the staging memory of rank %d is not used: %s", rank, error)
        return None
    finally:
        unstaged.wait()
    if not sound:
        _log.warning("%s: the staging memory of rank %d is not what was written; reading from storage", step_path, rank)
        return None
    return unstaged.nbytes


@dataclass(frozen=True, slots=True)
class _Pieces:
    """All that has a checksum of its own in the slot, in order: where it is, and the checksum that is behind it."""

    starts: Array
    sizes: Array
    checksums: Array

    def numbers(self, offsets: Array) -> Array:
        """Which of them are at these offsets of the slot."""
        return np.searchsorted(self.starts, offsets, "right") - 1


def _pieces(plan: PartPlan, region: SharedMemory, recorded: Mapping[str, tuple[int, int]]) -> _Pieces | None:
    """None if the checksums are not those of the files that were written."""
    first, strides, counts, checksums = [], [], [], []
    slot = region.buffer
    for image in plan.images:
        meta = plan.metas[image.array]
        layout = meta.layout(image.index)
        behind = checksums_behind(layout, slot[image.offset :]).copy()
        file = f"{plan.directories[image.array]}/{meta.chunk_key(image.index)}"
        if recorded.get(file) != (layout.file_bytes, crc32c(behind.tobytes())):
            return None
        first.append(image.offset)
        strides.append(layout.piece_bytes + CHECKSUM_BYTES)
        counts.append(len(behind))
        checksums.append(behind)
    stride = np.repeat(strides, counts)
    within = np.arange(len(stride)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(first, counts) + within * stride
    return _Pieces(starts, stride - CHECKSUM_BYTES, np.concatenate(checksums))


def _are_sound(pieces: _Pieces, unstaged: Unstaged, slot: torch.Tensor) -> bool:
    """Whether what was copied is as its checksums say."""
    if not np.array_equal(pieces.checksums[pieces.numbers(unstaged.offsets)], unstaged.checksums):
        return False
    unknown = np.unique(pieces.numbers(unstaged.unchecked))
    found = checksums_of(pieces.starts[unknown] + slot.data_ptr(), pieces.sizes[unknown])
    return np.array_equal(pieces.checksums[unknown], found)


def _complete(parts: Iterable[Copies], leaves: Mapping[Path, TensorLeaf]) -> set[Path]:
    """The leaves of which these bring every element."""
    elements: Counter[Path] = Counter()
    for part in parts:
        elements.update(part.elements)
    return {
        path
        for path, count in elements.items()
        if path in leaves and count == sum(box.elements for box, _ in leaves[path].boxes)
    }


def _recorded(step_path: str, rank: int) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file that a rank wrote, as its part says."""
    part = read_part_of_step(step_path, rank)
    return {
        f"{directory}/{key}": (int(file_bytes), int(checksum))
        for directory, written in part["chunks"].items()
        for key, file_bytes, checksum in written
    }
