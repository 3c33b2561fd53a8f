"""Sections that go on beside training, like the writing of a checkpoint.

    rank      begins and ends them, asks how much time is left, and ends the work that is late, not itself
    monitor   names them in its report when the rank is late in something else

What the rank itself does is watched as if they were not there.
"""

from __future__ import annotations

import time

from inprocess.fault_tolerance.data import RankInfo
from inprocess.fault_tolerance.recorder import Recorder
from inprocess.sections.board_reader import read_board
from inprocess.sections.deadlines import Alarm, AlarmAction, Deadline
from inprocess.sections.report import report_alarm

__all__ = ["BackgroundSection"]


class BackgroundSection:
    """Made by `RankMonitorClient.begin_in_background`. Methods on any thread; they do not raise.

    After a restart, by a client that was shut down, and in a forked child it is never late, and not learned from.
    """

    def __init__(self, recorder: Recorder, rank: RankInfo | None, name: str, key: object) -> None:
        self._recorder = recorder
        self._rank = None if rank is None else rank.global_rank
        self._name = name
        self._key = key

    def left_s(self) -> float | None:
        """Seconds until it is late, of a clock that stands still while hang protection is off; None: never."""
        return self._recorder.left_in_background(self._key)

    def overdue(self, pid: int | None) -> str:
        """Log one line of JSON on it and on the process that does its work; return the same in a few words."""
        board = self._recorder.board
        reading = read_board(board, time.monotonic_ns())
        since, limit = reading.activity.background.get(self._name), reading.limits.sections.get(self._name)
        if since is None or limit is None:
            return f"was late in section {self._name!r} and was killed"
        late = Deadline(f"in section {self._name!r}", since, limit, self._name)
        alarm = Alarm(AlarmAction.ABANDON, (late,), reading)
        report_alarm(alarm, board, pid or 0, self._rank, lambda: "")
        return f"was {alarm.summary}; it was killed"

    def end(self, taken_s: float | None) -> None:
        """It is over, and took so long; None: do not learn from it. Idempotent."""
        self._recorder.end_in_background(self._key, taken_s)
