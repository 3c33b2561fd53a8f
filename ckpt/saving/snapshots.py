"""The snapshots of this rank: which slots hold them, and how long.

    staged ──▶ checksums complete ──▶ counted in the store ──▶ complete on all ranks ──▶ the older ones are let go

A slot is held until a newer snapshot is complete on all ranks, or a newer save is published: so there is always a step
that every rank has. A save is a snapshot, too, if its whole share is in a slot. No collective, no wait for other ranks
but for a slot.

Runs in the thread that trains. Checksums that the copies did not make (of tensors on a GPU) are made in a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.native import RUN
from ckpt.ranks.collectives import Ranks
from ckpt.saving.lineage import Lineage
from ckpt.saving.plan_cache import PreparedState
from ckpt.saving.share import PlanDocuments, Share, chunks_in_slot
from ckpt.saving.snapshot_counts import SnapshotCounts
from ckpt.saving.stage import StagedShare
from ckpt.saving.task import WritePlan, are_in, pack_offsets
from ckpt.staging.arena import Slot
from ckpt.staging.runs import copy_together
from ckpt.storage.names import SaveId
from inprocess.ipc.threads import JoinableThread

_log = logging.getLogger("ckpt")
_INLINE_BYTES = 4 << 20  # of checksums that are not worth a thread
_ARRIVAL_PAUSE_S = 0.001
_SAVES_KNOWN = 8  # more than slots can hold snapshots of the same steps


@dataclass(slots=True, eq=False)
class _Held:
    """A snapshot in a slot, the `used`-th that was acquired. `thread` makes its share whole, and is None then.

    `counted` is the session in which this rank has counted it; it is `complete` if all ranks have it.
    """

    save: SaveId
    slot: Slot
    used: int
    thread: JoinableThread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    whole: bool = False
    counted: str | None = None
    complete: bool = False


class HeldSnapshots:
    """The snapshots that the slots of one rank hold, oldest first."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._held: list[_Held] = []
        self._counts = SnapshotCounts(ranks)
        self._session: str | None = None  # in which snapshots are counted; None after a fault, until there is one
        self._order = 0  # of the newest one
        self._saves: dict[str, tuple[int, int]] = {}  # the last ones, with their iteration and order
        self.last_restart = 0
        """The restart index of the newest one."""
        self.on_complete: Callable[[SaveId], None] = lambda save: None
        """Is called with a snapshot that is complete on all ranks, when slots of older ones are needed."""
        self.on_poll: Callable[[SaveId | None, SaveId | None], None] = lambda staged, whole: None
        """Is called often, with the newest snapshot, and the newest one that is whole on this rank."""

    @property
    def steps(self) -> list[int]:
        """The steps that are held, oldest snapshot first."""
        return [held.save.step for held in self._held]

    @property
    def saves(self) -> list[tuple[str, int, int]]:
        """The last saves that were snapshots, held or not: name, iteration, and order in that."""
        return [(name, *made) for name, made in self._saves.items()]

    def add(self, prepared: PreparedState, save: SaveId, staged: StagedShare, lineage: Lineage) -> None:
        """Hold a slot that was staged just now, and complete its share. It is counted when that is done."""
        plan = prepared.cached.layout.plan
        share = Share(staged.slot.region)
        if staged.slot.described_for is not prepared.cached:
            staged.slot.described_for = None
            share.describe(PlanDocuments.of(plan))
            staged.slot.described_for = prepared.cached
        self._order += 1  # two of the same step differ in nothing else that says which is the later one
        part: dict[str, Any] = {"save": save.name, "values": prepared.values, "restart": lineage.restart or 0}
        part["order"] = self._order
        if save.owner:
            self._saves[save.name] = lineage.restart or 0, self._order
            while len(self._saves) > _SAVES_KNOWN:
                del self._saves[next(iter(self._saves))]
        if plan.rank == 0:
            part["lineage"] = lineage.to_document()
        self.last_restart = lineage.restart or 0
        held = _Held(save, staged.slot, staged.slot.used)
        work = _Completing(share, plan, staged, part, held)
        self._held.append(held)  # before the slot is kept, so that no fault leaves it held
        staged.slot.is_kept = True
        if work.nbytes <= _INLINE_BYTES and staged.arrived:
            work.run()
        else:
            held.thread = JoinableThread(work.run, "ckpt-snapshot")
            held.thread.start()
        self.poll()

    def poll(self) -> None:
        """Count what has become whole since the last call."""
        for held in self._held:
            if held.thread is not None and not held.thread.is_alive():
                held.thread.join()
                held.thread = None
            is_due = held.whole and self._session is not None and held.counted != self._session
            if is_due and self._counts.count(held.save.name):
                held.counted = self._session
        newest = self._held[-1].save if self._held else None
        self.on_poll(newest, next((held.save for held in reversed(self._held) if held.whole), None))

    def release_superseded(self) -> None:
        """Let go of the slots of all snapshots that are older than one that is complete on all ranks."""
        self.poll()
        newest = self._counts.newest_of([held.save.name for held in self._held if self._is_counted(held)])
        for held in self._held:
            held.complete = held.complete or held.save.name == newest
        complete = [held for held in self._held if held.complete]
        if complete:
            self._release_before(complete[-1])
            self.on_complete(complete[-1].save)

    def published(self, save: SaveId) -> None:
        """A save is published: the snapshots before it are not needed any more."""
        found = next((held for held in self._held if held.save == save), None)
        if found is not None:
            self._release_before(found)

    def give_up(self, newer: SaveId | None = None) -> None:
        """Let go of the oldest snapshot that is not complete, if another rank has the `newer` one; of all without it.

        That another rank is ahead shows that it has left one out, or waits for this one. The newest snapshot that is
        complete on all ranks is not given up.
        """
        if newer is not None and not self._counts.is_begun(newer.name):
            return
        for held in [held for held in self._held if not held.complete]:
            if self._is_counted(held) and not self._counts.withdraw(held.save.name):
                return
            _log.warning("the snapshot of step %d is given up: not all ranks have made it", held.save.step)
            self._let_go(held)
            if newer is not None:
                return

    def why(self) -> str:
        """Return what slots are held for, as the end of a message; empty if they are not."""
        waiting = [held for held in self._held if not held.whole]
        if waiting:
            return f"the copies or checksums of the snapshot of step {waiting[0].save.step} are not complete"
        if not self._held:
            return ""
        count, world_size = self._counts.progress(self._held[-1].save.name)
        return (
            f"snapshots of steps {self.steps} are held until a newer one is complete on all ranks; that of step "
            f"{self._held[-1].save.step} is on {count} of {world_size}"
        )

    def finish(self, timeout_s: float) -> None:
        """Wait until every share is complete, or given up, at most `timeout_s`: its copies may never arrive."""
        deadline = time.monotonic() + timeout_s
        for held in self._held:
            if held.thread is not None:
                while held.thread.is_alive() and time.monotonic() < deadline:
                    held.thread.join(max(0.0, min(0.05, deadline - time.monotonic())))
                held.stop.set()
                held.thread.join()
                held.thread = None

    def forget_counts(self) -> None:
        """After a fault: what was counted says nothing any more, as ranks may be replaced. The next session counts."""
        self._counts.forget()
        self._session = None

    def begin_session(self, session: str) -> None:
        """Count in a session on which all ranks have agreed; what was counted in another one is counted again."""
        if session != self._session:
            self._session = session
            self._counts.begin(session)

    def _is_counted(self, held: _Held) -> bool:
        return self._session is not None and held.counted == self._session

    def settle(self, keep: int, save: str | None) -> None:
        """After a restore of step `keep`: give up every snapshot of a later step, so that no rank can restore it.

        If it was restored from the snapshot `save`, all ranks have that one, or need none; else none is needed.
        """
        for held in [held for held in self._held if held.save.step > keep]:
            if held.slot.used == held.used:
                Share(held.slot.region).clear()
            self._let_go(held)
        restored = next((held for held in self._held if held.save.name == save), None)
        if restored is not None:
            restored.complete = True
        else:
            for held in list(self._held):
                self._let_go(held)

    def drop(self, save: str) -> None:
        """Let go of a snapshot that cannot be restored."""
        for held in [held for held in self._held if held.save.name == save]:
            self._let_go(held)

    def close(self) -> None:
        """End what runs, and let go of everything."""
        self.finish(0.0)
        for held in list(self._held):
            self._let_go(held)

    def _release_before(self, newest: _Held) -> None:
        for held in self._held[: self._held.index(newest)]:
            self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        """Let go of a slot, once: an interrupted call may be repeated when the slot holds something else."""
        held.stop.set()
        if held.thread is not None:
            held.thread.join()
        if held.slot.used == held.used:
            held.slot.let_go()
        self._held.remove(held)


class _Completing:
    """Makes the checksums that are missing in a slot, and writes the part of its share."""

    def __init__(self, share: Share, plan: WritePlan, staged: StagedShare, part: dict[str, Any], held: _Held) -> None:
        self._share = share
        self._plan = plan
        self._staged = staged
        self._part = part
        self._held = held
        starts, sizes = plan.inner_chunks.each(0, len(plan.inner_chunks.starts))
        missing = ~are_in(pack_offsets(staged.checksummed), starts)
        self._starts, self._sizes = starts[missing], sizes[missing]

    @property
    def nbytes(self) -> int:
        """How many bytes have no checksum yet."""
        return int(self._sizes.sum())

    def run(self) -> None:
        """Do it. In the trainer's thread or another; an error leaves the snapshot incomplete, and is logged."""
        try:
            while not self._staged.arrived:
                if self._held.stop.wait(_ARRIVAL_PAUSE_S):
                    return
            region = self._share.region
            if len(self._starts):
                runs = np.zeros(len(self._starts), RUN)
                runs["from"] = np.frombuffer(region.buffer, np.uint8).ctypes.data + self._starts
                runs["bytes"] = self._sizes
                runs["checksum_at"] = runs["from"] + runs["bytes"]
                copy_together(runs)
            files = chunks_in_slot(self._plan, region).files
            self._share.add_part({**self._part, "files": [[number, *file] for number, file in files.items()]})
            self._held.whole = True
        except OSError as error:
            _log.warning("the snapshot of step %d is not complete on this rank: %s", self._held.save.step, error)
