"""Deadlines of a rank's sections and heartbeats: when to read its board, and what to do when one has passed.

The rank never wakes its monitor, and need not: what begins after a look at the board cannot be late before the shortest
limit has passed. So one look per shortest limit, and one at each known deadline, find everything in time.

Pure but for the board: the caller passes the time. Deadlines are on the section clock, see `board`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from inprocess.ipc.suspension import starts_again
from inprocess.sections.board import Board
from inprocess.sections.board_reader import Activity, Limits, Reading, read_board
from inprocess.sections.timeouts import STEP, WARMUP

_SHORTEST_PAUSE_S = 0.005
_RECHECK_S = 0.25
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class ActivityDeadline:
    """`what` has gone on since `since` and may take `limit` seconds. `section` is None for heartbeats and the gap."""

    what: str
    since: float
    limit: float
    section: str | None = None

    @property
    def at(self) -> float:
        """The time after which it is late."""
        return self.since + self.limit

    def describe(self, now: float) -> str:
        """Return a readable sentence."""
        return f"{self.what} for {now - self.since:.2f} s; the limit is {self.limit:g} s"


def deadlines(activity: Activity, limits: Limits) -> tuple[ActivityDeadline, ...]:
    """Return all deadlines that apply, the earliest first. Each one that has passed is a fault by itself."""
    found: list[tuple[str, float, float | None, str | None]] = []
    if activity.last_beat is None:
        found.append(("without a first heartbeat", activity.started, limits.initial_beat, None))
    else:
        found.append(("without a heartbeat", activity.last_beat, limits.beat, None))
    for name, since in activity.open.items():
        found.append((f"in section {name!r}", since, _section_limit(name, activity, limits), name))
    if not activity.open and not _may_warm_up_outside(activity, limits):
        found.append(("outside all sections", activity.idle_since, limits.out_of_section, None))
    applicable = [ActivityDeadline(what, since, limit, name) for what, since, limit, name in found if limit is not None]
    return tuple(sorted(applicable, key=lambda deadline: deadline.at))


def _section_limit(name: str, activity: Activity, limits: Limits) -> float | None:
    if name == STEP and WARMUP in limits.sections and (activity.step_age or 0) < limits.num_warmup_iterations:
        return limits.sections[WARMUP]
    return limits.sections.get(name)


def _may_warm_up_outside(activity: Activity, limits: Limits) -> bool:
    """Whether the gap before the first step has no limit: the warm-up is configured without one."""
    return activity.step_age is None and WARMUP in limits.sections and limits.sections[WARMUP] is None


class AlarmAction(enum.Enum):
    """What is to be done about an alarm."""

    RESTART = "restart"  # restart all ranks within their processes
    KILL = "kill"  # end this rank
    ABANDON = "abandon"  # end the work of a section in the background; done by the rank, not by its monitor


@dataclass(frozen=True, slots=True)
class Alarm:
    """Deadlines that have passed, the earliest first, and what is to be done."""

    action: AlarmAction
    overdue: tuple[ActivityDeadline, ...]
    reading: Reading

    @property
    def summary(self) -> str:
        """All of them on one readable line."""
        return "; ".join(deadline.describe(self.reading.now) for deadline in self.overdue)


class SectionWatch:
    """Decides for one rank. Used by one thread.

    Without `grace_s` a rank that is late is to be killed, and again every `repeat_s` while it is late. With `grace_s`
    the job is to be restarted at the limit, once per restart index, and the rank is to be killed `grace_s` after that
    if it is still late (after a monitor that was stopped itself, the rank still has its full time). `is_alive(now)` may
    veto both, for a rank that is slow but not stuck; it is called again soon.
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
        self._restart_index = -1
        self._restarted_at: float | None = None  # section clock
        self._kill_again_at = 0.0
        self._next_look_s: float | None = None
        self._missed_s = 0.0  # since the last look
        self._suspensions: list[tuple[float, float]] = []  # of this process: their ends, on the section clock; seconds
        self.events = 0  # updates of the board at the last look

    @property
    def next_look_s(self) -> float | None:
        """When to `look` again, in seconds of CLOCK_MONOTONIC; None: there is no limit yet."""
        return self._next_look_s

    def note_suspension(self, missed_s: float) -> None:
        """Note, before a look, that this process was suspended for so long, and perhaps the rank with it.

        Each limit starts again then, if it is not much longer: the rank may go on some seconds later.
        """
        self._missed_s = max(self._missed_s, missed_s)

    def look(self, now_ns: int) -> Alarm | None:
        """Read the board at this time of CLOCK_MONOTONIC; return what is to be done now, if anything."""
        reading = read_board(self.board, now_ns)
        self.events = reading.events
        now_s = now_ns * _NS
        if reading.restart_index != self._restart_index or not reading.active:
            self._restart_index, self._restarted_at, self._kill_again_at = reading.restart_index, None, 0.0
        shortest = reading.limits.shortest
        self._next_look_s = None if shortest is None else now_s + max(_SHORTEST_PAUSE_S, shortest)
        if not reading.active:
            return None
        if self._missed_s:
            longer = [(until, missed_s) for until, missed_s in self._suspensions if missed_s > self._missed_s]
            self._suspensions, self._missed_s = [*longer, (reading.now, self._missed_s)], 0.0
        due = self._after_suspension(deadlines(reading.activity, reading.limits))
        # A stopped clock may go on at any moment; the time that is left then counts from that moment.
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

    def _after_suspension(self, due: tuple[ActivityDeadline, ...]) -> tuple[ActivityDeadline, ...]:
        if not self._suspensions:
            return due

        def begun_again(deadline: ActivityDeadline) -> ActivityDeadline:
            ends = [until for until, missed_s in self._suspensions if starts_again(missed_s, deadline.limit)]
            return replace(deadline, since=max([deadline.since, *ends]))

        return tuple(sorted(map(begun_again, due), key=lambda deadline: deadline.at))

    def _alarm(self, due: tuple[ActivityDeadline, ...], reading: Reading, now_s: float) -> Alarm | None:
        late = tuple(deadline for deadline in due if reading.now >= deadline.at)
        if not late:
            return None
        if self._grace_s is not None and self._restarted_at is None:
            return Alarm(AlarmAction.RESTART, late, reading)
        hopeless = tuple(deadline for deadline in late if reading.now >= self._kill_at(deadline))
        if hopeless and now_s >= self._kill_again_at:
            return Alarm(AlarmAction.KILL, hopeless, reading)
        return None

    def _kill_at(self, deadline: ActivityDeadline) -> float:
        """Return when the rank is to be killed, on the section clock."""
        if self._grace_s is None:
            return deadline.at
        return max(deadline.at, self._restarted_at or 0.0) + self._grace_s

    def _note(self, alarm: Alarm, now_s: float) -> None:
        if alarm.action is AlarmAction.RESTART:
            self._restarted_at = alarm.reading.now
            self._look_within(now_s, self._grace_s or 0.0)
        else:
            self._kill_again_at = now_s + self._repeat_s
            self._look_within(now_s, self._repeat_s)

    def _wait_for(self, due: tuple[ActivityDeadline, ...], reading: Reading, now_s: float) -> None:
        for deadline in due:
            for at in (deadline.at, self._kill_at(deadline)):
                if at > reading.now:
                    self._look_within(now_s, at - reading.now)
        if any(deadline.at <= reading.now for deadline in due) and self._kill_again_at > now_s:
            self._look_within(now_s, self._kill_again_at - now_s)

    def _look_within(self, now_s: float, pause_s: float) -> None:
        at = now_s + max(_SHORTEST_PAUSE_S, pause_s)
        self._next_look_s = at if self._next_look_s is None else min(at, self._next_look_s)
