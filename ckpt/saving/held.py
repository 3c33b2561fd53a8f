"""What staging memory still holds: after a fault the newest step is usually there, and needs not be read.

A slot keeps a step until it is staged over. Its last page says which save is in it:

    word 0          the generation, set behind the copies
    word 1          the generation that word 0 must have for the slot to be complete
    byte 64 on      the name of the save

The bytes are believed only when their checksums, of which the writer recorded one for each file, are found again while
they are copied. Runs in the trainer; makes no collective, except for `share`.
"""

from __future__ import annotations

import logging
import struct
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import CheckpointError
from ckpt.paths import Path
from ckpt.planning.state_dict import TensorLeaf
from ckpt.ranks import Ranks
from ckpt.saving.part import Image, LocalBoxes, Part, PartPlan, copies_from
from ckpt.saving.planner import Planned
from ckpt.shared_memory import SharedMemory
from ckpt.staging.arena import Arena, Slot
from ckpt.staging.copy import unstage
from ckpt.staging.copy_op import CopyOp
from ckpt.staging.peers import exchange_slots
from ckpt.storage.checksums import CHECKSUM_BYTES, crc32c, crc32c_of_checksums
from ckpt.storage.commit import SaveId, read_part_of_step

__all__ = ["HEADER_BYTES", "HeldMemory"]

_log = logging.getLogger("ckpt")
HEADER_BYTES = 4096  # a page behind the images
_NAME_OFFSET = 64
_NAME_BYTES = 256


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
        sound: list[CopyOp] = []
        copied: dict[int, dict[Path, int]] = {}
        for holder, region in self._holding(save_name).items():
            part = layout.part_of(holder, boxes, rank)
            if part.plan.pieces > 1 or not part.copies[0]:
                continue
            by_path = _verify_and_copy(step_path, part, region, tensors)
            # A neighbour that the fault has not reached yet may have begun to stage over it.
            if by_path is not None and self._holds(region, save_name):
                copied[holder] = by_path
                sound += part.copies[0]
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
    try:
        recorded = _recorded(step_path, part.plan.rank)
    except CheckpointError as error:
        _log.warning("the staging memory of rank %d is not used: %s", part.plan.rank, error)
        return None
    slot = torch.frombuffer(region.buffer, dtype=torch.uint8)
    on_cpu = [op for op in part.copies[0] if tensors[op.path].is_cpu]
    elsewhere = [op for op in part.copies[0] if not tensors[op.path].is_cpu]
    by_image = zip(part.plan.images, _by_image(part.plan, on_cpu), _by_image(part.plan, elsewhere), strict=True)
    damaged = threading.Event()

    def take(job: tuple[Image, list[CopyOp], list[CopyOp]]) -> dict[Path, int]:
        image, ops, others = job
        if damaged.is_set() or not (ops or others):
            return {}
        file = _file_of(part.plan, image, region)
        if recorded.get(file.name) != file.identity:
            damaged.set()
            return {}
        unstaged = unstage(ops, tensors, slot, alone=True)
        if not file.is_sound(ops + others, unstaged.checksums):
            damaged.set()
        return unstaged.nbytes

    with ThreadPoolExecutor(torch.get_num_threads(), "ckpt-verify") as pool:
        counts = list(pool.map(take, by_image))
    if damaged.is_set():
        _log.warning(
            "%s: the staging memory of rank %d is not what was written; reading from storage",
            step_path,
            part.plan.rank,
        )
        return None
    counts.append(unstage(elsewhere, tensors, slot).nbytes)
    copied: Counter[Path] = Counter()
    for count in counts:
        copied.update(count)
    return copied


@dataclass(frozen=True, slots=True)
class _File:
    """A file as its image in a slot has it: where its pieces begin, with the checksums behind them."""

    name: str
    file_bytes: int
    piece_bytes: int
    pieces: dict[int, int]
    memory: memoryview

    @property
    def identity(self) -> tuple[int, int]:
        """What its writer recorded, if it is that file."""
        return self.file_bytes, crc32c_of_checksums(self.pieces.values())

    def is_sound(self, ops: Iterable[CopyOp], known: Mapping[int, int]) -> bool:
        """Whether the pieces that the operations read are as their checksums say; `known` are some that were made."""
        starts = list(self.pieces)
        used = {starts[bisect_right(starts, op.offset) - 1] for op in ops}
        for start in used:
            found = known[start] if start in known else crc32c(self.memory[start : start + self.piece_bytes])
            if found != self.pieces[start]:
                return False
        return True


def _file_of(plan: PartPlan, image: Image, region: SharedMemory) -> _File:
    meta = plan.metas[image.array]
    layout = meta.layout(image.index)
    pieces = {}
    for piece in layout.pieces:
        start = image.offset + piece.offset
        end = start + layout.piece_bytes
        pieces[start] = int.from_bytes(region.buffer[end : end + CHECKSUM_BYTES], "little")
    name = f"{plan.directories[image.array]}/{meta.chunk_key(image.index)}"
    return _File(name, layout.file_bytes, layout.piece_bytes, pieces, region.buffer)


def _by_image(plan: PartPlan, ops: Iterable[CopyOp]) -> list[list[CopyOp]]:
    """The operations, by the image they read."""
    starts = [image.offset for image in plan.images]  # ascending: there is one piece only
    grouped: list[list[CopyOp]] = [[] for _ in starts]
    for op in ops:
        grouped[bisect_right(starts, op.offset) - 1].append(op)
    return grouped


def _complete(ops: Iterable[CopyOp], leaves: Mapping[Path, TensorLeaf]) -> set[Path]:
    """The leaves of which the operations bring every element."""
    elements: dict[Path, int] = {}
    for op in ops:
        count = 1
        for part in op.source:
            count *= part.stop - part.start
        elements[op.path] = elements.get(op.path, 0) + count
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
