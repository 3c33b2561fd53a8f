"""What a monitor watches: a process, and the sections on its board."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence

from inprocess.main_thread.stacks import read_stacks
from inprocess.sections.board import Board
from inprocess.sections.board_reader import read_board
from inprocess.sections.deadlines import Alarm, SectionWatch
from inprocess.sections.report import Standing, report_alarm, standing_of

_log = logging.getLogger(__name__)
_PAUSE_S = 0.1
_UNKILLABLE_S = 10.0  # after SIGKILL: a core dump or much memory takes a while


class WatchedProcess:
    """A process, by process descriptor: a pid that is used again is never taken for it. Its end is an event.

    `stacks` is the signal that makes it write its stacks, and the descriptor to read them from, which the caller keeps.
    ProcessLookupError if there is no such process.
    """

    def __init__(self, pid: int, stacks: tuple[int, int] | None = None) -> None:
        self.pid = pid
        self.kill_at_s: float | None = None  # when SIGKILL is due, in seconds of CLOCK_MONOTONIC
        self._stacks = stacks
        self._asked: tuple[signal.Signals, float] | None = None  # the termination signal it was sent, and the grace
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Return the descriptor to poll: readable when the process has ended."""
        return self._fd

    def wait_gone(self, timeout_s: float) -> bool:
        """Return whether the process has ended (a zombie has), within `timeout_s`."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self.wait_gone(0)

    def send(self, number: int) -> None:
        """Send a signal; does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._fd, number)

    def read_stacks(self, timeout_s: float) -> str:
        """Return the Python stacks of all its threads; empty if it does not write them in time."""
        return "" if self._stacks is None else read_stacks(self.pid, *self._stacks, timeout_s)

    def note_suspension(self, missed_s: float) -> None:
        """Put SIGKILL off: this process was suspended, and perhaps the watched one with it."""
        if self.kill_at_s is not None:
            self.kill_at_s += missed_s

    # -- termination ---------------------------------------------------------------------------------------------------

    @property
    def terminating(self) -> bool:
        """Whether `terminate` was called."""
        return self._asked is not None

    def terminate(self, number: signal.Signals, grace_s: float) -> None:
        """Continue the process if it is stopped, and send the termination signal; SIGKILL is due after the grace.

        Only the first call has an effect: a second signal would interrupt the handler of a process that cleans up.
        """
        if self._asked is not None:
            return
        self._asked = number, grace_s
        self.send(signal.SIGCONT)
        self.send(number)
        if number != signal.SIGKILL:
            self.kill_at_s = time.monotonic() + grace_s

    def kill_if_due(self) -> None:
        """Send SIGKILL if the grace of `terminate` is over and the process has not ended."""
        if self._asked is None or self.kill_at_s is None or time.monotonic() < self.kill_at_s:
            return
        self.kill_at_s = None
        if not self.gone:
            number, grace_s = self._asked
            _log.error("sending SIGKILL to process %d: not ended %g s after %s", self.pid, grace_s, number.name)
            self.send(signal.SIGKILL)

    def end(self, grace_s: float) -> bool:
        """Terminate the process with SIGTERM, and wait for its end.

        Returns whether it has ended; False for one that the kernel cannot end (a driver or a file system hangs).
        """
        self.terminate(signal.SIGTERM, grace_s)
        deadline = time.monotonic() + grace_s + _UNKILLABLE_S
        while not self.wait_gone(min(_PAUSE_S, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                return False
            self.send(signal.SIGCONT)
            self.kill_if_due()
        return True

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class WatchedSections:
    """The sections of a rank, by the board behind a descriptor, which the caller keeps. BoardError if it is none.

    The options are those of `SectionWatch`; `is_alive` counts only if the rank's settings have `ladder="progress"`.
    """

    def __init__(
        self,
        fd: int,
        *,
        grace_s: float | None = None,
        repeat_s: float = 5.0,
        is_alive: Callable[[float], bool] | None = None,
    ) -> None:
        self._board = Board.attach(fd)
        if self._board.config.get("ladder") != "progress":
            is_alive = None
        self._watch = SectionWatch(self._board, grace_s=grace_s, repeat_s=repeat_s, is_alive=is_alive)

    @property
    def next_look_s(self) -> float | None:
        """When to `look` again at the latest, in seconds of CLOCK_MONOTONIC; None: there is no limit yet."""
        return self._watch.next_look_s

    @property
    def events(self) -> int:
        """How many updates the board had at the last look."""
        return self._watch.events

    def look(self, now_s: float) -> Alarm | None:
        """Read the board; return what is to be done at this time of CLOCK_MONOTONIC, if anything."""
        return self._watch.look(int(now_s * 1e9))

    def note_suspension(self, missed_s: float) -> None:
        """Note, before a look, that this process was suspended, and perhaps the rank with it."""
        self._watch.note_suspension(missed_s)

    @property
    def open(self) -> list[str]:
        """The names of the sections that are open now, if their clocks count."""
        reading = read_board(self._board, time.monotonic_ns())
        return sorted(reading.activity.open) if reading.active else []

    def standing(self, rank: int) -> Standing | None:
        """Return where the rank is now; None if its clocks do not count. Any thread."""
        return standing_of(rank, read_board(self._board, time.monotonic_ns()))

    def report(
        self,
        alarm: Alarm,
        pid: int,
        rank: int,
        read_stacks: Callable[[], str],
        others: Sequence[Standing],
        cycle: int | None = None,
    ) -> str:
        """Log a report as `report_alarm` does, and return it."""
        return report_alarm(alarm, self._board, pid, rank, read_stacks, others, cycle)

    def close(self) -> None:
        """Unmap the board. Idempotent."""
        self._board.close()
