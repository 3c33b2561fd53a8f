"""Checkpoints in staging memory: after a fault the newest step is usually still there and need not be read.

A slot keeps a step until it is staged over. Its last page says which save is in it (see `share`). The bytes are used
only if they have the checksums that were recorded, which is verified while they are copied. Runs in the trainer. Only
`share` is collective.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.errors import CheckpointCorruptError, CheckpointError
from ckpt.paths import Path
from ckpt.planning.state_dict import TensorLeaf
from ckpt.saving.layout import LocalBoxes, RankLayout, make_restore_layout
from ckpt.saving.plan_cache import CachedPlan
from ckpt.saving.share import HEADER_BYTES, ChunksInSlot, Share, chunks_in_slot
from ckpt.staging.arena import Arena
from ckpt.staging.copy import Unstaged, unstage
from ckpt.staging.copy_table import Copies
from ckpt.staging.neighbors import SlotExchange
from ckpt.staging.runs import checksums_of
from ckpt.storage.compression import Compression
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document
from ckpt.storage.memory_step import MemoryStep
from ckpt.storage.names import part_name
from ckpt.storage.pack_index import PackIndex
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import StepSource
from inprocess.ipc.shared_memory import SharedMemory

_log = logging.getLogger("ckpt")
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _SharedPlan:
    """The plan by which this rank and its neighbours have staged, and the options it was made with."""

    cached: CachedPlan
    compression: Compression | None

    def layout_of(self, holder: int, boxes: LocalBoxes, rank: int) -> RankLayout:
        """Return what the slot of `holder` has of these boxes."""
        own = self.cached.layout
        if holder == rank == own.plan.rank and boxes == self.cached.boxes:
            return own
        return make_restore_layout(self.cached.save_plan, holder, boxes, rank)


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
        self._adopted: list[SharedMemory] = []
        self._needed: str | None = None
        self._own_rank = 0
        self._plan: _SharedPlan | None = None

    def share(self, exchange: SlotExchange, plan: CachedPlan, compression: Compression | None) -> None:
        """Exchange slots with the neighbours, after a state was planned."""
        before = [*self._theirs(), *self._adopted]
        self._plan = _SharedPlan(plan, compression)
        self._own_rank = exchange.rank
        self._neighbours, self._adopted = {}, before  # what an interrupt leaves
        self._neighbours = exchange.run(slot.region for slot in self._arena.slots)
        self._keep_adopted()

    def fill(
        self, source: StepSource, summary: Mapping[str, Any], leaves: Mapping[Path, TensorLeaf], rank: int
    ) -> Filled:
        """Copy what memory holds of a published step into `leaves`; return which of them are complete now.

        The others have undefined contents, and must be read from storage. `summary` is that of the step. Of what each
        rank has for itself, that of `rank` is taken.
        """
        plan = self._plan
        if plan is None or summary.get("plan") != plan.cached.save_plan.digest:
            return Filled(frozenset(), 0, 0)
        if plan.compression is not None and not isinstance(source, MemoryStep):
            return Filled(frozenset(), 0, 0)  # checksums of compressed files say nothing about the bytes in the slots
        boxes = {path: leaf.boxes for path, leaf in leaves.items()}
        tensors = {path: leaf.local for path, leaf in leaves.items()}
        save_name = str(summary["save"])
        sound: list[Copies] = []
        complete: set[Path] = set()
        copied: dict[int, dict[Path, int]] = {}
        holding, own_shares = self._holding(save_name)
        for holder, region in holding.items():
            if len(complete) == len(leaves):
                break  # laying out the slot of a neighbour takes time, also if it has nothing for this rank
            layout = plan.layout_of(holder, boxes, rank)
            if not layout.copies.ops:
                continue
            if layout.plan.slot_bytes + HEADER_BYTES > region.size:  # of another rank, or plan
                continue
            by_path = _verify_and_copy(source, layout, region, tensors)
            # A neighbour that has not noticed the fault yet may have begun to stage over it.
            if by_path is not None and Share(region).save_name == save_name:
                copied[holder] = by_path
                sound.append(layout.copies)
                complete = _complete(sound, leaves)
        nbytes = {holder: sum(n for path, n in by.items() if path in complete) for holder, by in copied.items()}
        own = sum(nbytes.pop(holder, 0) for holder in own_shares)
        return Filled(frozenset(complete), own, sum(nbytes.values()))

    def close(self) -> None:
        """Unmap the slots of the neighbours, soon. Idempotent."""
        regions = [*self._theirs(), *self._adopted]
        self._neighbours, self._adopted = {}, []
        _close_later(regions)

    def _holding(self, save_name: str) -> tuple[dict[int, SharedMemory], frozenset[int]]:
        """Return the slots with all that a rank has staged of this save, by rank, and which of them are this rank's.

        A whole share says whose it is; ranks may have had other numbers then than when slots were exchanged.
        """
        own = [(self._own_rank, slot.region) for slot in self._arena.slots]
        theirs = [(rank, region) for rank, regions in self._neighbours.items() for region in regions]
        found: dict[int, SharedMemory] = {}
        from_own: set[int] = set()
        for rank, region in (*own, *theirs, *((-1, region) for region in self._adopted)):
            if Share(region).save_name == save_name:
                documents = Share(region).documents()
                owner = rank if documents is None else documents.of.rank
                if found.setdefault(owner, region) is region and (rank, region) in own:
                    from_own.add(owner)
        return found, frozenset(from_own)

    def index_of(self, data: bytes) -> PackIndex | None:
        """Return what the bytes of an index say if they are those of the present plan; None if they are others."""
        known = None if self._plan is None else self._plan.cached.save_plan
        return known.index if known is not None and known.index_bytes == data else None

    @property
    def regions(self) -> list[SharedMemory]:
        """All slots that this process has: its own first."""
        return [*(slot.region for slot in self._arena.slots), *self._theirs(), *self._adopted]

    @property
    def kept(self) -> list[SharedMemory]:
        """The slots of this rank, and those that it took over: not those of neighbours, which keep them themselves."""
        return [*(slot.region for slot in self._arena.slots), *self._adopted]

    def adopt(self, regions: Iterable[SharedMemory]) -> None:
        """Take over slots of ranks that may not be there any more. See `need`."""
        self._adopted += regions

    def need(self, save_name: str | None) -> None:
        """Keep slots of former neighbours as long as they hold a share of this save; give back the others, soon."""
        self._needed = save_name
        self._keep_adopted()

    def _keep_adopted(self) -> None:
        """Give back the adopted slots that are not needed, or that this process has otherwise."""
        if not self._adopted:
            return
        known = {os.fstat(region.fd).st_ino for region in self._theirs()}
        known |= {os.fstat(slot.region.fd).st_ino for slot in self._arena.slots}
        needed = []
        for region in self._adopted:
            share, number = Share(region), os.fstat(region.fd).st_ino
            if share.is_whole and share.save_name == self._needed and number not in known:
                needed.append(region)
                known.add(number)
        superfluous = [region for region in self._adopted if region not in needed]
        self._adopted = needed
        _close_later(superfluous)

    def _theirs(self) -> list[SharedMemory]:
        return [region for regions in self._neighbours.values() for region in regions]


def _close_later(regions: list[SharedMemory]) -> None:
    """Unmap memory in a thread, as that takes long; the interpreter waits for its end."""

    def close() -> None:
        for region in regions:
            region.close()

    if regions:
        threading.Thread(target=close, name="ckpt-unmap", daemon=False).start()


def _verify_and_copy(
    source: StepSource, layout: RankLayout, region: SharedMemory, tensors: Mapping[Path, torch.Tensor]
) -> dict[Path, int] | None:
    """Copy the slot into the tensors, and return how many bytes of each were copied.

    None if the slot does not hold what was written; the contents of the tensors are then undefined.
    """
    rank = layout.plan.rank
    slot = torch.frombuffer(region.buffer, dtype=torch.uint8)
    unstaged = unstage(layout.copies, tensors, slot)
    try:  # while bytes are on their way to a GPU
        chunks = chunks_in_slot(layout.plan, region)
        sound = chunks.files == _recorded(source, rank) and _are_sound(chunks, unstaged, slot)
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


def _are_sound(chunks: ChunksInSlot, unstaged: Unstaged, slot: torch.Tensor) -> bool:
    """Return whether what was copied has the checksums that are in the slot."""
    if not np.array_equal(chunks.checksums[chunks.numbers(unstaged.offsets)], unstaged.checksums):
        return False
    unchecked = np.zeros(len(chunks.starts), bool)
    unchecked[chunks.numbers(unstaged.unchecked)] = True
    unknown = np.flatnonzero(unchecked)
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
