"""The trainer's half of a save: plan, stage, and return the request that writes.

    state -> plan (cached for its structure) -> staged copy -> WriteTask -> AsyncRequest(SaveHandle)

Touches storage only to claim the root, before the first save of a run. Runs in the thread that trains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ckpt.arguments import check_step
from ckpt.async_calls import AsyncCallsQueue, AsyncRequest
from ckpt.errors import CheckpointError
from ckpt.events import Retained, SnapshotStaged
from ckpt.keeper.lingering import LingeringMemory
from ckpt.keeper.trainer_side import Keeper
from ckpt.observing import emit, is_observed
from ckpt.options import Snapshots
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.failure import Failure
from ckpt.saving.digests import DifferingNames
from ckpt.saving.drain import InFlight, drain, refuse_others, settle
from ckpt.saving.handle import SaveHandle
from ckpt.saving.host_memory import HostLimit
from ckpt.saving.lineage import Lineage, checked_metrics, own_versions
from ckpt.saving.memory_tier import MemoryTier
from ckpt.saving.observed_save import ObservedSave
from ckpt.saving.plan_cache import PlanCache, PreparedState
from ckpt.saving.recover import Branch
from ckpt.saving.replicator import Replicator
from ckpt.saving.root_claim import RootClaim
from ckpt.saving.save_failures import SaveFailures
from ckpt.saving.scheduled import Scheduled, wait_for_program
from ckpt.saving.snapshots import HeldSnapshots
from ckpt.saving.stage import StagedShare, Stager, StagingOptions
from ckpt.saving.staged_memory import StagedMemory
from ckpt.saving.task import COORDINATOR, SaveOptions, StepsRemoved, WriteTask, pack_offsets
from ckpt.saving.timers import Timers
from ckpt.staging.arena import SlotState
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId
from ckpt.storage.node_packs import NodePacks
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.process import Process
from inprocess.ipc.restart_index import current_restart_index
from inprocess.ipc.threads import finishes_within

_log = logging.getLogger("ckpt")
_SOON_ENOUGH_S = 1.0  # to learn an outcome by looking
_LISTEN_S = 0.1
_LISTENS_PER_S = 10_000.0  # requests of all ranks together to the store
_NUDGED_S = 1.0


@dataclass(slots=True)
class _Undecided:
    """A save that this rank has staged, or begun to stage; `handle` once it is staged."""

    world_size: int
    observed: ObservedSave
    handle: SaveHandle | None = None


class Saver:
    """Plans and stages the saves of one Checkpointer, and settles them after a fault. For one thread."""

    def __init__(
        self,
        root: Root,
        ranks: Ranks,
        queue: AsyncCallsQueue,
        keeper: Keeper,
        staging: StagingOptions,
        options: SaveOptions,
        failures: SaveFailures,
        replicas: Snapshots | None = None,
        lingering: LingeringMemory | None = None,
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._queue = queue
        self._slot_timeout_s = staging.slot_timeout_s
        self._options = options
        self.failures = failures
        self.snapshots = HeldSnapshots(ranks)
        self._stager = Stager(ranks, staging, queue.wait_for_events, self.snapshots)
        self.replicator: Replicator | None = None
        if replicas is not None:
            self.replicator = replicator = Replicator(ranks, lambda: self._stager.all_slots, replicas, keeper)
            self.snapshots.on_poll = replicator.poll
            self._stager.on_meet = lambda: replicator.meet(ranks)
        self._lingering = lingering
        self._stager.on_resize = self._linger_before_resize
        self._tier = MemoryTier(self.snapshots, self._stager.memory, self.replicator, lingering, self._root.ownership)
        self._saves_are_snapshots = staging.snapshots
        limit = HostLimit(staging.slots, staging.max_host_bytes)
        self._plans = PlanCache(ranks, staging.grid, limit, staging.compression)
        self.timers = Timers()  # of every call that writes
        self._differing = DifferingNames()
        self._in_flight: dict[SaveId, _Undecided] = {}  # entered before staging, so that no fault loses one
        self.scheduled = Scheduled(root, queue, self._staged)
        self._observed: list[ObservedSave] = []  # of which the end was not emitted, when the last save began
        self.held: Callable[[], Iterable[str]] = tuple
        """Returns the saves of which no step is to be removed yet, by name; called for each save."""
        packs = None if options.node_local is None else NodePacks(options.node_local, root)
        self.root_claim = RootClaim(root, packs, self._wait_for_program)
        self._versions = own_versions()
        self._closed = False
        self._listening = False
        self._listen_at = 0.0
        self._listened_for: SaveId | None = None
        self._not_finite: set[str] = set()  # names of metrics, of which a value was so

    @property
    def memory(self) -> StagedMemory:
        """What the slots hold of published steps."""
        self._plans.settle()  # which may just be making slots
        return self._stager.memory

    @property
    def memory_tier(self) -> MemoryTier:
        """What this rank and its neighbours hold of snapshots."""
        self._plans.settle()
        return self._tier

    def continue_from(self, branch: Branch, seen: int | None) -> None:
        """Let the next save claim the root anew and continue the step of `branch`. `seen` is a token seen since."""
        self.failures.restored()
        self.root_claim.continue_from(branch, seen)
        self._plans.end_session()

    def warmup(self, state: Any, *, claim: bool = True) -> None:
        """Plan, map the staging memory and start the writers, as the first save of a structure does. Collective.

        Claims the root if so asked, or if this job has owned it before and no save is in flight.
        """
        self._ranks.doing = "warmup"
        Process.here()  # reads /proc the first time
        self._queue.start()
        claims = claim or (self.root_claim.token is not None and not self._in_flight)
        prepared = self._plans.prepare(state, self.root_claim, slots=self._stager, claim=claims, saves=False)
        self._stager.fit(prepared.cached)
        self._stager.check()

    def warmup_in_background(self, state: Any) -> None:
        """Begin to do what `warmup` does, as training may go on; the next save waits for it. Collective.

        Does not claim the root, unless this job has owned it before.
        """
        if self._in_flight:  # in slots that could not be replaced
            self.warmup(state, claim=False)
            return
        self._ranks.doing = "warmup"
        Process.here()
        self._plans.begin(state, self.root_claim, self._stager, claim=self.root_claim.token is not None)
        try:
            self._queue.start()  # its process and the thread would both take time from the ranks that agree
        finally:
            self._plans.go_on(self._stager)

    @property
    def last_rank(self) -> int | None:
        """This rank, also after its process group was destroyed; None if it never had one."""
        return self._ranks.last_rank

    @property
    def in_flight(self) -> list[SaveId]:
        """The saves that this rank has staged, or begun to stage, and whose outcome it does not know, oldest first."""
        return list(self._in_flight)

    def request(
        self,
        state: Any,
        step: int,
        begin: float,
        metrics: Mapping[str, Any] | None = None,
        *,
        mirror: bool = False,
        pace: Mapping[str, Any] | None = None,
    ) -> tuple[AsyncRequest, SaveId]:
        """Stage `state`; return the request that writes it, and the save. See `Checkpointer.save_request`.

        `mirror` (the step is due for it) and `pace` are for its `Lineage`: those of rank 0 count.
        """
        check_step(step, "async_save")
        self.scheduled.note_thread()
        self._ranks.doing = f"the save of step {step}"
        self._plans.begin_attempt(step)
        self._observed = [each for each in self._observed if not each.ended]
        observed = ObservedSave(step, self._ranks.rank, time.perf_counter() - begin, self._observed)
        try:
            prepared = self._prepared(state, self.root_claim)
            about = checked_metrics(metrics, self._not_finite), self._versions, mirror, self.root_claim.run, pace
            lineage = Lineage(current_restart_index(), *about)
            save = self._plans.save_id()
            assert save is not None
            self.root_claim.note_save(save.owner)
            if not self._listening and self._look_rarely():
                self._listening = True
                self._queue.listen(self._listen)
            undecided = self._in_flight[save] = _Undecided(prepared.cached.save_plan.world_size, observed)
            handle = undecided.handle = self._stage(prepared, save, begin, lineage, observed)
        except Exception as error:
            self._fail(error, step, observed, is_staging=self._plans.save_id() in self._in_flight)
        task = handle.task
        done = [
            observed.published,  # unless the answer of the writer has told that
            handle.on_decided,
            lambda: self.root_claim.taken_over(task.branch),
            lambda: self._stager.keep(task.region),
            lambda: self.snapshots.published(task.save),
        ]
        return AsyncRequest(handle, (), done), save

    def snapshot(self, state: Any, step: int, begin: float) -> None:
        """Stage `state`, and hold it in memory. See `Checkpointer.snapshot`."""
        check_step(step, "snapshot")
        if self._stager.slots < 2:
            raise ValueError("snapshots need at least two slots, one to hold one while the next is made")
        self._ranks.doing = f"the snapshot of step {step}"
        self._saves_are_snapshots = True
        self._plans.begin_attempt(step)
        prepared = self._prepared(state)
        save = self._plans.save_id()
        assert save is not None
        staged = self._stager.stage(prepared, save, begin, compared=False)
        run = self.root_claim.run
        self._hold(prepared, save, staged, Lineage(current_restart_index(), {}, self._versions, run=run))
        staged.slot.release()
        if is_observed():
            nbytes = sum(file.nbytes for file in prepared.cached.layout.plan.files)
            times = (staged.times[name] for name in ("wait_s", "stage_s", "stall_s"))
            emit(SnapshotStaged(time.time(), self._ranks.rank, step, nbytes, *times))

    def _wait_for_program(self) -> None:
        """Wait until saves of this program, also of other Checkpointers, are decided: a claim would fence them."""
        wait_for_program(self._root, time.monotonic() + self._slot_timeout_s / 2, but=self.scheduled)

    def _prepared(self, state: Any, claims: RootClaim | None = None) -> PreparedState:
        """Return the state with its plan, in a session, and make room for it."""
        prepared = self._plans.prepare(state, claims, slots=self._stager)
        if (session := self._plans.session) is not None:
            self.snapshots.begin_session(session)
        self._stager.fit(prepared.cached)
        return prepared

    def _hold(self, prepared: PreparedState, save: SaveId, staged: StagedShare, lineage: Lineage) -> None:
        """Make a snapshot of what was staged."""
        try:
            self.snapshots.add(prepared, save, staged, lineage)
        except BaseException:
            staged.slot.release()
            raise
        if self._lingering is not None:
            self._lingering.hold(self._stager.memory.kept)

    def _linger_before_resize(self) -> None:
        """Let the keeper free the slots that are about to be replaced."""
        if self._lingering is not None:
            kept, slots = self._stager.memory.kept, self._stager.all_slots
            replaced = [slot.region for slot in slots if slot.state is not SlotState.HELD]
            self._lingering.hold(region for region in kept if region not in replaced)

    def schedule(self, request: AsyncRequest, step: int) -> int:
        """Schedule the last request, and return the index of its call. If the queue refuses it, abandon the save."""
        try:
            return self._queue.schedule_async_request(request)
        except Exception as error:
            undecided = list(self._in_flight.values())[-1]  # the save of this request
            if undecided.handle is not None:
                undecided.handle.free_slot()
            self._fail(error, step, undecided.observed, is_staging=True)

    def _staged(self) -> dict[SaveId, SaveHandle]:
        return {save: each.handle for save, each in list(self._in_flight.items()) if each.handle is not None}

    def drain(self, common: Collection[str], deadline: float) -> None:
        """Before a restore: decide the scheduled saves, and finalize those that are published. See `drain`."""
        drain(self._root, self._queue, self.scheduled(), common, self._ranks.rank, deadline)

    def settle_all(self, rank: int, deadline: float) -> None:
        """After a fault: wait until every save of this rank is decided, at the latest soon after `deadline`."""
        self._queue.repair()
        functions = [fn for fn in self._queue.functions() if fn is not None]
        for save, undecided in list(self._in_flight.items()):
            scheduled = any(fn is undecided.handle for fn in functions)
            in_flight = InFlight(save, undecided.world_size, scheduled)
            pump = self._queue.wait_for_events
            undecided.observed.outcome = settle(self._root, in_flight, rank, deadline, pump)
        self._refuse(self._in_flight, rank)

    def refuse_left(self, rank: int) -> None:
        """After `settle_all`, when no writer of this rank is alive: give up what is undecided.

        A writer that was killed may have begun a save again that was given up just then.
        """
        self._refuse((), rank)

    def _refuse(self, own: Iterable[SaveId], rank: int) -> None:
        if (owner := self._plans.owner) is not None:
            refuse_others(self._root, owner, own, rank)

    def forget_saves(self) -> None:
        """After a fault, when every save is decided and the queue is empty: forget them, and the plan.

        What the slots hold stays, to be restored from.
        """
        for observed in self._observed:
            observed.left("Interrupted", "a fault on this or another rank interrupted the save before it was staged")
        self.failures.forget()
        self._ranks.forget()
        self._in_flight.clear()
        self._plans.forget()  # may be using the slots in a thread
        self._stager.forget()
        self.snapshots.forget_counts()
        if self.replicator is not None:
            self.replicator.forget()

    def close(self, ending: Deadline, *, linger: bool = False) -> None:
        """Release the root and the staging memory, in this time. The queue stays open: it is the Checkpointer's.

        With `linger` what this rank holds for others is there for a while.
        """
        self._closed = True
        self.scheduled.close()
        if self._listening:
            self._listening = False
            self._queue.stop_listening(self._listen)
        self.root_claim.close()
        self._plans.close()
        if not finishes_within(ending.before_end(ending.left_s / 2), self._leave_root, "ckpt-leave"):
            _log.warning("%s does not answer: other processes learn by a lease that this one has left", self._root.path)
        try:
            self.snapshots.close()
            self._tier.close()
            if self.replicator is not None:
                self.replicator.close(ending, linger=linger)
        finally:  # the keeper has the memory until it is told
            if self._lingering is not None:
                self._lingering.leave() if linger else self._lingering.close()
        self._stager.close()

    def _leave_root(self) -> None:
        self._leave_observed()
        self.root_claim.release(self._ranks.rank, done=not self._in_flight)

    def _leave_observed(self) -> None:
        """Emit the end of saves that this object will not see."""
        for save, undecided in list(self._in_flight.items()):
            if not undecided.observed.ended:
                with contextlib.suppress(CheckpointError):
                    undecided.observed.outcome = self._root.pending_save(save).outcome()
        for observed in self._observed:
            observed.left("Left", "the Checkpointer was closed before the save was decided; it may still be published")

    def _fail(self, error: Exception, step: int, observed: ObservedSave, *, is_staging: bool) -> NoReturn:
        """Abandon the save begun last, as this rank cannot write it, so that ranks that have scheduled it learn why."""
        observed.failed(self._ranks.rank, error)
        failed = self.failures.of_call(error, self._plans.save_name, step, is_staging=is_staging)
        save = self._plans.save_id()
        if save is not None and save.owner and self._ranks.world_size > 1:
            self._in_flight.pop(save, None)
            with contextlib.suppress(CheckpointError):  # then their own wait times out
                self._root.pending_save(save).abandon(Failure.of(error, self._ranks.rank))
        if failed is error:
            raise error
        raise failed from error

    def _decided(self, save: SaveId) -> None:
        self._in_flight.pop(save, None)
        if self._listening and self._ranks.rank == COORDINATOR:
            self._ranks.tell_first(f"decided/{save.name}", "1")
        if self._closed and not self._in_flight:  # of a shared queue, which stays open
            self.root_claim.release(self._ranks.rank, done=True)

    def _look_rarely(self) -> bool:
        """Whether the other ranks look so rarely for an outcome that rank 0 tells them when there is one."""
        rarely = self._ranks.world_size > self._options.looks_per_s * _SOON_ENOUGH_S
        return rarely or (self._root.least_look_s > 0 and self._ranks.world_size > 1)

    def _listen(self) -> float:
        """Make the writers of this rank look at storage if rank 0 knows the outcome of the oldest save in flight.

        That it does is no outcome. Return after how many seconds to call this again; called earlier, it does nothing.
        """
        now = time.monotonic()
        save = next(iter(self._in_flight), None)
        if save != self._listened_for:
            self._listened_for, self._listen_at = save, 0.0
        if now >= self._listen_at and save is not None and self._ranks.rank != COORDINATOR:
            pause_s = max(_LISTEN_S, self._ranks.world_size / _LISTENS_PER_S)
            if self._ranks.tell_first(f"decided/{save.name}", None) is not None:
                self._queue.nudge()
                pause_s = max(_NUDGED_S, pause_s)
            self._listen_at = now + pause_s
        return max(_LISTEN_S, self._listen_at - now)

    def _stage(
        self, prepared: PreparedState, save: SaveId, begin: float, lineage: Lineage, observed: ObservedSave
    ) -> SaveHandle:
        """Stage this rank's share, and return the call that writes it."""
        staged = self._stager.stage(prepared, save, begin)
        if self._saves_are_snapshots:
            self._hold(prepared, save, staged, lineage)
        plan, index = prepared.cached.layout.plan, prepared.cached.save_plan.index
        own_bytes, all_bytes = lambda: sum(file.nbytes for file in plan.files), lambda: sum(index.files().values())
        observed.staged(staged.times, own_bytes, all_bytes)
        task = WriteTask(
            root=self._root.path,
            save=save,
            rank=self._ranks.rank,
            plan=prepared.cached.pickled,
            region=staged.slot.region,
            flag_offset=staged.flag_offset,
            generation=staged.generation,
            values=prepared.values,
            times=staged.times,
            options=self._options,
            trainer=Process.here(),
            branch=self.root_claim.branch,
            lineage=lineage,
            checksummed=pack_offsets(staged.checksummed),
            replicas=staged.replicas,
            storage=self._root.options,
            held=tuple(self.held()),
            contents=staged.contents,
        )
        return SaveHandle(
            task,
            staged.slot,
            observed,
            on_decided=lambda: self._decided(save),
            on_differing=lambda report: self._differing.warn(save.step, report.names, mixed=report.mixed),
            on_removed=self._removed,
            on_begun=lambda at_ns: self.timers.begin(at_ns, self._ranks.rank),
            first_reason=functools.partial(self.failures.first_reason, save.name),
            on_failed=lambda error, kind: self.failures.note(error, kind, save.name, save.step),
        )

    def _removed(self, report: StepsRemoved) -> None:
        if is_observed():
            emit(Retained(time.time(), self._ranks.rank, report.left, report.removed))
