"""The trainer's half of a save: name the leaves, plan once, copy this rank's share into a slot, and describe what is
left to do.

    flatten state -> (structure known? else plan: one collective) -> free slot -> copy -> AsyncRequest(PartWriter)

Touches storage only to claim the root, before the first save of a run. Runs in the trainer's thread that trains.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt.async_calls import AsyncCallsQueue, AsyncRequest, CallTimer
from ckpt.errors import CheckpointError, CheckpointTimeoutError
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.state_dict import FlatState
from ckpt.ranks import Ranks
from ckpt.saving.drain import InFlight, refuse_others, settle
from ckpt.saving.held import HEADER_BYTES, SAMPLES_OFFSET, HeldMemory
from ckpt.saving.part import Part
from ckpt.saving.planner import Planned, Planner, Prepared
from ckpt.saving.recover import Branch
from ckpt.saving.replicas import Digests, Tolerance
from ckpt.saving.side_stream import SideStream
from ckpt.saving.write import PartWriter, SaveOptions
from ckpt.staging.arena import Arena, Slot, SlotState
from ckpt.staging.copy import Staged, stage
from ckpt.storage.commit import PendingSave, Reason
from ckpt.storage.names import SaveId
from ckpt.storage.ownership import ClaimLease
from ckpt.storage.root import CheckpointRoot
from inprocess.ipc.process import Process

__all__ = ["Saver", "StagingOptions"]

_log = logging.getLogger("ckpt")
_WAIT_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """How state gets into shared memory. `slot_timeout_s` bounds the wait for a free slot; `replicas` says what
    parameters are that ranks have different."""

    slots: int = 2
    max_host_bytes: int | None = None
    overlap: bool = False
    slot_timeout_s: float = 600.0
    compression: str | None = None
    grid: GridOptions = field(default_factory=GridOptions)
    replicas: Tolerance = "error"


class Saver:
    """Plans and stages. One for each Checkpointer, used by one thread."""

    def __init__(
        self,
        root: str,
        ranks: Ranks,
        queue: AsyncCallsQueue,
        staging: StagingOptions,
        options: SaveOptions,
    ) -> None:
        self._root = CheckpointRoot(root)
        self._ranks = ranks
        self._queue = queue
        self._staging = staging
        self._options = options
        self._arena = Arena(staging.slots, staging.max_host_bytes, pin=True)
        self._planner = Planner(ranks, staging.grid, self._arena.max_slot_bytes, staging.compression)
        self._pieces_queue: AsyncCallsQueue | None = None
        self._generation = 0
        self._side_stream = SideStream()
        self.memory = HeldMemory(self._arena)
        self._shared_for: Planned | None = None
        self.on_begun: Callable[[int], CallTimer | None] | None = None  # of every call that writes
        self._warned: set[str] = set()  # of names that ranks have different
        self._in_flight: dict[SaveId, InFlight] = {}  # noted before anything is staged, so that no fault can lose one
        self._seen: int | None = None  # the newest token known to this job: later ones are of later starts
        self._token: int | None = None  # that this job saved with last, or this process claimed
        self._claim_lease = ClaimLease(self._root.ownership)
        self._closed = False
        self._branch: Branch | None = Branch()  # None once a save of this owner is published

    @property
    def seen(self) -> int:
        """The newest token known to this job; 0 if none is."""
        return self._seen or 0

    def claim(self) -> int:
        """Become the owner of the root, which is made if it is not there. Returns the token. FencedError."""
        self._root.make()
        seen = self._root.ownership.newest() if self._seen is None else self._seen
        self._seen = self._token = self._root.ownership.claim(seen)
        self._claim_lease.hold(self._token)
        return self._token

    def confirm(self, token: int) -> None:
        """See `CheckpointRoot.confirm`."""
        self._root.confirm(token)

    @property
    def token(self) -> int | None:
        """The token that this job saved with last, or that this process claimed; None before."""
        return self._token

    @property
    def is_owner(self) -> bool:
        """Whether this job has the root's newest token, as far as storage tells."""
        return self._seen is not None and self._seen == self._root.ownership.newest()

    def own(self) -> int:
        """Claim the root unless this job owns it; returns the token. FencedError."""
        token = self.token
        if token is None:
            return self.claim()
        self._root.ownership.check(token)
        return token

    def continue_from(self, branch: Branch, seen: int | None) -> None:
        """The next save claims the root anew, and its step continues that of `branch`. `seen`: a token seen since."""
        self._branch = branch
        self._seen = self._seen if seen is None else max(seen, self.seen)
        self._planner.end_session()

    def warmup(self, state: Any, *, claim: bool = True) -> None:
        """Plan, map and fault in the arena, have the writers started, and claim the root if so asked, or if this job
        has owned it before and no save is in flight. Collective, like the first save of a structure."""
        self._ranks.doing = "warmup"
        Process.here()  # looks into /proc the first time
        self._queue.start()
        claims = claim or (self._token is not None and not self._in_flight)
        self._fit_arena(self._planner.prepare(state, self, claim=claims).planned)

    @property
    def last_rank(self) -> int | None:
        """This rank among those that saved together, also when their process group is gone; None if there was none."""
        return self._ranks.last_rank

    def request(self, state: Any, step: int, begin: float) -> AsyncRequest:
        """Stage `state`; the request writes it. See `Checkpointer.save_request`."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
            what = step if isinstance(step, int) else f"a {type(step).__name__}"  # not a whole state
            raise ValueError(f"step must be an int from 0 to 10**18 - 1, not {what}: async_save(state, step)")
        self._ranks.doing = f"the save of step {step}"
        self._planner.begin_attempt(step)
        try:
            prepared = self._planner.prepare(state, self)
            self._fit_arena(prepared.planned)
            save = self._planner.save_id()
            assert save is not None
            self._seen = self._token = save.owner
            self._in_flight[save] = InFlight(save, prepared.planned.save_plan.world_size)
            writer = self._stage_all(prepared, save, begin)
            writer.on_decided = lambda: self._decided(save)
        except Exception as error:
            self._refused(error)
            raise
        done = [writer.on_decided, lambda: self._taken_over(writer.branch), lambda: self._arena.keep(writer.region)]
        return AsyncRequest(writer, (), done)

    def not_scheduled(self, request: AsyncRequest, error: Exception) -> None:
        """The queue refused `request`: nobody will run it."""
        if isinstance(request.async_fn, PartWriter):
            request.async_fn.free_slot()
        self._refused(error)

    def interrupt(self) -> None:
        """Make a thread that waits for writers look around. From any thread."""
        for queue in (self._queue, self._pieces_queue):
            if queue is not None:
                queue.interrupt()

    def stop_writers(self) -> None:
        """After a fault: nobody writes for this rank any more, and what was not published is given up."""
        for queue in (self._queue, self._pieces_queue):
            if queue is not None:
                queue.recover(0.0)

    def settle_all(self, rank: int, deadline: float) -> None:
        """After a fault: see that no save of this epoch is undecided, at the latest soon after `deadline`."""
        self._queue.mend()
        scheduled = {fn.save for fn in self._queue.functions() if isinstance(fn, PartWriter)}
        for save, in_flight in list(self._in_flight.items()):
            in_flight = replace(in_flight, scheduled=save in scheduled)
            settle(self._root, in_flight, rank, deadline, self._queue.wait_for_events)
        self._refuse(self._in_flight, rank)

    def refuse_left(self, rank: int) -> None:
        """After `settle_all`, when no writer of this rank is left: one that was killed may have begun a save once more
        that was given up just then."""
        self._refuse((), rank)

    def _refuse(self, own: Iterable[SaveId], rank: int) -> None:
        owner = self._planner.owner
        if owner is not None:
            refuse_others(self._root, owner, own, rank)

    def begin_epoch(self) -> None:
        """After a fault, when every save is decided and the queue is empty: what was under way is forgotten.

        What the slots hold stays, to be restored from; the next save is planned anew.
        """
        self._ranks.forget()
        self._in_flight.clear()
        self._side_stream.forget()
        if self._pieces_queue is not None:
            self._pieces_queue.recover(0.0)
        self._arena.free_all()
        self._planner.begin_epoch()

    def close(self) -> None:
        """Leave the root, give the arena back. The queue is the Checkpointer's."""
        self._closed = True
        self._claim_lease.close()
        self._release(done=not self._in_flight)
        self.memory.close()
        if self._pieces_queue is not None:
            self._pieces_queue.close(abort=True)
        self._arena.close()

    def _refused(self, error: Exception) -> None:
        """This rank will have no part in a save the others may have scheduled: abandon it, so that they learn why."""
        save = self._planner.save_id()
        if save is None or self._ranks.world_size == 1:
            return
        self._in_flight.pop(save, None)
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(CheckpointError):  # then they learn it from their own wait
            reason = Reason(self._ranks.rank, type(error).__name__, str(error), text)
            PendingSave(self._root, save).abandon(reason)

    def _release(self, *, done: bool) -> None:
        """Note in the root that this trainer is through with it; its writers, too, if all is `done`."""
        if self.token is not None:
            with contextlib.suppress(CheckpointError):  # then its lease expires
                self._root.ownership.release(self.token, self._ranks.rank, done=done)

    def _decided(self, save: SaveId) -> None:
        self._in_flight.pop(save, None)
        if self._closed and not self._in_flight:  # of a queue that goes on
            self._release(done=True)

    def _taken_over(self, branch: Branch | None) -> None:
        """A save that took over what earlier owners left is published; so the next ones need not."""
        if branch is self._branch:
            self._branch = None

    # -- staging -------------------------------------------------------------------------------------------------------

    def _fit_arena(self, planned: Planned) -> None:
        needed = planned.part.plan.slot_bytes + HEADER_BYTES
        if needed > self._arena.slot_bytes:
            while self._arena.in_use():
                self._wait_for_slot(time.monotonic() + self._staging.slot_timeout_s)
            self._arena.resize(-(-needed // HEADER_BYTES) * HEADER_BYTES)
        if self._shared_for is not planned:
            self.memory.share(self._ranks, planned, self._staging.compression)
            self._shared_for = planned

    def _stage_all(self, prepared: Prepared, save: SaveId, begin: float) -> PartWriter:
        """Stage this rank's part. Of one that does not fit a slot, all pieces but the last are written when this
        returns."""
        earlier: list[tuple[str, str, int, int]] = []
        last = prepared.planned.part.plan.pieces - 1
        for piece in range(last):
            writer = self._stage_piece(prepared, save, piece, begin)
            writer.on_written = earlier.extend
            self._write_piece_now(writer)
        writer = self._stage_piece(prepared, save, last, begin)
        try:
            self._finish_pieces()
        except BaseException:
            writer.free_slot()
            raise
        writer.earlier = earlier
        return writer

    def _stage_piece(self, prepared: Prepared, save: SaveId, piece: int, begin: float) -> PartWriter:
        planned = prepared.planned
        last = piece == planned.part.plan.pieces - 1
        deadline = time.monotonic() + self._staging.slot_timeout_s
        slot = self._arena.acquire(save.step, lambda: self._wait_for_slot(deadline))
        try:
            waited = time.perf_counter()
            self._generation += 1
            self.memory.clear(slot)
            stream = self._side_stream.stream_for(prepared.flat)
            replicas = self._sample(prepared, save, slot, stream) if last else None
            staged = self._copy(planned.part, prepared.flat, slot, piece, stream)
            self.memory.label(slot, save, self._generation)
            done = time.perf_counter()
        except BaseException:
            slot.state = SlotState.FREE
            raise
        slot.state = SlotState.WRITING
        times = {
            "begin": time.time() - (done - begin),
            "wait_s": waited - begin,
            "stage_s": done - waited,
            "stall_s": done - begin,
        }
        self._side_stream.note(staged)
        return PartWriter(
            root=self._root.path,
            save=save,
            rank=self._ranks.rank,
            plan=planned.plan_bytes,
            region=slot.region,
            flag_offset=self._arena.slot_bytes - HEADER_BYTES,
            generation=self._generation,
            piece=piece,
            last=last,
            values=prepared.values if last else [],
            times=times,
            options=self._options,
            trainer=Process.here(),
            branch=self._branch,
            sealed=staged.sealed,
            replicas=replicas,
            on_slot_free=lambda: setattr(slot, "state", SlotState.FREE),
            on_begun=self.on_begun,
            on_differing=lambda names, mixed: self._warn_of_replicas(save.step, names, mixed),
        )

    def _sample(self, prepared: Prepared, save: SaveId, slot: Slot, stream: torch.cuda.Stream | None) -> Digests | None:
        """Samples of what other ranks have, too."""
        tolerance = self._staging.replicas
        if prepared.planned.save_plan.world_size == 1 or tolerance == "ignore":
            return None
        room = slot.tensor, self._arena.slot_bytes - HEADER_BYTES + SAMPLES_OFFSET
        return prepared.planned.replicas.sample(prepared.flat, prepared.encoded, save.name, tolerance, room, stream)

    def _warn_of_replicas(self, step: int, names: list[str], mixed: bool) -> None:
        """Once for each name."""
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new:
            _log.warning(
                "step %d: ranks have different values of %s; the step holds %s. What each rank has of its own belongs "
                "into ckpt.PerRank",
                step,
                "; ".join(new),
                "parts of each rank's" if mixed else "those of the lowest rank that has them",
            )

    def _copy(self, part: Part, flat: FlatState, slot: Slot, piece: int, stream: torch.cuda.Stream | None) -> Staged:
        tensors = {path: leaf.local for path, leaf in flat.tensors.items()}
        if slot.cleared_for is not part.gaps[piece]:
            if slot.cleared_for is not None:  # new memory is zero
                part.clear_gaps(piece, slot.region.buffer)
            slot.cleared_for = part.gaps[piece]
        staged = stage(part.copies[piece], tensors, slot.tensor, stream)
        flag = slot.tensor[self._arena.slot_bytes - HEADER_BYTES :][:8].view(torch.int64)
        if stream is None:
            flag.fill_(self._generation)
            return staged
        staged.then_set(flag, self._generation)
        if self._staging.overlap:
            self._side_stream.hook_optimizers(flat)
        else:
            staged.wait()
        return staged

    def _wait_for_slot(self, deadline: float) -> None:
        """Let the writers' answers come in; the queue's and, for a save in pieces, the extra writer's."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            steps = sorted({slot.step for slot in self._arena.in_use() if slot.step is not None})
            raise CheckpointTimeoutError(
                f"rank {self._ranks.rank}: no staging slot became free in {self._staging.slot_timeout_s:g} s; the "
                f"saves of steps "
                f"{steps} hold them. Is a request not scheduled, or storage stuck?",
                rank=self._ranks.rank,
            )
        queue = (
            self._pieces_queue if self._pieces_queue and self._pieces_queue.get_num_unfinalized_calls() else self._queue
        )
        queue.wait_for_events(min(_WAIT_SLICE_S, remaining_s))

    # -- saves that do not fit -----------------------------------------------------------------------------------------

    def _write_piece_now(self, writer: PartWriter) -> None:
        """Have an extra writer process write a piece while the next one is staged."""
        if self._pieces_queue is None:
            self._pieces_queue = AsyncCallsQueue(timeout_s=self._staging.slot_timeout_s)
        self._pieces_queue.schedule_async_request(AsyncRequest(writer, (), []))

    def _finish_pieces(self) -> None:
        while self._pieces_queue is not None and self._pieces_queue.get_num_unfinalized_calls():
            try:
                self._pieces_queue.maybe_finalize_async_calls(blocking=True)
            except CheckpointTimeoutError:
                raise
            except CheckpointError as error:  # the save is abandoned: its last piece finds out and fails like any other
                _log.debug("a piece was not written: %s", error)
