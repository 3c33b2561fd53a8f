"""Faults that come back: the history of them that the ranks share, and when it ends the job or delays a restart.

    the process that closes a roster    adds the faults of the iteration to the history, and writes it into the roster
    every rank                          reads the history there and applies the limits to it, so that all do the same

A replacement reads the same roster. No rank decides by what only its own process remembers.

The same fault is one of the same type at the same place in the code, on whichever rank: messages contain numbers and
addresses that differ. Of the hardware, it is the same fault only on the same rank. Faults that cost
a rank (deaths, lost nodes) end by themselves when no rank is left; they, and requests to end, count for the limit per
hour, and delay no restart by themselves. Nor does a restart that takes in processes.

*Progress* makes the history empty: a larger step than ever before, restored or published by a checkpointer or reported
by the function, or more pings in one iteration than ever before. Without any step known, an iteration that ran for an
hour has made progress as well: a function that does not say how far it is must not end for faults that are days apart.

The clocks of hosts may differ, so no time of day is in the history, but how long each fault is past. Each rank measures
the time since the last roster by its own clock, and the largest one counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inprocess.attribution import Interruption, InterruptionRecord, format_interruptions, without_consequences
from inprocess.bounded_waits import wait_until_set
from inprocess.exception import RepeatedFault
from inprocess.fault_classes import FaultClass

__all__ = ["PINGS", "SECONDS", "STEP", "FaultBounds", "FaultHistory", "FaultLimits", "fault_names"]

_log = logging.getLogger(__name__)
STEP = "step"
PINGS = "pings"
SECONDS = "seconds"
"""The kind of report that tells how long an iteration took, on the clock of the rank that reports it."""
_HOUR_S = 3600.0
_MOST_NAMES = 64
_MOST_AGES = 1000
_REPEATABLE = (Interruption.EXCEPTION, Interruption.SOFT_TIMEOUT)


@dataclass(frozen=True)
class FaultHistory:
    """The faults of a job since its last progress.

    `counts` is how many iterations each fault has interrupted, by its name (see `fault_names`); `latest` are the names
    of the last iteration. `ages` are those of the interruptions of the last hour, in seconds at the end of the last
    iteration, the oldest first. `progress` is the largest number of each kind that was ever reported.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    latest: tuple[str, ...] = ()
    ages: tuple[float, ...] = ()
    progress: Mapping[str, int] = field(default_factory=dict)

    def after(self, names: Sequence[str], progress: Mapping[str, int], seconds: float) -> FaultHistory:
        """Return the history after one more iteration was interrupted, by these faults, and took so long."""
        largest = {kind: max(self.progress.get(kind, 0), progress.get(kind, 0)) for kind in {*self.progress, *progress}}
        has_progress = any(value > self.progress.get(kind, 0) for kind, value in largest.items())
        aged = self.after_joining(seconds).ages
        if not largest.get(STEP) and aged and aged[-1] > _HOUR_S:
            has_progress = True
        before = FaultHistory() if has_progress else self
        counts = {name: before.counts.get(name, 0) + 1 for name in names}
        earlier = {name: count for name, count in before.counts.items() if name not in counts}
        kept = list({**earlier, **counts}.items())[-_MOST_NAMES:]
        ages = [] if has_progress else [age for age in aged if age <= _HOUR_S][-_MOST_AGES:]
        return FaultHistory(dict(kept), tuple(names), (*ages, 0.0), largest)

    def after_joining(self, seconds: float) -> FaultHistory:
        """Return the history after an iteration that took so long, and ended in order to take in processes."""
        return replace(self, latest=(), ages=tuple(age + seconds for age in self.ages))

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        return {
            "counts": dict(self.counts),
            "latest": list(self.latest),
            "ages": list(self.ages),
            "progress": dict(self.progress),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FaultHistory:
        """Read what `to_json` returned."""
        return cls(dict(values["counts"]), tuple(values["latest"]), tuple(values["ages"]), dict(values["progress"]))


@dataclass(frozen=True)
class FaultLimits:
    """How often faults may interrupt the job without progress between them; None: no limit. See `Wrapper`."""

    max_same_faults: int | None
    max_faults_per_hour: int | None
    max_backoff_s: float

    def exceeded_by(self, history: FaultHistory) -> str | None:
        """Return why the job ends after these faults; None: it goes on."""
        same = max((history.counts.get(name, 0) for name in history.latest), default=0)
        if self.max_same_faults is not None and same >= self.max_same_faults:
            name = next(name for name in history.latest if history.counts.get(name) == same)
            return (
                f"the same fault has ended {same} iterations, without progress between them: {name}. "
                f"The limit is max_same_faults={self.max_same_faults} of inprocess.Wrapper, or --ft-max-same-faults of "
                "ckpt_launcher"
            )
        many = len(history.ages)
        if self.max_faults_per_hour is not None and many > self.max_faults_per_hour:
            return (
                f"faults have ended {many} iterations within an hour, without progress between them. "
                f"The limit is max_faults_per_hour={self.max_faults_per_hour} of inprocess.Wrapper, or "
                "--ft-max-faults-per-hour of ckpt_launcher"
            )
        return None

    def pause_s(self, history: FaultHistory) -> float:
        """Return how long to wait before the next iteration: 0 after the first fault, then 1, 2, 4, ... seconds.

        0 as well if the last iteration had no fault that may come back: a death, or processes that join.
        """
        faults = len(history.ages) if history.latest else 0
        return 0.0 if faults < 2 else min(2.0 ** min(faults - 2, 30), self.max_backoff_s)


class FaultBounds:
    """Applies the limits to the `history` of the job, on one rank. Main thread."""

    def __init__(self, limits: FaultLimits, history: FaultHistory) -> None:
        self._limits = limits
        self.history = history

    @property
    def pause_s(self) -> float:
        """How long the ranks wait before the next iteration."""
        return self._limits.pause_s(self.history)

    def raise_if_exceeded(
        self,
        own: BaseException | None,
        records: Sequence[InterruptionRecord],
        note: Callable[[str], object],
    ) -> None:
        """If the faults came back too often, raise the exception of this rank, `own`; RepeatedFault if it has none.

        RepeatedFault has the faults of other ranks, the `records`. `note` is called before, with the reason.
        """
        why = self._limits.exceeded_by(self.history)
        if why is None:
            return
        note(why)
        if own is not None:
            own.add_note(f"The job ends: {why}.")
            raise own
        error = RepeatedFault(f"{format_interruptions(records)}; the job ends: {why}")
        for record in records:
            if record.detail:
                error.add_note(f"{record.interruption.name} on rank {record.rank}:\n{record.detail}")
        raise error

    def back_off(self) -> None:
        """Wait before an iteration that follows on several faults. An exception thrown into the thread ends it."""
        if self.pause_s > 0:
            _log.warning(
                "waiting for %g s before the function runs again: %d faults within an hour, without progress between "
                "them (at most max_backoff=%g s)",
                self.pause_s,
                len(self.history.ages),
                self._limits.max_backoff_s,
            )
            wait_until_set(threading.Event(), self.pause_s)


def fault_names(records: Iterable[InterruptionRecord]) -> list[str]:
    """Return the names of the faults that may come back, the same for each rank: the type, and the place in the code.

    Consequences of another fault are left out, such as connections to a rank that has raised.
    """
    names = []
    for record in without_consequences(records):
        if record.interruption in _REPEATABLE and record.fault_class is not FaultClass.PREEMPTED:
            is_exception = record.interruption is Interruption.EXCEPTION
            kind = record.summary.partition(":")[0] if is_exception else record.interruption.name
            if kind:  # of one among very many ranks only the rank is known
                name = f"{kind} at {record.place}" if record.place else kind
                is_hardware = record.fault_class is FaultClass.HARDWARE
                names.append(f"{name} on rank {record.rank}" if is_hardware else name)
    return list(dict.fromkeys(names))[:_MOST_NAMES]
