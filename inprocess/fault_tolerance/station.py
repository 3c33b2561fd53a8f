"""One rank's place in a monitor process: its socket, the connection that owns the place, and what is watched.

    connection   NEW ──Init──▶ WAITING ──place is free──▶ GREETED ──Attach──▶ OWNER
                                                              └──── gone ──────┴──▶ the place is free

Only the owner of the place is watched, and only its end resets anything: its connection closes, or its process dies,
whichever is seen first. A rank that comes before the one it replaces is gone waits a while.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inprocess.fault_tolerance import sockets, wire
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import RankInfo
from inprocess.fault_tolerance.state_machine import RankMonitorState, RankMonitorStateMachine
from inprocess.main_thread.stacks import read_stacks
from inprocess.monitor_process.target import Target
from inprocess.sections.board import Board, BoardError
from inprocess.sections.board_reading import read_board
from inprocess.sections.diagnosis import report_alarm
from inprocess.sections.watch import Alarm, SectionWatch

__all__ = ["Station"]

_log = logging.getLogger(__name__)
_STACKS_TIMEOUT_S = 0.5
_GREETING_S = 10.0
_MOST_CONNECTIONS = 32
_NS = 1e-9


class _Phase(enum.Enum):
    NEW = enum.auto()
    WAITING = enum.auto()
    GREETED = enum.auto()
    OWNER = enum.auto()


@dataclass
class _Connection:
    end: socket.socket
    pid: int
    deadline: float  # for the next phase; of no meaning for an owner
    phase: _Phase = _Phase.NEW
    rank: RankInfo | None = None
    stack_signal: int | None = None
    stacks_fd: int | None = None


class Station:
    """Watches one rank at a time. Everything on the thread of the loop that owns `selector`.

    The loop calls what is registered as data of the selector, and `step` when `next_step_s` has come. OSError if the
    path cannot be listened at.
    """

    def __init__(
        self,
        path: str,
        config: FaultToleranceConfig,
        selector: selectors.BaseSelector,
        machine: RankMonitorStateMachine,
        *,
        slot_wait_s: float = 60.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_owner: Callable[[RankInfo | None], None] = lambda rank: None,
    ) -> None:
        self.path = path
        self.owner: _Connection | None = None
        self._config = config
        self._selector = selector
        self._machine = machine
        self._slot_wait_s = slot_wait_s
        self._clock_ns = clock_ns
        self._on_owner = on_owner
        self._connections: list[_Connection] = []
        self._target: Target | None = None
        self._watch: SectionWatch | None = None
        self._events = 0
        self._dismissed: deque[int] = deque(maxlen=16)  # may live a while; their clients must not come back
        self._listener = sockets.listen(path)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Hang up on everybody and remove the socket. Idempotent."""
        for connection in list(self._connections):
            self._drop(connection, "the monitor ends")
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
            sockets.remove_socket(self.path)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def next_step_s(self) -> float | None:
        """When `step` should be called, in seconds of CLOCK_MONOTONIC; None: only after something was received."""
        times = [c.deadline for c in self._connections if c.phase is not _Phase.OWNER]
        if self._watch is not None and self._watch.next_look_s is not None:
            times.append(self._watch.next_look_s)
        return min(times, default=None)

    def step(self) -> None:
        """Do what is due."""
        now_s = self._clock_ns() * _NS
        for connection in [c for c in self._connections if c.phase is not _Phase.OWNER and now_s >= c.deadline]:
            text = (
                "another process is monitored, and has not gone" if connection.phase is _Phase.WAITING else "too slow"
            )
            self._refuse(connection, text)
        watch = self._watch
        if watch is not None and watch.next_look_s is not None and now_s >= watch.next_look_s:
            self._look()

    def _look(self) -> None:
        watch = self._watch
        if watch is None:
            return
        alarm = watch.look(self._clock_ns())
        self._observe(watch)
        if alarm is not None:
            self._act(alarm, watch)

    def _observe(self, watch: SectionWatch) -> None:
        """Tell the observer of restarts whether the rank has given a sign of life."""
        alive, self._events = watch.events != self._events, watch.events
        if alive and self._machine.state not in (RankMonitorState.FINALIZED, RankMonitorState.ABORTED):
            self._machine.handle_section_msg()

    # -- what is late --------------------------------------------------------------------------------------------------

    def _act(self, alarm: Alarm, watch: SectionWatch) -> None:
        owner, target = self.owner, self._target
        if owner is None or target is None:
            return
        report_alarm(
            alarm, watch.board, target.pid, owner.rank.global_rank if owner.rank is not None else None, self._stacks
        )
        self.kill(alarm.summary)

    def kill(self, reason: str) -> None:
        """Send the termination signal to the rank, if there is one; a stopped process is continued first."""
        if self._target is None or self._target.gone:
            return
        number = self._config.rank_termination_signal
        _log.error("sending %s to process %d: %s", number.name, self._target.pid, reason)
        self._target.send(signal.SIGCONT)
        self._target.send(number)

    def _stacks(self) -> str:
        owner = self.owner
        if owner is None or owner.stacks_fd is None or owner.stack_signal is None:
            return ""
        return read_stacks(owner.pid, owner.stack_signal, owner.stacks_fd, _STACKS_TIMEOUT_S)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            _log.warning("a connection to %s cannot be accepted: %s", self.path, error)
            return
        try:
            pid = sockets.peer_pid(end)
            if len(self._connections) >= _MOST_CONNECTIONS:
                raise ConnectionRefusedError("too many connections")
            end.setblocking(False)
            connection = _Connection(end, pid, self._clock_ns() * _NS + _GREETING_S)
            self._selector.register(end, selectors.EVENT_READ, lambda: self._receive(connection))
            self._connections.append(connection)
        except OSError as error:
            _log.warning("a connection to %s is refused: %s", self.path, error)
            end.close()

    def _receive(self, connection: _Connection) -> None:
        try:
            packet = wire.receive(connection.end)
        except BlockingIOError:
            return
        except wire.WireError as error:
            self._drop(connection, f"it sends rubbish: {error}")
            return
        except (EOFError, OSError) as error:
            self._drop(connection, str(error))
            return
        try:
            self._handle(connection, packet)
        finally:
            packet.close_fds()

    def _handle(self, connection: _Connection, packet: wire.Packet) -> None:
        match packet.message:
            case wire.Init(_, _, again=True) if connection.pid in self._dismissed:
                self._refuse(connection, "the launcher stops this worker")
            case wire.Init(rank, stack_signal) if connection.phase is _Phase.NEW:
                connection.rank, connection.stack_signal = rank, stack_signal
                if packet.fds:
                    connection.stacks_fd = os.dup(packet.fds[0])
                connection.phase = _Phase.WAITING
                connection.deadline = self._clock_ns() * _NS + self._slot_wait_s
                self._fill_slot()
            case wire.Attach() if connection.phase is _Phase.GREETED and packet.fds:
                self._attach(connection, packet.fds[0])
            case wire.Confirm(events) if connection.phase is _Phase.OWNER:
                self._confirm(connection, events)
            case message:
                self._refuse(connection, f"a {type(message).__name__} makes no sense now")

    def _confirm(self, connection: _Connection, events: int) -> None:
        self._look()
        if self._events < events:
            self._answer(connection, wire.Failed(f"the board has {self._events} events, not {events}"))
        else:
            self._answer(connection, wire.Ok())

    def _attach(self, connection: _Connection, fd: int) -> None:
        try:
            board = Board.attach(fd)
        except BoardError as error:
            self._refuse(connection, str(error))
            return
        connection.phase = _Phase.OWNER
        self._events = 0
        self._watch = SectionWatch(board, repeat_s=self._config.workload_check_interval)
        self._answer(connection, wire.Ok())
        self._look()
        _log.info("watching %s", connection.rank)
        self._on_owner(connection.rank)

    # -- the place -----------------------------------------------------------------------------------------------------

    def _fill_slot(self) -> None:
        """Give the place to who has waited longest, if it is free."""
        while self.owner is None:
            waiting = next((c for c in self._connections if c.phase is _Phase.WAITING), None)
            if waiting is None:
                return
            try:
                self._target = Target(waiting.pid)
            except OSError:
                self._drop(waiting, "its process has gone")
                continue
            self.owner = waiting
            waiting.phase = _Phase.GREETED
            waiting.deadline = self._clock_ns() * _NS + _GREETING_S
            self._selector.register(self._target, selectors.EVENT_READ, self._owner_died)
            self._answer(waiting, wire.Ok(self._config.to_dict()))

    def _owner_died(self) -> None:
        if self.owner is not None:
            self._drop(self.owner, "its process has ended")

    def disconnect_owner(self) -> None:
        """Make room: the launcher has stopped its workers."""
        if self.owner is not None:
            self._dismissed.append(self.owner.pid)
            self._drop(self.owner, "its worker was stopped")

    def _answer(self, connection: _Connection, message: wire.Message) -> None:
        """Send without waiting; who does not read its answers is dropped."""
        try:
            wire.send(connection.end, message)
        except OSError as error:
            self._drop(connection, f"it takes no answer: {error}")

    def _refuse(self, connection: _Connection, cause: str) -> None:
        with contextlib.suppress(OSError):
            wire.send(connection.end, wire.Failed(cause))
        self._drop(connection, cause)

    def _drop(self, connection: _Connection, reason: str) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.end)
        connection.end.close()
        if connection.stacks_fd is not None:
            os.close(connection.stacks_fd)
        if connection is self.owner:
            self._free_slot(connection, reason)
        else:
            _log.info("process %d is hung up on: %s", connection.pid, reason)

    def _free_slot(self, owner: _Connection, reason: str) -> None:
        self.owner = None
        if self._watch is not None:
            reading = read_board(self._watch.board, self._clock_ns())
            self._watch.events = reading.events
            self._observe(self._watch)
            if reading.active and reading.activity.open:
                _log.warning("%s goes within section(s) %s: %s", owner.rank, sorted(reading.activity.open), reason)
            self._watch.board.close()
            self._watch = None
            self._machine.handle_ipc_connection_lost()
        if self._target is not None:
            self._selector.unregister(self._target)
            self._target.close()
            self._target = None
        _log.info("%s is not watched any more: %s", owner.rank, reason)
        self._on_owner(None)
        self._fill_slot()
