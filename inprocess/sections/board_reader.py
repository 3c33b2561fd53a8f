"""Consistent copies of a board, read without waiting for the process that writes it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from inprocess.sections import board as at
from inprocess.sections.board import Board

_READ_TRIES = 20
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds; None: no limit."""

    initial_beat: float | None = None
    beat: float | None = None
    out_of_section: float | None = None
    sections: Mapping[str, float | None] = field(default_factory=dict)
    num_warmup_iterations: int = 0

    @property
    def shortest(self) -> float | None:
        """The shortest limit: what begins now cannot be late before it has passed."""
        finite = [
            v for v in (self.initial_beat, self.beat, self.out_of_section, *self.sections.values()) if v is not None
        ]
        return min(finite, default=None)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank has done since `started`: times of the section clock, in seconds.

    `idle_since` is when the last open section was closed, whether another is open now or not. `step_age` counts the
    iterations from the first step to the latest; None before the first. Sections in the `background` have no deadline
    here: the rank ends their work itself.
    """

    started: float
    idle_since: float
    last_beat: float | None = None
    open: Mapping[str, float] = field(default_factory=dict)
    step_age: int | None = None
    background: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SectionEvent:
    """An event of the rank, at a time of the section clock in seconds. `kind`: open, close or beat."""

    kind: str
    section: str
    at: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A consistent copy. `active`: there is a client, and its clocks count. `frozen`: the section clock is stopped."""

    restart_index: int
    active: bool
    frozen: bool
    now: float  # on the section clock, for the time that was asked for
    events: int  # how many updates there were so far
    iteration: int | None
    activity: Activity
    limits: Limits


def read_board(board: Board, now_ns: int) -> Reading:
    """Return a copy for this time of CLOCK_MONOTONIC. Never waits for the writer, and accepts any values of words."""
    words = _consistent_words(board)
    generation = words[at.GENERATION]
    frozen = words[at.FROZEN_AT]
    iteration = words[at.ITERATION]
    return Reading(
        restart_index=generation >> at.RESTART_SHIFT,
        active=bool(words[at.ATTACHED] and words[at.COUNTING]),
        frozen=frozen != 0,
        now=(frozen or now_ns - words[at.OFFSET]) * _NS,
        events=words[at.SEQUENCE] // 2,
        iteration=iteration if iteration >= 0 else None,
        activity=_activity(board, words),
        limits=Limits(
            at.from_ns(words[at.INITIAL_LIMIT]),
            at.from_ns(words[at.BEAT_LIMIT]),
            at.from_ns(words[at.OUT_LIMIT]),
            {name: at.from_ns(words[slot + 1]) for name, slot in board.slots.items()},
            words[at.WARMUP_ITERATIONS],
        ),
    )


def recent_events(board: Board) -> list[SectionEvent]:
    """Return the latest events, the oldest first."""
    names = {slot: name for name, slot in board.slots.items()}
    found = []
    for index in range(at.RECENT):
        code, stamp = board.words[board.ring + 2 * index], board.words[board.ring + 2 * index + 1]
        if stamp > 0:
            kind = ("open", "close", "beat", "?")[code & 3]
            found.append(SectionEvent(kind, names.get(code >> 2, ""), stamp * _NS))
    return sorted(found, key=lambda event: event.at)


def _activity(board: Board, words: list[int]) -> Activity:
    if words[at.CLIENT_GENERATION] & ~at.LIVE != words[at.GENERATION] & ~at.LIVE:  # no event since `Board.begin`
        return Activity(words[at.BEGUN] * _NS, words[at.BEGUN] * _NS)
    beat, age = words[at.LAST_BEAT], words[at.STEP_AGE]
    return Activity(
        started=words[at.STARTED] * _NS,
        idle_since=words[at.IDLE_SINCE] * _NS,
        last_beat=beat * _NS if beat else None,
        open={name: words[slot] * _NS for name, slot in board.slots.items() if words[slot]},
        step_age=age if age >= 0 else None,
        background={name: words[slot + 3] * _NS for name, slot in board.slots.items() if words[slot + 3]},
    )


def _consistent_words(board: Board) -> list[int]:
    words: list[int] = []
    for _ in range(_READ_TRIES):
        words = board.words[: board.ring].tolist()
        if not words[at.SEQUENCE] & 1 and board.words[at.SEQUENCE] == words[at.SEQUENCE]:
            break
        time.sleep(0)
    return words
