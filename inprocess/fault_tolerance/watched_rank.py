"""The process that a monitor watches, and what happens when it is late."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import RankInfo
from inprocess.fault_tolerance.peers import Done
from inprocess.fault_tolerance.state_machine import RankMonitorState, RankMonitorStateMachine
from inprocess.main_thread.stacks import read_stacks
from inprocess.monitor_process.target import Target
from inprocess.sections.board import Board
from inprocess.sections.board_reader import read_board
from inprocess.sections.deadlines import Alarm, SectionWatch
from inprocess.sections.report import Standing, in_collective, report_alarm, standing_of

__all__ = ["EndingProcess", "WatchedRank"]

_log = logging.getLogger(__name__)
_STACKS_TIMEOUT_S = 0.5
_NS = 1e-9


@dataclass
class EndingProcess:
    """A process that has got its termination signal. `kill_at_s`: when it gets SIGKILL, by CLOCK_MONOTONIC; None: has.

    A process that cleans up gets no second termination signal: that would interrupt its handler.
    """

    target: Target
    first_signal: signal.Signals
    grace_s: float
    kill_at_s: float | None

    def step(self, now_s: float) -> None:
        """Send SIGKILL if that is due and the process has not ended."""
        if self.kill_at_s is None or now_s < self.kill_at_s:
            return
        self.kill_at_s = None
        if not self.target.gone:
            name, pid = self.first_signal.name, self.target.pid
            _log.error("sending SIGKILL to process %d: it has not ended %g s after %s", pid, self.grace_s, name)
            self.target.send(signal.SIGKILL)


class WatchedRank:
    """From when its process has got the place until it loses it. On the thread of the monitor's loop.

    `stacks` is the signal and the descriptor by which it tells its stacks; the caller's. `ask_others` finds out where
    the other ranks stand. OSError if the process has gone.
    """

    def __init__(
        self,
        pid: int,
        rank: RankInfo,
        stacks: tuple[int, int] | None,
        config: FaultToleranceConfig,
        machine: RankMonitorStateMachine,
        clock_ns: Callable[[], int],
        ask_others: Callable[[Done], None],
        cycle: Callable[[], int | None],
    ) -> None:
        self.rank = rank
        self.target = Target(pid)
        self.events = 0  # that the board had at the last look
        self._stacks_of = stacks
        self._config = config
        self._machine = machine
        self._clock_ns = clock_ns
        self._ask_others = ask_others
        self._cycle = cycle
        self._asking = False
        self._watch: SectionWatch | None = None
        self._looked_s = 0.0
        self._ending: EndingProcess | None = None

    def attach(self, fd: int) -> None:
        """Watch the board behind this descriptor from now on. BoardError if there is none."""
        self._watch = SectionWatch(Board.attach(fd))

    @property
    def next_look_s(self) -> float | None:
        """When to `look` again at the latest, in seconds of CLOCK_MONOTONIC; None: nothing can be late."""
        if self._ending is not None:
            return self._ending.kill_at_s
        if self._watch is None or self._watch.next_look_s is None:
            return None
        return min(self._watch.next_look_s, self._looked_s + self._config.workload_check_interval)

    def look(self) -> None:
        """Look at the board, and do what is to be done."""
        watch = self._watch
        if watch is None:
            return
        now_ns = self._clock_ns()
        self._looked_s = now_ns * _NS
        alarm = watch.look(now_ns)
        self._observe(watch.events)
        if self._ending is not None:
            self._ending.step(self._looked_s)
            return
        if alarm is not None and not self._asking:
            self._asking = True
            self._ask_others(lambda others: self._act(alarm, others))

    def standing(self, by_stacks: bool = False) -> Standing | None:
        """Return where the rank stands; None if it is not watched. `by_stacks`: also whether it is in a collective.

        To read stacks can be the end of a process: only for one that will be stopped with the late one.
        """
        if self._watch is None:
            return None
        found = standing_of(self.rank.global_rank, read_board(self._watch.board, self._clock_ns()))
        if found is None or not by_stacks:
            return found
        return replace(found, waits=in_collective(self._read_stacks()))

    def kill(self, reason: str) -> None:
        """Send the termination signal, once; SIGKILL follows after the grace. A stopped process is continued first."""
        if self._ending is not None or self.target.gone:
            return
        number, grace_s = self._config.rank_termination_signal, self._config.termination_grace_time
        _log.error("sending %s to process %d: %s", number.name, self.target.pid, reason)
        self.target.send(signal.SIGCONT)
        self.target.send(number)
        kill_at_s = None if number == signal.SIGKILL else self._clock_ns() * _NS + grace_s
        self._ending = EndingProcess(self.target, number, grace_s, kill_at_s)

    def close(self, reason: str) -> EndingProcess | None:
        """Let go of it. Idempotent.

        Returns the process if it was told to end and has not; it is the caller's then.
        """
        watch, self._watch = self._watch, None
        if watch is not None:
            reading = read_board(watch.board, self._clock_ns())
            self._observe(reading.events)
            if reading.active and reading.activity.open:
                _log.warning("%s goes within section(s) %s: %s", self.rank, sorted(reading.activity.open), reason)
            watch.board.close()
            self._machine.handle_ipc_connection_lost()
        ending, self._ending = self._ending, None
        if ending is not None and ending.kill_at_s is not None and not self.target.gone:
            return ending
        self.target.close()
        return None

    def _observe(self, events: int) -> None:
        """Tell the observer of restarts whether the rank has given a sign of life."""
        alive, self.events = events != self.events, events
        if alive and self._machine.state not in (RankMonitorState.FINALIZED, RankMonitorState.ABORTED):
            self._machine.handle_section_msg()

    def _act(self, alarm: Alarm, others: list[Standing]) -> None:
        self._asking = False
        if self._watch is not None and self._ending is None:
            board, rank = self._watch.board, self.rank.global_rank
            report_alarm(alarm, board, self.target.pid, rank, self._read_stacks, others, self._cycle())
            self.kill(alarm.summary)

    def _read_stacks(self) -> str:
        if self._stacks_of is None:
            return ""
        return read_stacks(self.target.pid, *self._stacks_of, _STACKS_TIMEOUT_S)
