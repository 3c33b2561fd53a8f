"""Which deadlines follow from what is open since when. Pure: the caller brings clock, limits and activity.

All times are seconds of the section clock, see `board`: monotonic time that stands still while hang protection is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["STEP", "WARMUP", "Activity", "Deadline", "Limits", "deadlines"]

STEP = "step"  # the section whose limit may differ in the first iterations
WARMUP = "warmup"  # the name under which that other limit is configured


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds; None: for ever."""

    initial_beat: float | None = None
    beat: float | None = None
    out_of_section: float | None = None
    sections: Mapping[str, float | None] = field(default_factory=dict)
    num_warmup_iterations: int = 0

    @property
    def shortest(self) -> float | None:
        """The shortest of all; nothing that begins now can be late earlier than this."""
        finite = [
            v for v in (self.initial_beat, self.beat, self.out_of_section, *self.sections.values()) if v is not None
        ]
        return min(finite, default=None)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank has done since it was `started`.

    `idle_since` is when nothing was open for the last time, whether something is now or not. `step_age` counts
    iterations from the first step to the latest one; None before the first. What goes on in the `background` has no
    deadline here: the rank itself sees to it.
    """

    started: float
    idle_since: float
    last_beat: float | None = None
    open: Mapping[str, float] = field(default_factory=dict)
    step_age: int | None = None
    background: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deadline:
    """`what` goes on since `since` and may take `limit` seconds. `section` is None for a heartbeat, or the gap."""

    what: str
    since: float
    limit: float
    section: str | None = None

    @property
    def at(self) -> float:
        """When it is late."""
        return self.since + self.limit

    def describe(self, now: float) -> str:
        """Return a sentence for people."""
        return f"{self.what} for {now - self.since:.2f} s; the limit is {self.limit:g} s"


def deadlines(activity: Activity, limits: Limits) -> tuple[Deadline, ...]:
    """Return all deadlines that apply, the earliest first. Each counts by itself: any that has passed is a fault."""
    found: list[tuple[str, float, float | None, str | None]] = []
    if activity.last_beat is None:
        found.append(("without a first heartbeat", activity.started, limits.initial_beat, None))
    else:
        found.append(("without a heartbeat", activity.last_beat, limits.beat, None))
    for name, since in activity.open.items():
        found.append((f"in section {name!r}", since, _section_limit(name, activity, limits), name))
    if not activity.open and not _may_warm_up_outside(activity, limits):
        found.append(("outside all sections", activity.idle_since, limits.out_of_section, None))
    applicable = [Deadline(what, since, limit, name) for what, since, limit, name in found if limit is not None]
    return tuple(sorted(applicable, key=lambda deadline: deadline.at))


def _section_limit(name: str, activity: Activity, limits: Limits) -> float | None:
    if name == STEP and WARMUP in limits.sections and (activity.step_age or 0) < limits.num_warmup_iterations:
        return limits.sections[WARMUP]
    return limits.sections.get(name)


def _may_warm_up_outside(activity: Activity, limits: Limits) -> bool:
    """Whether a program that has not begun its first step is not watched: a warm-up without limit was asked for."""
    return activity.step_age is None and WARMUP in limits.sections and limits.sections[WARMUP] is None
