"""The section board within the monitor process of the in-process wrapper."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable

from inprocess.sections.board import Board
from inprocess.sections.board_reader import read_board
from inprocess.sections.deadlines import Alarm, AlarmAction, SectionWatch
from inprocess.sections.report import Standing, report_alarm, standing_of

__all__ = ["AlarmAction", "EmbeddedSections"]


class EmbeddedSections:
    """Watches the board behind the inherited descriptor `fd`; nothing if that is None. For the thread of one loop.

    A section that is late for `grace_s` after the restart it has led to is to end the rank. With the setting
    `ladder="progress"` nothing is late while the main thread has executed bytecode within `quiet_s`: `silent_s(now)`
    says when it did, both in seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, fd: int | None, grace_s: float, quiet_s: float, silent_s: Callable[[float], float]) -> None:
        self._board: Board | None = None
        self._watch: SectionWatch | None = None
        if fd is None:
            return
        self._board = Board.attach(fd)
        os.close(fd)
        follows_progress = self._board.config.get("ladder") == "progress"
        self._watch = SectionWatch(
            self._board,
            grace_s=grace_s,
            repeat_s=grace_s,
            is_alive=(lambda now: silent_s(now) < quiet_s) if follows_progress else None,
        )
        self._watch.look(time.monotonic_ns())  # for the time of the next look

    @property
    def next_look_s(self) -> float | None:
        """When to `look` again at the latest, in seconds of CLOCK_MONOTONIC; None if there is nothing to look at."""
        return None if self._watch is None else self._watch.next_look_s

    def look(self) -> Alarm | None:
        """Return what is to be done now, if anything."""
        return None if self._watch is None else self._watch.look(time.monotonic_ns())

    def note(self, rank: int) -> str:
        """Return on one line where the rank stands, for `report` in the monitor processes of others. Any thread."""
        if self._board is None:
            return ""
        standing = standing_of(rank, read_board(self._board, time.monotonic_ns()))
        return "" if standing is None else json.dumps(standing.to_json())

    def report(self, alarm: Alarm, pid: int, rank: int, read_stacks: Callable[[], str], notes: Iterable[str]) -> str:
        """Log what is known of the rank as one line of JSON, and return it. `notes` are those of the other ranks."""
        assert self._board is not None
        others = []
        for note in notes:
            with contextlib.suppress(ValueError):
                others.append(Standing.from_json(json.loads(note)))
        return report_alarm(alarm, self._board, pid, rank, read_stacks, others)
