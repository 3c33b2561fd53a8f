"""The report on a rank that is late, and its root suspect: the rank that the others probably wait for.

A hang of one rank makes all others late, in the collective in which they wait for it. The suspect is the rank that is

    in an earlier iteration than all others,
    else, by their stacks, the only one that is not in a collective of torch,
    else the one whose last event (a section opened or closed) is clearly earlier than that of all others.

If none of these singles out one rank there is no suspect, and the stacks in the reports have to be compared.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from inprocess.sections.board import Board
from inprocess.sections.board_reader import Reading, recent_events
from inprocess.sections.deadlines import Alarm

_log = logging.getLogger(__name__)
_LISTED_EVENTS = 16
_CLEARLY_S = 0.1
_COLLECTIVES = "distributed_c10d.py"


def report_alarm(
    alarm: Alarm,
    board: Board,
    pid: int,
    rank: int | None,
    read_stacks: Callable[[], str],
    others: Sequence[Standing] = (),
    cycle: int | None = None,
) -> str:
    """Log a report on a late rank as one line of JSON at ERROR, and return it.

    It has what is late, open sections and for how long, the latest events, where the process waits in the kernel, the
    Python stacks of its threads, and the root suspect if `others` allow to tell it. `cycle` is the launcher's; without
    one it is the wrapper's restart index. Takes as long as `read_stacks`. Never raises.
    """
    reading = alarm.reading
    found: dict[str, Any] = {
        "event": "section_timeout",
        "step": alarm.action.value,
        "summary": alarm.summary,
        "late_s": round(reading.now - alarm.overdue[0].at, 6),
        "pid": pid,
        "rank": rank,
        "host": socket.gethostname(),
        "iteration": reading.iteration,
        "cycle": reading.restart_index if cycle is None else cycle,
        "open": {name: round(reading.now - since, 3) for name, since in reading.activity.open.items()},
        "background": {name: round(reading.now - since, 3) for name, since in reading.activity.background.items()},
        "recent": [
            f"{event.kind} {event.section}".rstrip() + f" {reading.now - event.at:.3f} s ago"
            for event in recent_events(board)[-_LISTED_EVENTS:]
        ],
        "waits_in": _proc(pid, "wchan"),
        "state": _state(pid),
    }
    stacks = ""
    try:
        stacks = read_stacks()
    except Exception as error:  # a report without stacks is better than no report
        _log.warning("the stacks cannot be read: %s", error)
    found.update(_suspect(alarm, rank, others, stacks))
    found["stacks"] = stacks
    line = json.dumps(found)
    _log.error("%s", line)
    return line


def _suspect(alarm: Alarm, rank: int | None, others: Sequence[Standing], stacks: str) -> dict[str, Any]:
    own = None if rank is None else standing_of(rank, alarm.reading)
    others = [other for other in others if other.rank != rank]
    if own is None or not others:
        return {}
    suspect = root_suspect(replace(own, waits=in_collective(stacks)), others)
    if suspect is not None:
        _log.error("root suspect: rank %d, %s", suspect.rank, suspect.why)
    compared = sorted({own.rank, *(other.rank for other in others)})
    return {"root_suspect": None if suspect is None else asdict(suspect), "compared_ranks": compared}


def _proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    for line in _proc(pid, "status").splitlines():
        if line.startswith("State:"):
            return line.split(maxsplit=1)[1]
    return "gone"


# -- the root suspect --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is: its open sections, the time of its last event, and whether it `waits` in a collective.

    Times are seconds of the clock named by `clock`, which is behind the wall clock by `wall_s`. `seen_at` is when the
    board was read.
    """

    rank: int
    iteration: int | None
    sections: tuple[str, ...]
    moved_at: float
    seen_at: float
    clock: str
    wall_s: float
    waits: bool | None = None  # None: unknown

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON knows them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Standing:
        """Read what `to_json` returned. ValueError for anything else."""
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
            raise ValueError(f"not the standing of a rank: {values!r}"[:200]) from error


@dataclass(frozen=True, slots=True)
class Suspect:
    """The rank that the others probably wait for, and by what it was told."""

    rank: int
    why: str


def standing_of(rank: int, reading: Reading) -> Standing | None:
    """Return the standing of a rank by a copy of its board made just now; None if its clocks do not count."""
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
    """Return whether a thread in these stacks is in torch's module of collectives; None without stacks."""
    return _COLLECTIVES in stacks if stacks else None


def root_suspect(own: Standing, others: Iterable[Standing]) -> Suspect | None:
    """Return which of these ranks the others wait for, if one can be told. `own` is the late rank.

    Standings of other ranks from before the last event of `own` say nothing and are left out.
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
    why = f"{_place(first)}, its last event {lead_s:.3f} s before those of all others"
    common = functools.reduce(frozenset.intersection, (frozenset(s.sections) for s in rest)) - {*first.sections}
    return Suspect(first.rank, why + (f", which are in {', '.join(map(repr, sorted(common)))}" if common else ""))


def _place(standing: Standing) -> str:
    return f"in {', '.join(map(repr, standing.sections))}" if standing.sections else "outside all sections"


def _time(at: float, standing: Standing, one_clock: bool) -> float:
    """Return a time to compare: on the host's clock if all ranks share it, else on the wall clock."""
    return at if one_clock else at + standing.wall_s


@functools.cache
def _clock_name() -> str:
    """Return a name that differs between hosts, and between starts of one host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
