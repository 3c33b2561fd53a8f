"""Copy this rank's share of a state into a slot of shared memory: the one part of a save that training waits for.

    free slot -> samples of replicas -> copies -> the name of the save, and behind the copies the flag of the writer

Runs in the thread that trains. From one GPU the copies run on a stream of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt.errors import CheckpointTimeoutError
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.state_dict import FlatState
from ckpt.ranks.collectives import Ranks
from ckpt.saving.digests import Digests, Tolerance
from ckpt.saving.layout import RankLayout
from ckpt.saving.plan_cache import CachedPlan, PreparedState
from ckpt.saving.share import HEADER_BYTES, SAMPLES_OFFSET, Share
from ckpt.saving.staged_memory import StagedMemory
from ckpt.staging.arena import Arena, Slot, SlotState
from ckpt.staging.copy import Staged, only_gpu, stage
from ckpt.staging.held_runs import HeldRuns, RunHashes
from ckpt.staging.neighbors import SlotExchange
from ckpt.storage.compression import Compression
from ckpt.storage.names import SaveId
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.shared_memory import SharedMemory

_WAIT_SLICE_S = 1.0
_LOOK_S = 0.01  # between two looks whether another rank has completed a snapshot
_PATIENCE_S = 1.0  # with ranks that have not made a snapshot, while others go on


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """How state gets into shared memory.

    `slot_timeout_s` bounds the wait for a free slot; `on_divergence` says what is done about parameters that ranks
    have different; with `snapshots` saves are held in memory, too. With `only_changes` what a slot holds already is not
    copied again.
    """

    slots: int = 2
    max_host_bytes: int | None = None
    overlap: bool = False
    slot_timeout_s: float = 600.0
    compression: Compression | None = None
    grid: GridOptions = field(default_factory=GridOptions)
    on_divergence: Tolerance = "error"
    snapshots: bool = False
    only_changes: bool = False


@dataclass(frozen=True, slots=True)
class StagedShare:
    """A slot with what was copied, or is being copied, into it.

    The copies are complete when the 8 bytes at `flag_offset` hold `generation`. `checksummed` are the offsets of what
    has its checksum behind it. `contents` has a name for the bytes of each file, or None; it is empty if it has none.
    """

    slot: Slot
    flag_offset: int
    generation: int
    checksummed: frozenset[int]
    replicas: Digests | None
    times: dict[str, float]
    contents: tuple[bytes | None, ...] = ()

    @property
    def arrived(self) -> bool:
        """Whether the copies are complete."""
        return int.from_bytes(self.slot.region.buffer[self.flag_offset :][:8], "little") == self.generation


class HeldSlots(Protocol):
    """What holds slots that no process works with."""

    def release_superseded(self) -> None:
        """Let go of those that are not needed any more."""

    def give_up(self, newer: SaveId | None = None) -> None:
        """Let go of one that other ranks do not have, if one of them has the `newer` one; of all such without it."""

    def why(self) -> str:
        """Return what slots are held for, as the end of a message; empty if they are not."""


class Stager:
    """Stages the saves of one rank. For one thread.

    `wait(seconds)` lets the answers of writers come in, which free slots.
    """

    def __init__(self, ranks: Ranks, options: StagingOptions, wait: Callable[[float], None], held: HeldSlots) -> None:
        self._ranks = ranks
        self._options = options
        self._wait = wait
        self._held = held
        at_rest = max(1, options.slots - 1) if options.snapshots else 1
        self._arena = Arena(options.slots, pin=True, at_rest=at_rest)
        self._copy_stream = _CopyStream()
        self._hashes = RunHashes() if options.only_changes else None
        self._generation = 0
        self._shared_for: CachedPlan | None = None
        self._problem: Exception | None = None  # of the last `fit`
        self._exchange: SlotExchange | None = None  # of the next plan, whose slots are not exchanged yet
        self.memory = StagedMemory(self._arena)
        self.on_meet: Callable[[], None] = lambda: None
        """Is called when the ranks meet. Collective."""
        self.on_resize: Callable[[], None] = lambda: None
        """Is called before slots are replaced by larger ones, maybe in another thread."""

    @property
    def all_slots(self) -> tuple[Slot, ...]:
        """All slots."""
        return self._arena.slots

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self._options.slots

    def meet(self) -> None:
        """Do the part of the `fit` for a new plan that waits for other ranks, and needs no plan. Collective."""
        self._forget_exchange()
        self._exchange = SlotExchange(self._ranks)
        self.on_meet()

    def fit(self, plan: CachedPlan) -> None:
        """Make the slots large enough for a plan, and exchange them with the ranks on this node.

        That is once for each plan, if `meet` was called for it. In any thread. What this rank alone cannot do is raised
        by `check`, and so by the next `stage`.
        """
        self._problem = None
        try:
            self._make_room(plan.layout.plan.slot_bytes + HEADER_BYTES)
        except Exception as error:
            self._problem = error
        if self._shared_for is plan:
            return
        self._shared_for = plan
        try:
            if self._problem is None and self._exchange is not None:
                self.memory.share(self._exchange, plan, self._options.compression)
        finally:
            self._forget_exchange()  # the others wait there for this rank

    def check(self) -> None:
        """Raise what this rank alone could not do for the plan that the slots are for."""
        if self._problem is not None:
            raise self._problem

    def _make_room(self, needed: int) -> None:
        """Make the slots large enough, when no writer uses them. CheckpointTimeoutError, OSError."""
        if needed > self._arena.slot_bytes:
            deadline = Deadline(self._options.slot_timeout_s)
            while self._arena.in_use():
                self._wait_for_writers(deadline)
            self.on_resize()
            self._arena.resize(needed)

    def cancel_fit(self) -> None:
        """Share no slots for the last new plan: neighbours do not wait for these, nor does `fit`, in any thread."""
        if (exchange := self._exchange) is not None:
            exchange.cancel()

    def stage(self, prepared: PreparedState, save: SaveId, begin: float, *, compared: bool = True) -> StagedShare:
        """Copy this rank's share into a free slot, which is the writer's afterwards.

        `begin` (of `time.perf_counter`) is when the save was called; `compared` says whether samples are taken, to
        compare ranks. CheckpointTimeoutError if no slot becomes free.
        """
        self.check()
        plan = prepared.cached
        deadline, patience = Deadline(self._options.slot_timeout_s), Deadline(_PATIENCE_S)
        has_waited = not self._arena.has_ready()
        slot = self._arena.acquire(save.step, lambda: self._wait_for_slot(deadline, save, patience), deadline)
        try:
            waited = time.perf_counter()
            self._generation += 1
            Share(slot.region).clear()
            stream = self._copy_stream.stream_for(prepared.flat.outside_cpu())
            replicas = self._sample(prepared, save, slot, stream) if compared else None
            staged = self._copy(plan.layout, prepared.flat, slot, stream, has_waited=has_waited)
            held = slot.held_runs
            contents = () if held is None else held.end(plan.layout.runs_of_files)
            Share(slot.region).label(save.name, self._generation)
            done = time.perf_counter()
        except BaseException:
            slot.release()
            raise
        slot.state = SlotState.WRITING
        times = {
            "begin": time.time() - (done - begin),
            "wait_s": waited - begin,
            "stage_s": done - waited,
            "stall_s": done - begin,
        }
        self._copy_stream.note(staged)
        return StagedShare(slot, self._flag_offset, self._generation, staged.checksummed, replicas, times, contents)

    def keep(self, region: SharedMemory) -> None:
        """Use the slot with this memory again only when no other is free: a restore may need what it holds."""
        self._arena.keep(region)

    def forget(self) -> None:
        """After a fault: free all slots. What they hold stays, to be restored from."""
        self._copy_stream.forget()
        self._forget_exchange()
        self._arena.release_all()

    def close(self) -> None:
        """Give the memory back, soon after this has returned. Idempotent."""
        self._forget_exchange()
        self.memory.close()
        self._arena.close(wait=False)

    def _forget_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    @property
    def _flag_offset(self) -> int:
        return self._arena.slot_bytes - HEADER_BYTES

    def _sample(
        self, prepared: PreparedState, save: SaveId, slot: Slot, stream: torch.cuda.Stream | None
    ) -> Digests | None:
        """Take samples of what other ranks have, too."""
        tolerance = self._options.on_divergence
        if prepared.cached.save_plan.world_size == 1 or tolerance == "ignore":
            return None
        room = slot.tensor, self._flag_offset + SAMPLES_OFFSET
        return prepared.cached.replicas.sample(prepared.flat, prepared.encoded, save.name, tolerance, room, stream)

    def _copy(
        self,
        layout: RankLayout,
        flat: FlatState,
        slot: Slot,
        stream: torch.cuda.Stream | None,
        *,
        has_waited: bool,
    ) -> Staged:
        if slot.prepared_for is not layout:
            slot.held_runs = None
            if slot.prepared_for is not None:  # new memory is zero
                slot.tensor[: self._flag_offset].zero_()
            slot.prepared_for = ()  # nothing, if this is interrupted
            layout.prepare(slot.region.buffer)
            if self._hashes is not None:
                slot.held_runs = HeldRuns(layout, layout.copies.table.nbytes, self._hashes)
            slot.prepared_for = layout
        # While this waited for a slot, another thread may have replaced memory: the addresses are read again.
        known = None if has_waited else flat.memory_of(layout.copies.table.paths)
        staged = stage(layout.copies, flat.local_tensors(), slot.tensor, stream, known, slot.held_runs)
        flag = slot.tensor[self._flag_offset :][:8].view(torch.int64)
        if stream is None:
            flag.fill_(self._generation)
            return staged
        staged.then_set(flag, self._generation)
        if self._options.overlap:
            self._copy_stream.hook_optimizers(flat)
        else:
            staged.wait()
        return staged

    def _wait_for_slot(self, deadline: Deadline, save: SaveId, patience: Deadline) -> None:
        """Wait until something happens that may have freed a slot for this save."""
        self._held.release_superseded()
        if patience.is_over and not self._arena.has_free():
            self._held.give_up(save)
        if self._arena.has_free():  # but maybe without memory: another one may be free before it has that
            self._wait(0.0)
            return
        why = self._held.why()
        if deadline.is_over:
            self._held.give_up()
        self._wait_for_writers(deadline, why)

    def _wait_for_writers(self, deadline: Deadline, why: str = "") -> None:
        """Take in messages of the writers, and wait for one if there is none; CheckpointTimeoutError at the deadline.

        `why` is for what slots are held that no writer uses.
        """
        if deadline.is_over:
            steps = sorted({slot.step for slot in self._arena.in_use() if slot.step is not None})
            saves = f"the saves of steps {steps} hold them. Is a request not scheduled, or storage stuck?"
            reasons = "; ".join(reason for reason in (why, saves if steps else "") if reason)
            raise CheckpointTimeoutError(
                f"rank {self._ranks.rank}: no staging slot became free in {deadline.timeout_s:g} s; {reasons}",
                rank=self._ranks.rank,
            )
        self._wait(min(_LOOK_S if why else _WAIT_SLICE_S, deadline.left_s))


class _CopyStream:
    """The CUDA stream for copies, and the copies of the last save as long as they run beside training."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._hooked: set[int] = set()
        self._running: Staged | None = None

    def stream_for(self, tensors: Collection[torch.Tensor]) -> torch.cuda.Stream | None:
        """Return the stream when tensors are on one GPU; from several they are copied one after the other."""
        device = only_gpu(tensors)
        if device is None:
            return None
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def hook_optimizers(self, flat: FlatState) -> None:
        """Make every optimizer of the state wait, on its stream, for running copies before it changes anything."""
        for stateful in (owner.stateful for owner in flat.owners):
            if isinstance(stateful, torch.optim.Optimizer) and id(stateful) not in self._hooked:
                self._hooked.add(id(stateful))
                stateful.register_step_pre_hook(self._before_optimizer_step)

    def note(self, staged: Staged) -> None:
        """Remember the copies of the newest save."""
        self._running = None if staged.done else staged

    def forget(self) -> None:
        """Let no optimizer wait for the last copies."""
        self._running = None

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._running is not None:
            self._running.order_before(torch.cuda.current_stream())
            self._running = None
