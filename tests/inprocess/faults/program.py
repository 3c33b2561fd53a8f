"""Program of each rank of a cell: a wrapped function and hooks that record what happens, and fail as requested.

One function for all cells: make a process group, add up over all ranks, meet again, return the sum.
"""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.rank_assignment import ShiftRanks
from inprocess.rank_assignment.base import RankAssignmentCtx
from inprocess.store import TCPStore
from tests.inprocess.faults.events import Journal
from tests.inprocess.faults.matrix import FROM_OUTSIDE, WORLD_SIZE, Cell, Kind, Point, cell_named
from tests.inprocess.faults.strike import Fault, strike
from tests.inprocess.restarting import UNBOUNDED

SOFT_TIMEOUT_S = 2.0
HARD_TIMEOUT_S = 3.5
HEARTBEAT_TIMEOUT_S = 3.0
BARRIER_TIMEOUT_S = 10.0
STRIKE_SIGNAL = signal.SIGUSR1


def timeouts(ends_the_job: bool = False) -> dict[str, Any]:
    """Short, but long enough for a machine that is busy with other things. A job that ends waits for its barrier."""
    seconds = {
        "soft_timeout": SOFT_TIMEOUT_S,
        "hard_timeout": HARD_TIMEOUT_S,
        "heartbeat_interval": 0.25,
        "heartbeat_timeout": HEARTBEAT_TIMEOUT_S,
        "barrier_timeout": BARRIER_TIMEOUT_S / 2 if ends_the_job else BARRIER_TIMEOUT_S,
        "completion_timeout": BARRIER_TIMEOUT_S,
        "last_call_wait": 0.2,
        "termination_grace_time": 0.5,
        "monitor_thread_interval": 0.5,
        "monitor_process_interval": 0.5,
        "progress_watchdog_interval": 0.2,
    }
    return {name: timedelta(seconds=value) for name, value in seconds.items()}


def share_access(journal: Journal, call: inprocess.CallWrapper) -> None:
    """Give the test access to the coordination store."""
    if journal.process == 0:
        text = json.dumps(call.base_store.client.access.to_document())
        (journal.folder / "access.part").write_text(text)
        (journal.folder / "access.part").rename(journal.folder / "access")


class Actor:
    """The role of a rank in a cell."""

    def __init__(self, cell: Cell, journal: Journal) -> None:
        self.cell = cell
        self.journal = journal
        self._assignments = 0
        self._finalized = -1  # the last iteration whose `finalize` was called
        self._is_victim = journal.process in cell.victims
        if self._is_victim and cell.point in FROM_OUTSIDE:
            signal.signal(STRIKE_SIGNAL, lambda *_: self._strike())

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def initialize(self, state: Any) -> Any:
        self.journal.note("initialize", state)
        self._at(Point.INITIALIZE, state)
        return state

    def health_check(self, state: Any) -> Any:
        """Both checks: the second is the one after this rank's `finalize`."""
        second = self._finalized == state.iteration
        self.journal.note("second health check" if second else "health check", state)
        self._at(Point.SECOND_HEALTH_CHECK if second else Point.HEALTH_CHECK, state)
        if second and self._holds(Point.ITERATION_BARRIER, state):
            self.journal.wait_marks(*self._struck)
        if second:
            self.journal.note("second health check ends", state)
        return state

    def abort(self, state: Any) -> Any:
        """Run on the monitor thread: no abort ends before the victims of this point have failed."""
        self.journal.note("abort", state)
        if state.iteration == 0 and self.cell.point is Point.OTHERS_ABORT:
            self.journal.mark(f"abort-{self.journal.process}")
            self.journal.wait_marks(*self._struck)
        elif state.iteration == 0 and self._strikes_in_function:
            self.journal.wait_marks(f"struck-{self.journal.process}")  # another victim was faster
        return inprocess.abort.AbortTorchDistributed()(state)

    def finalize(self, state: Any) -> Any:
        self._finalized = state.iteration
        self.journal.note("finalize", state, has_group=dist.is_initialized())
        self._at(Point.FINALIZE, state)
        self.journal.note("finalize ends", state)
        return state

    def assign(self, ctx: RankAssignmentCtx) -> None:
        self._assignments += 1
        first = self._assignments == 1
        self.journal.note("first assignment" if first else "assign", ctx.state, terminated=sorted(ctx.terminated_ranks))
        self._at(Point.FIRST_ASSIGNMENT if first else Point.RANK_ASSIGNMENT, ctx.state)

    def enter(self) -> None:
        """Just before the initial barrier."""
        if self.cell.point is Point.ENTRY and self._is_victim:
            others = [rank for rank in range(WORLD_SIZE) if rank not in self.cell.victims]
            self.journal.mark(f"entered-{self.journal.process}")
            self.journal.wait_marks(*(f"entered-{rank}" for rank in others))
            self._strike()
        else:
            self.journal.mark(f"entered-{self.journal.process}")

    # -- the function --------------------------------------------------------------------------------------------------

    def function(self, call: inprocess.CallWrapper) -> int:
        state = call.state.freeze()
        share_access(self.journal, call)
        self.journal.note("function", state, stale=self._stale_keys(call))
        try:
            total = self._train(call, state)
        finally:
            self.journal.note("function ends", state)
        return total

    def _train(self, call: inprocess.CallWrapper, state: Any) -> int:
        dist.init_process_group("gloo", timeout=_minute())
        total = torch.tensor([self.journal.process + 1])
        dist.all_reduce(total)
        if state.iteration == 0:
            self._misbehave(call, state)
        if self._holds(Point.COMPLETION_BARRIER, state):
            self.journal.wait_marks("never" if self.cell.kind is not Kind.MONITOR_KILLED else self._struck[0])
        elif state.iteration < min(self.cell.last_iterations) and self.cell.point is not Point.COMPLETION_BARRIER:
            dist.recv(torch.empty(1), src=self._who_fails_first)
        dist.destroy_process_group()
        return int(total)

    @property
    def _who_fails_first(self) -> int:
        """The rank, as numbered in iteration 0, on which the others wait in vain."""
        return self.cell.victims[0] if self.cell.instigator is None else self.cell.instigator

    def _misbehave(self, call: inprocess.CallWrapper, state: Any) -> None:
        """Let no rank fail before all have completed the all-reduce.

        A gloo send whose connection breaks at the moment the receiver asks for the data is lost: its `waitSend` lasts
        until the timeout of the group. That is not what these cells are about, so all others receive.
        """
        self.journal.mark(f"added-{self.journal.process}")
        self.journal.wait_marks(*(f"added-{rank}" for rank in range(WORLD_SIZE)))
        self._at(Point.FUNCTION, state)
        if self.cell.point is Point.ATOMIC and self._is_victim:
            with call.atomic():
                self._at(Point.ATOMIC, state)
        if self.cell.instigator == self.journal.process:
            raise Fault("the first fault")
        if self.cell.point is Point.OTHERS_ABORT and self._is_victim:
            self.journal.wait_marks(f"abort-{self.cell.instigator}")
            self._at(Point.OTHERS_ABORT, state)

    def _stale_keys(self, call: inprocess.CallWrapper) -> bool:
        """Whether something of an earlier iteration is in the store of this one; leave something for the next."""
        key = f"probe/{self.journal.process}"
        stale = bool(call.store.check([key]))
        call.store.set(key, "1")
        return stale

    # -- failing -------------------------------------------------------------------------------------------------------

    @property
    def _struck(self) -> list[str]:
        return [f"struck-{rank}" for rank in self.cell.victims]

    @property
    def _strikes_in_function(self) -> bool:
        return self._is_victim and self.cell.point in (
            Point.INITIALIZE,
            Point.HEALTH_CHECK,
            Point.FUNCTION,
            Point.ATOMIC,
        )

    def _holds(self, point: Point, state: Any) -> bool:
        return self.cell.point is point and self.cell.holder == self.journal.process and state.iteration == 0

    def _at(self, point: Point, state: Any) -> None:
        if self._is_victim and self.cell.point is point and state.iteration == 0:
            self._strike()

    def _strike(self) -> None:
        """All victims together."""
        self.journal.mark(f"ready-{self.journal.process}")
        self.journal.wait_marks(*(f"ready-{rank}" for rank in self.cell.victims))
        self.journal.note("strike")
        self.journal.mark(f"struck-{self.journal.process}")
        if self.cell.kind is Kind.GLOO_HANG:
            dist.recv(torch.empty(1), src=(dist.get_rank() + 1) % dist.get_world_size(), tag=99)
        strike(self.cell.kind, self.journal.folder / f"monitor_{self.journal.process}.pid")


def _minute() -> timedelta:
    return timedelta(seconds=60)


def run_cell(name: str, journal: Journal) -> object:
    """Return what the wrapped function returned; raises what the wrapper raises."""
    cell = cell_named(name)
    actor = Actor(cell, journal)

    class Store(TCPStore):
        def reentrant_barrier(self, ranks: Any, group_name: str, *rest: Any, **more: Any) -> None:
            if group_name == "initial_barrier":
                actor.enter()
            super().reentrant_barrier(ranks, group_name, *rest, **more)

    class Assignment(ShiftRanks):
        def assign(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            actor.assign(ctx)
            return super().assign(ctx)

    def function(call: inprocess.CallWrapper | None = None) -> int:
        assert call is not None
        return actor.function(call)

    wrapper = inprocess.Wrapper(
        store_factory=Store,
        initialize=lambda state: actor.initialize(state),
        health_check=lambda state: actor.health_check(state),
        abort=lambda state: actor.abort(state),
        finalize=lambda state: actor.finalize(state),
        rank_assignment=Assignment(),
        monitor_process_logfile=str(journal.folder / "monitor_{rank}.log"),
        monitor_process_pidfile=str(journal.folder / "monitor_{rank}.pid"),
        **timeouts(cell.ends_the_job),
        **UNBOUNDED,
    )
    return wrapper(function)()
