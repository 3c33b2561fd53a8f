"""When to look at a board, and what to do about what is late. No process and no descriptor: the caller brings the time.

The rank never wakes its monitor. It need not: what begins after a look cannot be late before the shortest limit has
passed, so a look once per shortest limit, and one at each deadline that is known, see everything in time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from inprocess.sections.board import Board
from inprocess.sections.board_reading import Reading, read_board
from inprocess.sections.table import Deadline, deadlines

__all__ = ["Alarm", "SectionWatch", "Step"]

_SHORTEST_PAUSE_S = 0.005
_RECHECK_S = 0.25
_NS = 1e-9


class Step(enum.Enum):
    """What is due."""

    RESTART = "restart"  # all ranks, within their processes
    KILL = "kill"  # this rank
    ABANDON = "abandon"  # what goes on in the background; by the rank, not by its monitor


@dataclass(frozen=True, slots=True)
class Alarm:
    """`overdue`, the earliest first, has led to `step`."""

    step: Step
    overdue: tuple[Deadline, ...]
    reading: Reading

    @property
    def summary(self) -> str:
        """One line for people."""
        return "; ".join(deadline.describe(self.reading.now) for deadline in self.overdue)


class SectionWatch:
    """Decides for one rank; for one thread.

    Without `grace_s` a rank that is late is to be killed, and again every `repeat_s` for as long as it is. With it, the
    job is to be restarted at the limit, once per epoch, and the rank killed `grace_s` after that if it is still late (a
    monitor that was itself stopped gives a rank its full time). `is_alive(now)` may veto both, for a rank that is slow
    but not stuck; it is asked again soon.
    """

    def __init__(
        self,
        board: Board,
        *,
        grace_s: float | None = None,
        repeat_s: float = 5.0,
        is_alive: Callable[[float], bool] | None = None,
    ) -> None:
        self.board = board
        self._grace_s = grace_s
        self._repeat_s = repeat_s
        self._is_alive = is_alive
        self._epoch = -1
        self._restarted_at: float | None = None  # section clock
        self._kill_again_at = 0.0
        self._next_look_s: float | None = None
        self.events = 0  # that the board had at the last look

    @property
    def next_look_s(self) -> float | None:
        """When to `look` again, in seconds of CLOCK_MONOTONIC; None: not before a limit is installed."""
        return self._next_look_s

    def look(self, now_ns: int) -> Alarm | None:
        """Look at the board, at this time of CLOCK_MONOTONIC."""
        reading = read_board(self.board, now_ns)
        self.events = reading.events
        now_s = now_ns * _NS
        if reading.epoch != self._epoch or not reading.active:
            self._epoch, self._restarted_at, self._kill_again_at = reading.epoch, None, 0.0
        shortest = reading.limits.shortest
        self._next_look_s = None if shortest is None else now_s + max(_SHORTEST_PAUSE_S, shortest)
        if not reading.active:
            return None
        due = deadlines(reading.activity, reading.limits)
        # A frozen clock may go on at any moment from where it stands: what is left then is left from now on.
        self._wait_for(due, reading, now_s)
        if reading.frozen:
            return None
        alarm = self._alarm(due, reading, now_s)
        if alarm is not None and self._is_alive is not None and self._is_alive(now_s):
            self._look_within(now_s, _RECHECK_S)
            return None
        if alarm is not None:
            self._note(alarm, now_s)
        return alarm

    def _alarm(self, due: tuple[Deadline, ...], reading: Reading, now_s: float) -> Alarm | None:
        late = tuple(deadline for deadline in due if reading.now >= deadline.at)
        if not late:
            return None
        if self._grace_s is not None and self._restarted_at is None:
            return Alarm(Step.RESTART, late, reading)
        hopeless = tuple(deadline for deadline in late if reading.now >= self._kill_at(deadline))
        if hopeless and now_s >= self._kill_again_at:
            return Alarm(Step.KILL, hopeless, reading)
        return None

    def _kill_at(self, deadline: Deadline) -> float:
        """Return the time of the section clock."""
        if self._grace_s is None:
            return deadline.at
        return max(deadline.at, self._restarted_at or 0.0) + self._grace_s

    def _note(self, alarm: Alarm, now_s: float) -> None:
        if alarm.step is Step.RESTART:
            self._restarted_at = alarm.reading.now
            self._look_within(now_s, self._grace_s or 0.0)
        else:
            self._kill_again_at = now_s + self._repeat_s
            self._look_within(now_s, self._repeat_s)

    def _wait_for(self, due: tuple[Deadline, ...], reading: Reading, now_s: float) -> None:
        for deadline in due:
            for at in (deadline.at, self._kill_at(deadline)):
                if at > reading.now:
                    self._look_within(now_s, at - reading.now)
        if any(deadline.at <= reading.now for deadline in due) and self._kill_again_at > now_s:
            self._look_within(now_s, self._kill_again_at - now_s)

    def _look_within(self, now_s: float, pause_s: float) -> None:
        at = now_s + max(_SHORTEST_PAUSE_S, pause_s)
        self._next_look_s = at if self._next_look_s is None else min(at, self._next_look_s)
