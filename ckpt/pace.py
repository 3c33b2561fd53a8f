"""How often to save: policies for `Checkpointer(save_every=)` and `Snapshots(every=)`, and what they decide from.

Joined by ``|`` they save when any of them wants to::

    Checkpointer(root, save_every=Optimal() | Steps(10_000))

`Steps` needs the number of a step alone. The others need measurements of the job: rank 0 decides, for all ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ckpt.arguments import check_number, duration, in_seconds, whole_number

__all__ = ["Budget", "Continuous", "Measured", "Optimal", "Pace", "Seconds", "Steps", "pace_of"]

_UNKNOWN_S = 60.0  # until a save was measured: a minute of training is not much to lose, nor is a save a minute
_SOON = 10  # the first save is due after this part of the time between faults
_PRIOR_S = 6 * 3600.0  # the mean time between faults before the first one; it weighs as much as one fault


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a job, of its saves or of its snapshots, in seconds.

    cost_s: training time that one takes: the stall, and how much slower steps are until it is published; None until one
        was measured
    latency_s: from its begin until it is published; None until one was
    trained_s: the time in which faults were counted
    faults: their number: restarts, in the process or of the job
    """

    cost_s: float | None = None
    latency_s: float | None = None
    trained_s: float = 0.0
    faults: int = 0

    @property
    def mtbf_s(self) -> float:
        """The estimated mean time between faults: six hours before anything is known, and ever less of that."""
        return (_PRIOR_S + self.trained_s) / (1 + self.faults)


class Pace(ABC):
    """Says when the next save is due. Frozen."""

    needs_agreement = True
    """Whether ranks could differ about it: it depends on more than the number of the step."""

    @abstractmethod
    def interval_s(self, measured: Measured) -> float:
        """Return the seconds from the begin of a save to the next; infinity if this says nothing about seconds."""

    def is_due_at(self, step: int, before: int) -> bool:
        """Return whether a step is due because of its number, and of that of the step before."""
        return False

    def __or__(self, other: Pace) -> Pace:
        """Return the policy that saves when this one or the other does."""
        if not isinstance(other, Pace):
            return NotImplemented
        return _AnyPace((*_parts(self), *_parts(other)))


def _parts(pace: Pace) -> tuple[Pace, ...]:
    return pace.paces if isinstance(pace, _AnyPace) else (pace,)


@dataclass(frozen=True)
class _AnyPace(Pace):
    paces: tuple[Pace, ...]

    @property
    def needs_agreement(self) -> bool:  # type: ignore[override]
        return any(pace.needs_agreement for pace in self.paces)

    def interval_s(self, measured: Measured) -> float:
        return min(pace.interval_s(measured) for pace in self.paces)

    def is_due_at(self, step: int, before: int) -> bool:
        return any(pace.is_due_at(step, before) for pace in self.paces)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.paces))


@dataclass(frozen=True)
class Steps(Pace):
    """The multiples of `count`, or the first step after each, where numbers of steps grow by more than one."""

    count: int

    needs_agreement = False

    def __post_init__(self) -> None:
        whole_number("Steps: count", self.count, unit="steps")

    def interval_s(self, measured: Measured) -> float:
        """See `Pace.interval_s`."""
        return math.inf

    def is_due_at(self, step: int, before: int) -> bool:
        """See `Pace.is_due_at`."""
        return step // self.count > before // self.count


@dataclass(frozen=True)
class Seconds(Pace):
    """A save every so often; `every` is a timedelta or seconds. One that is not published by then is waited for."""

    every: timedelta | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", duration("Seconds: every", self.every))

    def interval_s(self, measured: Measured) -> float:
        """See `Pace.interval_s`."""
        return in_seconds(self.every)


@dataclass(frozen=True)
class Continuous(Pace):
    """A save begins when the one before is published, and `gap`, a timedelta or seconds, is over."""

    gap: timedelta | float = timedelta(0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gap", duration("Continuous: gap", self.gap, or_zero=True))

    def interval_s(self, measured: Measured) -> float:
        """See `Pace.interval_s`."""
        return (measured.latency_s or 0.0) + in_seconds(self.gap)


@dataclass(frozen=True)
class Budget(Pace):
    """As often as saves take no more than this `share` of training, such as 0.005, as far as the job measures it."""

    share: float

    def __post_init__(self) -> None:
        check_number("Budget: share", self.share, "of training time")
        if self.share >= 1:
            raise ValueError(f"Budget: share is a part of training time, such as 0.005, not {self.share!r}")

    def interval_s(self, measured: Measured) -> float:
        """See `Pace.interval_s`."""
        return _UNKNOWN_S if measured.cost_s is None else measured.cost_s / self.share


@dataclass(frozen=True)
class Optimal(Pace):
    """The interval at which saves and the work that faults destroy take the least time together.

    `mtbf` is the mean time between faults, a timedelta or seconds; None: as the job observes it, beginning with six
    hours. It is that of Daly (A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22:3, 2006), which begins with Young's ``sqrt(2 * cost * mtbf)``; its cost is the
    training time that a save takes, not the time until it is published.
    """

    mtbf: timedelta | float | None = None

    def __post_init__(self) -> None:
        if self.mtbf is not None:
            object.__setattr__(self, "mtbf", duration("Optimal: mtbf", self.mtbf))

    def interval_s(self, measured: Measured) -> float:
        """See `Pace.interval_s`."""
        mtbf_s = measured.mtbf_s if self.mtbf is None else in_seconds(self.mtbf)
        if measured.cost_s is None:  # a job with a fault a minute would never come to its first save
            return min(_UNKNOWN_S, mtbf_s / _SOON)
        if measured.cost_s >= 2 * mtbf_s:
            return mtbf_s
        half = measured.cost_s / (2 * mtbf_s)  # Daly's formula has the time between two saves, without their cost
        return math.sqrt(2 * measured.cost_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9)


def pace_of(name: str, given: Any) -> Pace | None:
    """Return the policy of an argument `name`: a whole number of steps stands for `Steps`."""
    if given is None or isinstance(given, Pace):
        return given
    if isinstance(given, timedelta):
        return Seconds(given)
    whole_number(name, given, unit="steps")
    return Steps(given)
