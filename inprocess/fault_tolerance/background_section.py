"""A section that goes on beside training: what `RankMonitorClient.begin_in_background` returns."""

from __future__ import annotations

import time

from inprocess.fault_tolerance.recorder import Recorder
from inprocess.monitor_process.messages import RankInfo
from inprocess.sections.board_reader import read_board
from inprocess.sections.deadlines import ActivityDeadline, Alarm, AlarmAction
from inprocess.sections.report import report_alarm

__all__ = ["BackgroundSection"]


class BackgroundSection:
    """A section that goes on beside training, like the writing of a checkpoint. Methods on any thread; none raises.

    The rank itself ends work that is late; its monitor only names the section in reports. After a restart, after the
    client was shut down and in a forked child the section is never late, and nothing is learned from it.
    """

    def __init__(self, recorder: Recorder, rank: RankInfo | None, name: str, key: object) -> None:
        self._recorder = recorder
        self._rank = None if rank is None else rank.global_rank
        self._name = name
        self._key = key

    def left_s(self) -> float | None:
        """Return the seconds until it is late, on a clock that stops while hang protection is off; None: never late."""
        return self._recorder.left_in_background(self._key)

    def overdue(self, pid: int | None) -> str:
        """Log a report on the section and the process that does its work; return a summary in a few words."""
        board = self._recorder.board
        reading = read_board(board, time.monotonic_ns())
        since, limit = reading.activity.background.get(self._name), reading.limits.sections.get(self._name)
        if since is None or limit is None:
            return f"was late in section {self._name!r} and was killed"
        late = ActivityDeadline(f"in section {self._name!r}", since, limit, self._name)
        alarm = Alarm(AlarmAction.ABANDON, (late,), reading)
        report_alarm(alarm, board, pid or 0, self._rank, lambda: "")
        return f"was {alarm.summary}; it was killed"

    def end(self, taken_s: float | None) -> None:
        """End the section. It took `taken_s` seconds; None: do not learn from it. Idempotent."""
        self._recorder.end_in_background(self._key, taken_s)
