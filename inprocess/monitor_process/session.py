"""A rank of a launcher while its monitor watches it."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from inprocess.monitor_process.messages import RankInfo, ServeRanks
from inprocess.monitor_process.neighbor_monitors import OnAnswers
from inprocess.monitor_process.state_machine import RankMonitorState, RankMonitorStateMachine
from inprocess.monitor_process.watched import WatchedProcess, WatchedSections
from inprocess.sections.deadlines import Alarm
from inprocess.sections.report import Standing, in_collective

_log = logging.getLogger(__name__)
_STACKS_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class SessionServices:
    """The services of a monitor for its sessions.

    `ask_others(done)` calls `done` with the standings of all other ranks. `checked_s` is that of its `Suspension`.
    """

    task: ServeRanks
    machine: RankMonitorStateMachine
    ask_others: Callable[[OnAnswers], None]
    cycle: Callable[[], int | None]
    checked_s: Callable[[], float]


class Session:
    """One rank, from its first message to the end of its connection or process. On the thread of the monitor's loop.

    `stacks` is as in `WatchedProcess`. OSError if the process has ended.
    """

    def __init__(self, pid: int, rank: RankInfo, stacks: tuple[int, int] | None, services: SessionServices) -> None:
        self.rank = rank
        self.process = WatchedProcess(pid, stacks)
        self.events = 0  # updates of the board at the last look
        self._services = services
        self._sections: WatchedSections | None = None
        self._asking = False
        self._looked_s = 0.0

    def attach(self, fd: int) -> None:
        """Watch the board behind this descriptor from now on. BoardError if it is not that of a board."""
        self._sections = WatchedSections(fd)

    @property
    def next_look_s(self) -> float | None:
        """When to `look` again at the latest, in seconds of CLOCK_MONOTONIC; None: nothing can be late."""
        if self.process.terminating:
            return self.process.kill_at_s
        if self._sections is None or self._sections.next_look_s is None:
            return None
        return min(self._sections.next_look_s, self._looked_s + self._services.task.check_interval_s)

    def look(self) -> None:
        """Read the board, and end the rank if it is late."""
        if self._sections is None:
            return
        self._looked_s = time.monotonic()
        alarm = self._sections.look(self._services.checked_s())
        self._note_events(self._sections.events)
        if self.process.terminating:
            self.process.kill_if_due()
        elif alarm is not None and not self._asking:
            self._asking = True
            self._services.ask_others(lambda others: self._act(alarm, others))

    def note_suspension(self, missed_s: float) -> None:
        """Let no limit pass because this process was suspended: the rank may go on some seconds later."""
        self.process.note_suspension(missed_s)
        if self._sections is not None:
            self._sections.note_suspension(missed_s)

    def standing(self, by_stacks: bool = False) -> Standing | None:
        """Return where the rank is; None if its board is not watched. `by_stacks`: also whether it is in a collective.

        A process may not survive the reading of its stacks: only for one that will be stopped with the late rank.
        """
        found = None if self._sections is None else self._sections.standing(self.rank.global_rank)
        if found is None or not by_stacks:
            return found
        return replace(found, waits=in_collective(self._read_stacks()))

    def kill(self, reason: str) -> None:
        """Send the termination signal, once; SIGKILL follows after the grace."""
        if self.process.terminating or self.process.gone:
            return
        task = self._services.task
        number = signal.Signals(task.termination_signal)
        _log.error("sending %s to process %d: %s", number.name, self.process.pid, reason)
        self.process.terminate(number, task.termination_grace_s)

    def close(self, reason: str) -> WatchedProcess | None:
        """End the session. Returns the process if it was told to end and has not; the caller closes it then."""
        sections, self._sections = self._sections, None
        if sections is not None:
            sections.look(self._services.checked_s())
            self._note_events(sections.events)
            if sections.open:
                _log.warning("%s ends with open section(s) %s: %s", self.rank, sections.open, reason)
            sections.close()
            self._services.machine.handle_ipc_connection_lost()
        if self.process.kill_at_s is not None and not self.process.gone:
            return self.process
        self.process.close()
        return None

    def _note_events(self, events: int) -> None:
        """Tell the state machine when the rank has sent a sign of life."""
        machine = self._services.machine
        alive, self.events = events != self.events, events
        if alive and machine.state not in (RankMonitorState.FINALIZED, RankMonitorState.ABORTED):
            machine.handle_section_msg()

    def _act(self, alarm: Alarm, others: list[Standing]) -> None:
        self._asking = False
        if self._sections is not None and not self.process.terminating:
            rank, cycle = self.rank.global_rank, self._services.cycle()
            self._sections.report(alarm, self.process.pid, rank, self._read_stacks, others, cycle)
            self.kill(alarm.summary)

    def _read_stacks(self) -> str:
        return self.process.read_stacks(_STACKS_TIMEOUT_S)
