"""What a monitor finds out about a rank that is late, before it does anything to it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from inprocess.sections.board import Board
from inprocess.sections.board_reading import recent_events
from inprocess.sections.suspect import Standing, in_collective, root_suspect, standing_of
from inprocess.sections.watch import Alarm

__all__ = ["report_alarm"]

_log = logging.getLogger(__name__)
_LISTED_EVENTS = 16


def report_alarm(
    alarm: Alarm,
    board: Board,
    pid: int,
    rank: int | None,
    read_stacks: Callable[[], str],
    others: Sequence[Standing] = (),
    cycle: int | None = None,
) -> str:
    """Log one line of JSON at ERROR and return it: what is late, what is open for how long, what happened last, where
    the process waits, and the Python stacks of its threads; who is the cause, as far as can be told by where `others`
    stand. `cycle` is that of the launcher, if there is one; else it is the wrapper's iteration. Bounded by what
    `read_stacks` takes. Never raises."""
    reading = alarm.reading
    found: dict[str, Any] = {
        "event": "section_timeout",
        "step": alarm.step.value,
        "summary": alarm.summary,
        "late_s": round(reading.now - alarm.overdue[0].at, 6),
        "pid": pid,
        "rank": rank,
        "host": socket.gethostname(),
        "iteration": reading.iteration,
        "cycle": reading.epoch if cycle is None else cycle,
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
    except Exception as error:  # a report without stacks is better than none
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
