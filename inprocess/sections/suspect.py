"""Who is the cause when ranks wait for each other: the one that stands still since before all others do.

A hang of one rank makes all others late, in the collective they wait in. What tells them apart is where they stand:

    iteration     who is in an earlier one than the others has not come to what they wait in
    collective    else who is in none of torch's while all others are, by their stacks
    last event    else who has opened or closed a section last before the others did, and clearly so

Where none of that tells them apart there is no suspect, and the stacks in the reports of the ranks have to be compared.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inprocess.sections.board_reading import Reading

__all__ = ["Standing", "Suspect", "in_collective", "root_suspect", "standing_of"]

_CLEARLY_S = 0.1
_COLLECTIVES = "distributed_c10d.py"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands: within these sections since its last event, and whether it `waits` in a collective.

    `clock` names the clock of the two times, which is behind the wall clock by `wall_s`; `seen_at` is when it was
    looked at. Seconds.
    """

    rank: int
    iteration: int | None
    sections: tuple[str, ...]
    moved_at: float
    seen_at: float
    clock: str
    wall_s: float
    waits: bool | None = None  # not known

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Standing:
        """Read `to_json`. ValueError for anything else."""
        try:
            iteration = values["iteration"]
            return cls(
                int(values["rank"]),
                None if iteration is None else int(iteration),
                tuple(str(name) for name in values["sections"]),
                float(values["moved_at"]),
                float(values["seen_at"]),
                str(values["clock"]),
                float(values["wall_s"]),
                None if values["waits"] is None else bool(values["waits"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not where a rank stands: {values!r}"[:200]) from error


@dataclass(frozen=True, slots=True)
class Suspect:
    """The rank that the others probably wait for, and what it is told by."""

    rank: int
    why: str


def standing_of(rank: int, reading: Reading) -> Standing | None:
    """Return where a rank stands now, by a look at its board just now; None if nothing counts there."""
    if not reading.active:
        return None
    activity = reading.activity
    last = max(activity.started, activity.idle_since, activity.last_beat or 0.0, *activity.open.values())
    now = time.monotonic()
    return Standing(
        rank,
        reading.iteration,
        tuple(sorted(activity.open)),
        now - (reading.now - last),
        now,
        _clock_name(),
        time.time() - now,
    )


def in_collective(stacks: str) -> bool | None:
    """Return whether a thread with these stacks is in torch's module of collectives; None without stacks."""
    return _COLLECTIVES in stacks if stacks else None


def root_suspect(own: Standing, others: Iterable[Standing]) -> Suspect | None:
    """Return which of these ranks the others wait for, if one stands out. `own` is late.

    What another one was doing before `own` did its last thing says nothing, and is left out.
    """
    one_clock = {own.clock}
    known = [own]
    for other in others:
        if _time(other.seen_at, other, False) >= _time(own.moved_at, own, False):
            known.append(other)
            one_clock.add(other.clock)
    if len(known) < 2:
        return None
    return _behind(known) or _missing(known) or _still_before_all(known, len(one_clock) == 1)


def _behind(known: list[Standing]) -> Suspect | None:
    numbers = sorted({s.iteration for s in known if s.iteration is not None})
    if len(numbers) < 2 or any(s.iteration is None for s in known):
        return None
    last = [s for s in known if s.iteration == numbers[0]]
    if len(last) > 1:
        return None
    return Suspect(last[0].rank, f"{_place(last[0])} of iteration {numbers[0]}, while others are in {numbers[-1]}")


def _missing(known: list[Standing]) -> Suspect | None:
    missing = [s for s in known if s.waits is False]
    if len(missing) != 1 or any(s.waits is None for s in known):
        return None
    return Suspect(missing[0].rank, f"{_place(missing[0])}, and not in the collective that all others wait in")


def _still_before_all(known: list[Standing], one_clock: bool) -> Suspect | None:
    ordered = sorted(known, key=lambda s: _time(s.moved_at, s, one_clock))
    times = [_time(s.moved_at, s, one_clock) for s in ordered]
    lead_s, spread_s = times[1] - times[0], times[-1] - times[1]
    if lead_s <= max(_CLEARLY_S, spread_s):
        return None
    first, rest = ordered[0], ordered[1:]
    why = f"{_place(first)}, and stands still since {lead_s:.3f} s before all others"
    common = functools.reduce(frozenset.intersection, (frozenset(s.sections) for s in rest)) - {*first.sections}
    return Suspect(first.rank, why + (f", which are in {', '.join(map(repr, sorted(common)))}" if common else ""))


def _place(standing: Standing) -> str:
    return f"in {', '.join(map(repr, standing.sections))}" if standing.sections else "outside all sections"


def _time(at: float, standing: Standing, one_clock: bool) -> float:
    """Return a time that can be compared: of the host's clock if it is the same for all, of the wall clock if not."""
    return at if one_clock else at + standing.wall_s


@functools.cache
def _clock_name() -> str:
    """Return what tells hosts, and their starts, apart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
