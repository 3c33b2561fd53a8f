"""The monitor's look at a board: consistent, without waiting for the writer, and whatever is in the words."""

from __future__ import annotations

import time
from dataclasses import dataclass

from inprocess.sections.board import Board
from inprocess.sections.layout import (
    ATTACHED,
    BEAT_LIMIT,
    BEGUN,
    CLIENT_GENERATION,
    COUNTING,
    EPOCH_SHIFT,
    FROZEN_AT,
    GENERATION,
    IDLE_SINCE,
    INITIAL_LIMIT,
    ITERATION,
    LAST_BEAT,
    LIVE,
    OFFSET,
    OUT_LIMIT,
    RECENT,
    SEQUENCE,
    STARTED,
    STEP_AGE,
    WARMUP_ITERATIONS,
    from_ns,
)
from inprocess.sections.table import Activity, Limits

__all__ = ["Event", "Reading", "read_board", "recent_events"]

_READ_TRIES = 20
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Event:
    """Something the rank did, at a time of the section clock in seconds. `kind`: open, close or beat."""

    kind: str
    section: str
    at: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A consistent look at a board. `active`: a client is there, and its clocks count. `frozen`: they stand still."""

    epoch: int
    active: bool
    frozen: bool
    now: float  # of the section clock, for the time that was asked for
    events: int  # how many there were so far
    iteration: int | None
    activity: Activity
    limits: Limits


def read_board(board: Board, now_ns: int) -> Reading:
    """Return what is there, for this time of CLOCK_MONOTONIC. Never waits for the writer, and survives nonsense."""
    words = _consistent_words(board)
    generation = words[GENERATION]
    frozen = words[FROZEN_AT]
    iteration = words[ITERATION]
    return Reading(
        epoch=generation >> EPOCH_SHIFT,
        active=bool(words[ATTACHED] and words[COUNTING]),
        frozen=frozen != 0,
        now=(frozen or now_ns - words[OFFSET]) * _NS,
        events=words[SEQUENCE] // 2,
        iteration=iteration if iteration >= 0 else None,
        activity=_activity(board, words),
        limits=Limits(
            from_ns(words[INITIAL_LIMIT]),
            from_ns(words[BEAT_LIMIT]),
            from_ns(words[OUT_LIMIT]),
            {name: from_ns(words[slot + 1]) for name, slot in board.slots.items()},
            words[WARMUP_ITERATIONS],
        ),
    )


def recent_events(board: Board) -> list[Event]:
    """Return the last events, the oldest first."""
    names = {slot: name for name, slot in board.slots.items()}
    found = []
    for index in range(RECENT):
        code, stamp = board.words[board.ring + 2 * index], board.words[board.ring + 2 * index + 1]
        if stamp > 0:
            kind = ("open", "close", "beat", "?")[code & 3]
            found.append(Event(kind, names.get(code >> 2, ""), stamp * _NS))
    return sorted(found, key=lambda event: event.at)


def _activity(board: Board, words: list[int]) -> Activity:
    if words[CLIENT_GENERATION] & ~LIVE != words[GENERATION] & ~LIVE:  # no event since the epoch began
        return Activity(words[BEGUN] * _NS, words[BEGUN] * _NS)
    beat, age = words[LAST_BEAT], words[STEP_AGE]
    return Activity(
        started=words[STARTED] * _NS,
        idle_since=words[IDLE_SINCE] * _NS,
        last_beat=beat * _NS if beat else None,
        open={name: words[slot] * _NS for name, slot in board.slots.items() if words[slot]},
        step_age=age if age >= 0 else None,
        background={name: words[slot + 3] * _NS for name, slot in board.slots.items() if words[slot + 3]},
    )


def _consistent_words(board: Board) -> list[int]:
    words: list[int] = []
    for _ in range(_READ_TRIES):
        words = board.words[: board.ring].tolist()
        if not words[SEQUENCE] & 1 and board.words[SEQUENCE] == words[SEQUENCE]:
            break
        time.sleep(0)
    return words
