"""Newcomers: processes that join a running job, at its next restart, for which they ask if they are needed.

    newcomer                                       the ranks of the job, in iteration i
    arrives in the set of newcomers        ---->
    interrupts iteration i, see `Rejoin`   ---->   restart; or a fault comes before
    waits for the roster of iteration i    <----   the roster of iteration i names the newcomer
    counts as a spare of iteration i, with the rank after the last one
    gets its rank in iteration i + 1 together with all others

So no process waits for a newcomer that is not ready. Its initial rank is one that no process of the job ever had. One
that comes before all ranks have met does not wait: it is the rank in whose place it was started; see `monitoring`.

One that dies while it waits is not among the newcomers any more, as the store notices the end of its connection (of its
lease, in etcd). So it is not named, and others do not count it. If it dies between the roster that names it and its
first heartbeat, the ranks notice that by the missing heartbeats, as after the loss of a node, and restart without it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inprocess.agreement import Agreement, IterationOutcome
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination.namespace import RestartIndex
from inprocess.exception import RestartError, StaleViewError, StoreLostError
from inprocess.node_layout import NodeLayout
from inprocess.repetition import FaultHistory
from inprocess.settings import RejoinPolicy
from inprocess.state import Mode, State

__all__ = ["JOIN", "JOINED_FILE", "Newcomer", "Place", "Rejoin", "newcomer_from_environment"]

JOIN = "INPROCESS_JOIN"
"""The environment variable with the initial rank of a newcomer, a number that no process of the job ever had.

It is the rank in whose place the newcomer was started, plus a multiple of the number of ranks that the job began with.
In a job that spare nodes may join it is as `node_layout` says: a newcomer on such a node is in the place of no rank.
"""
JOINED_FILE = "INPROCESS_JOINED_FILE"
"""The environment variable with the path of a file that a newcomer creates as soon as it belongs to the job."""

_CHUNK_S = 1.0
_GATHER_S = 5.0  # processes that were lost together are replaced together, and their imports take unequally long
_SILENT = 2  # heartbeat timeouts without a heartbeat of rank 0, after which the job counts as lost


@dataclass(frozen=True)
class Place:
    """The position of a newcomer in the iteration that has just ended: its rank, who left at the end, and why.

    `initial_ranks` are those of all ranks, newcomers included, by dense rank. `faults` is the history of the job.
    """

    iteration: int
    rank: int
    world_size: int
    terminated_ranks: frozenset[int]
    initial_ranks: tuple[int, ...]
    interruptions: tuple[InterruptionRecord, ...]
    faults: FaultHistory = field(default_factory=FaultHistory)

    def take(self, state: State) -> None:
        """Change `state` to that of a spare of the iteration that has ended."""
        state.iteration, state.rank, state.world_size = self.iteration, self.rank, self.world_size
        state.mode, state.active_rank, state.interruptions = Mode.INACTIVE, None, self.interruptions


class Rejoin:
    """Decides when a newcomer interrupts the job, so that it restarts with it. One object per newcomer.

    It does if that makes more ranks active, but not more than at the start of the job: a process that would only be a
    spare waits for the next restart. With a `policy` of no delay it waits for others that may come, until the job has
    as many ranks as at its start (`places`), or none has come for some seconds. Those count that live. `active_of` is
    that of the hooks. Once the function has returned on an active rank, there is nothing to restart for.
    """

    def __init__(
        self,
        policy: RejoinPolicy,
        places: int,
        active_of: Callable[[int], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places = places
        self._policy = policy
        self._active_of = active_of
        self._clock = clock
        self._ready_s = self._last_s = clock()
        self._waiting: set[int] = set()

    def is_due(self, agreement: Agreement) -> bool:
        """Return whether to interrupt this iteration now."""
        delay_s = self._policy.delay_s
        if delay_s is None:
            return False
        now, waiting = self._clock(), Agreement.newcomers(agreement.store.base_store)
        if waiting - self._waiting:
            self._last_s = now
        self._waiting = waiting
        live, sizes = agreement.world_size, agreement.active_sizes()
        if live is None or sizes is None or sizes[0] >= sizes[1] or agreement.wait_done(0.0):
            return False
        if agreement.wait_outcome(0.0) is not None:  # it is interrupted already, by this process or for another reason
            return False
        is_complete = live + len(waiting) >= self.places
        before, after = self._active_of(live), self._active_of(live + len(waiting))
        if not (is_complete if before is None or after is None else after > before):
            return False
        if delay_s > 0:
            return now - self._ready_s >= delay_s
        return is_complete or now - self._last_s >= _GATHER_S


@dataclass(frozen=True)
class Newcomer:
    """This process, if the environment says that it is to join a running job. `layout` is that of its nodes, if any."""

    initial_rank: int
    joined_file: str | None
    layout: NodeLayout | None = None

    def place(self, world_size: int) -> int:
        """Return the number of the place in which this was started: a rank of the first `world_size`, or larger."""
        return self.initial_rank % (world_size if self.layout is None else self.layout.places)

    def wait_for_place(
        self,
        store: Any,
        agreements: Callable[[int], Agreement],
        heartbeat_timeout_s: float,
        rejoin: Rejoin,
        begin_timeout_s: float = 0.0,
    ) -> Place | None:
        """Announce this process, and wait until it is named in a roster; None if the job is completed instead.

        `store` is the whole store of the job, `agreements` makes the agreement of an iteration. Main thread; returns to
        bytecode every second. StoreLostError if the store is lost, no process of the job is left, or its ranks have not
        met within `begin_timeout_s`.
        """
        Agreement.announce_newcomer(store, self.initial_rank, self._places(rejoin))
        signs = _LifeSigns(_SILENT * heartbeat_timeout_s, begin_timeout_s)
        index = RestartIndex(store)
        while True:
            iteration = index.current()
            for ended in (iteration - 1, iteration):
                place = self._place_in(agreements(ended)) if ended >= 0 else None
                if place is not None:
                    return place
            Agreement.stay_newcomer(store, self.initial_rank)
            with contextlib.suppress(StaleViewError):
                agreement = agreements(iteration)
                if rejoin.is_due(agreement):
                    self._interrupt(agreement, rejoin.places)
                outcome = agreement.wait_outcome(_CHUNK_S)
                if outcome is IterationOutcome.COMPLETED:
                    return None
                if outcome is IterationOutcome.INTERRUPTED:
                    agreement.wait_for_roster(_CHUNK_S)
                signs.note((iteration, outcome, agreement.heartbeat_of(0)), agreement.world_size is not None)

    def _places(self, rejoin: Rejoin) -> int:
        return rejoin.places if self.layout is None else self.layout.places

    def _interrupt(self, agreement: Agreement, places: int) -> None:
        """Make the others restart. The record has the rank that this process has in the roster, as a spare."""
        waiting = Agreement.newcomers(agreement.store.base_store)
        rank = (agreement.world_size or 0) + sum(other < self.initial_rank for other in waiting)
        place = self.place(places)
        where = f"in the place of initial rank {place}" if place < places else "of a spare node"
        summary = f"a process {where} is ready to join"
        agreement.interrupt(InterruptionRecord(rank, Interruption.NEWCOMER, summary))

    def _place_in(self, agreement: Agreement) -> Place | None:
        roster = agreement.find_roster()
        if roster is None or self.initial_rank not in roster.joined:
            return None
        agreement.conclude(roster)
        before = agreement.world_size
        if before is None:
            raise RestartError(
                f"iteration {agreement.iteration} has a roster, but no process has published the number of ranks"
            )
        return Place(
            agreement.iteration,
            before + roster.joined.index(self.initial_rank),
            before + len(roster.joined),
            roster.terminated_ranks,
            roster.initial_ranks,
            agreement.find_reason(),
            roster.faults,
        )

    def report_joined(self) -> None:
        """Create the file that shows the launcher that this process belongs to the job."""
        if self.joined_file is not None:
            with open(self.joined_file, "w"):
                pass


def newcomer_from_environment() -> Newcomer | None:
    """Return the newcomer that the environment describes; only once, a later call of the wrapper starts normally."""
    text, path = os.environ.pop(JOIN, None), os.environ.pop(JOINED_FILE, None)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{JOIN} in the environment must be a rank that no process of the job ever had, not {text!r}")
    return Newcomer(int(text), path, NodeLayout.from_environment())


class _LifeSigns:
    """Detects the end of a job: what can be observed of it no longer changes; at first for `begin_s`, if longer."""

    def __init__(self, silence_s: float, begin_s: float) -> None:
        self._silence_s = silence_s
        self._begin_s = max(silence_s, begin_s)
        self._seen: object = None
        self._since = time.monotonic()

    def note(self, seen: object, has_begun: bool) -> None:
        """Note an observation. StoreLostError if it has not changed for too long."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > (limit_s := self._silence_s if has_begun else self._begin_s):
            raise StoreLostError(f"the job to join sent no heartbeat for {limit_s:g} s: no process of it is left")
