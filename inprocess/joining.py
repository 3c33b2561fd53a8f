"""A process that comes when the job runs already: it takes part from the next restart on.

    newcomer                                       the ranks of the job, in iteration i
    arrives in the set of those who wait   ---->
    waits for the roster of iteration i    <----   a fault: whoever writes the roster names the newcomer in it
    is in the ended iteration a spare, with the rank after the last one
    is assigned its rank in iteration i + 1 together with all others

So nobody waits for a newcomer, and one that dies before it is named costs nothing. Its initial rank is one that no
process of the job ever had.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inprocess.agreement import Agreement, IterationOutcome
from inprocess.attribution import InterruptionRecord
from inprocess.coordination.namespace import RestartIndex
from inprocess.exception import RestartError, StaleViewError, StoreLostError
from inprocess.state import Mode, State

__all__ = ["JOIN", "JOINED_FILE", "Newcomer", "Place", "take_from_environment"]

JOIN = "INPROCESS_JOIN"
"""The environment variable with the initial rank of a newcomer, a number that no process of the job ever had."""
JOINED_FILE = "INPROCESS_JOINED_FILE"
"""The environment variable with the path of a file that a newcomer makes as soon as it belongs to the job."""

_CHUNK_S = 1.0
_SILENT = 2  # heartbeat timeouts without a heartbeat of rank 0, after which the job is taken for lost


@dataclass(frozen=True)
class Place:
    """Where a newcomer stands: in which iteration, that is over, with which rank, who left at its end, and why."""

    iteration: int
    rank: int
    world_size: int
    terminated_ranks: frozenset[int]
    interruptions: tuple[InterruptionRecord, ...]

    def take(self, state: State) -> None:
        """Make `state` that of a spare of the iteration that is over."""
        state.iteration, state.rank, state.world_size = self.iteration, self.rank, self.world_size
        state.mode, state.active_rank, state.interruptions = Mode.INACTIVE, None, self.interruptions


@dataclass(frozen=True)
class Newcomer:
    """What the environment says of this process: it is to join a job that runs."""

    initial_rank: int
    joined_file: str | None

    def wait_for_place(
        self, store: Any, agreements: Callable[[int], Agreement], heartbeat_timeout_s: float
    ) -> Place | None:
        """Announce this process, and wait until it is named in a roster; None if the job is completed instead.

        `store` is the whole store of the job, `agreements` makes the agreement of an iteration. Main thread; returns to
        bytecode every second. StoreLostError if the store is lost, or nobody of the job is left.
        """
        Agreement.announce_newcomer(store, self.initial_rank)
        pulse = _Pulse(_SILENT * heartbeat_timeout_s)
        index = RestartIndex(store)
        while True:
            iteration = index.current()
            for ended in (iteration - 1, iteration):
                place = self._place_in(agreements(ended)) if ended >= 0 else None
                if place is not None:
                    return place
            with contextlib.suppress(StaleViewError):
                agreement = agreements(iteration)
                outcome = agreement.wait_outcome(_CHUNK_S)
                if outcome is IterationOutcome.COMPLETED:
                    return None
                if outcome is IterationOutcome.INTERRUPTED:
                    agreement.wait_for_roster(_CHUNK_S)
                pulse.feel((iteration, outcome, agreement.heartbeat_of(0)))

    def _place_in(self, agreement: Agreement) -> Place | None:
        roster = agreement.find_roster()
        if roster is None or self.initial_rank not in roster.joined:
            return None
        agreement.conclude(roster)
        before = agreement.world_size
        if before is None:
            raise RestartError(f"iteration {agreement.iteration} has a roster, and nobody was in it")
        return Place(
            agreement.iteration,
            before + roster.joined.index(self.initial_rank),
            before + len(roster.joined),
            roster.terminated_ranks,
            agreement.find_reason(),
        )

    def say_joined(self) -> None:
        """Tell who has started this process that it belongs to the job."""
        if self.joined_file is not None:
            with open(self.joined_file, "w"):
                pass


def take_from_environment() -> Newcomer | None:
    """Return what the environment says, once: what is called later in this process begins with all others."""
    text, path = os.environ.pop(JOIN, None), os.environ.pop(JOINED_FILE, None)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{JOIN} in the environment must be a rank that no process of the job ever had, not {text!r}")
    return Newcomer(int(text), path)


class _Pulse:
    """Whether there is still somebody: what is seen of the job changes again and again."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._seen: object = None
        self._since = time.monotonic()

    def feel(self, seen: object) -> None:
        """Note what is seen. StoreLostError if it has not changed for too long."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._silence_s:
            raise StoreLostError(f"the job to join has made no heartbeat for {self._silence_s:g} s: nobody is left")
