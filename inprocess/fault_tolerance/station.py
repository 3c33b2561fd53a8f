"""One rank's place in a monitor process: its socket, and the connection that owns the place.

    connection   NEW ──Init──▶ WAITING ──place is free──▶ GREETED ──Attach──▶ OWNER
                    │                                         └──── gone ──────┴──▶ the place is free
                    └──Look──▶ answered, and hung up on

Only the owner of the place is watched, and only its end resets anything: its connection closes, or its process dies,
whichever is seen first. A rank that comes before the one it replaces is gone waits a while.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inprocess.fault_tolerance import messages
from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import RankInfo
from inprocess.fault_tolerance.messages import CODEC
from inprocess.fault_tolerance.peers import Done
from inprocess.fault_tolerance.state_machine import RankMonitorStateMachine
from inprocess.fault_tolerance.watched_rank import EndingProcess, WatchedRank
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import Packet, PacketError, receive, send
from inprocess.sections.board import BoardError
from inprocess.sections.report import Standing

__all__ = ["Station"]

_log = logging.getLogger(__name__)
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
    stacks: tuple[int, int] | None = None  # the signal, and a descriptor of our own


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
        ask_others: Callable[[Done], None] = lambda done: done([]),
        cycle: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.path = path
        self.owner: _Connection | None = None
        self._config = config
        self._selector = selector
        self._machine = machine
        self._slot_wait_s = slot_wait_s
        self._clock_ns = clock_ns
        self._on_owner = on_owner
        self._ask_others = ask_others
        self._cycle = cycle
        self._connections: list[_Connection] = []
        self._watched: WatchedRank | None = None
        self._ending: list[EndingProcess] = []  # were told to end, and have said goodbye before they did
        self._dismissed: deque[int] = deque(maxlen=16)  # may live a while; their clients must not come back
        self._listener = unix_sockets.listen(path)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Hang up on everybody and remove the socket. Idempotent."""
        for connection in list(self._connections):
            self._drop(connection, "the monitor ends")
        while self._ending:
            self._ending.pop().target.close()
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
            unix_sockets.remove_socket(self.path)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def next_step_s(self) -> float | None:
        """When `step` should be called, in seconds of CLOCK_MONOTONIC; None: only after something was received."""
        times = [c.deadline for c in self._connections if c.phase is not _Phase.OWNER]
        if self._watched is not None and self._watched.next_look_s is not None:
            times.append(self._watched.next_look_s)
        times += [ending.kill_at_s for ending in self._ending if ending.kill_at_s is not None]
        return min(times, default=None)

    def step(self) -> None:
        """Do what is due."""
        now_s = self._clock_ns() * _NS
        for connection in [c for c in self._connections if c.phase is not _Phase.OWNER and now_s >= c.deadline]:
            text = (
                "another process is monitored, and has not gone" if connection.phase is _Phase.WAITING else "too slow"
            )
            self._refuse(connection, text)
        watched = self._watched
        if watched is not None and watched.next_look_s is not None and now_s >= watched.next_look_s:
            watched.look()
        for ending in list(self._ending):
            ending.step(now_s)
            if ending.kill_at_s is None:
                self._ending.remove(ending)
                ending.target.close()

    # -- the rank ------------------------------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        """Return where the rank stands that is watched, if one is."""
        return None if self._watched is None else self._watched.standing()

    def kill(self, reason: str) -> None:
        """Send the termination signal to the rank, if there is one; a stopped process is continued first."""
        if self._watched is not None:
            self._watched.kill(reason)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            _log.warning("a connection to %s cannot be accepted: %s", self.path, error)
            return
        try:
            pid = unix_sockets.peer_pid(end)
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
            packet = receive(connection.end, CODEC)
        except BlockingIOError:
            return
        except PacketError as error:
            self._drop(connection, f"it sends rubbish: {error}")
            return
        except (EOFError, OSError) as error:
            self._drop(connection, str(error))
            return
        try:
            self._handle(connection, packet)
        finally:
            packet.close_fds()

    def _handle(self, connection: _Connection, packet: Packet[messages.Message]) -> None:
        match packet.message:
            case messages.Init(_, _, again=True) if connection.pid in self._dismissed:
                self._refuse(connection, "the launcher stops this worker")
            case messages.Init(rank, stack_signal) if connection.phase is _Phase.NEW:
                connection.rank = rank
                if packet.fds and stack_signal is not None:
                    connection.stacks = stack_signal, os.dup(packet.fds[0])
                connection.phase = _Phase.WAITING
                connection.deadline = self._clock_ns() * _NS + self._slot_wait_s
                self._fill_slot()
            case messages.Attach() if connection.phase is _Phase.GREETED and packet.fds and self._watched is not None:
                self._attach(connection, self._watched, packet.fds[0])
            case messages.Confirm(events) if connection.phase is _Phase.OWNER and self._watched is not None:
                self._confirm(connection, self._watched, events)
            case messages.Look() if connection.phase is _Phase.NEW:
                standing = None if self._watched is None else self._watched.standing(by_stacks=True)
                self._answer(connection, messages.Ok({} if standing is None else standing.to_json()))
                self._drop(connection, "it has got its answer")
            case message:
                self._refuse(connection, f"a {type(message).__name__} makes no sense now")

    def _confirm(self, connection: _Connection, watched: WatchedRank, events: int) -> None:
        watched.look()
        if watched.events < events:
            self._answer(connection, messages.Failed(f"the board has {watched.events} events, not {events}"))
        else:
            self._answer(connection, messages.Ok())

    def _attach(self, connection: _Connection, watched: WatchedRank, fd: int) -> None:
        try:
            watched.attach(fd)
        except BoardError as error:
            self._refuse(connection, str(error))
            return
        connection.phase = _Phase.OWNER
        self._answer(connection, messages.Ok())
        watched.look()
        _log.info("watching %s", connection.rank)
        self._on_owner(connection.rank)

    # -- the place -----------------------------------------------------------------------------------------------------

    def _fill_slot(self) -> None:
        """Give the place to who has waited longest, if it is free."""
        while self.owner is None:
            waiting = next((c for c in self._connections if c.phase is _Phase.WAITING), None)
            if waiting is None or waiting.rank is None:
                return
            try:
                self._watched = WatchedRank(
                    waiting.pid,
                    waiting.rank,
                    waiting.stacks,
                    self._config,
                    self._machine,
                    self._clock_ns,
                    self._ask_others,
                    self._cycle,
                )
            except OSError:
                self._drop(waiting, "its process has gone")
                continue
            self.owner = waiting
            waiting.phase = _Phase.GREETED
            waiting.deadline = self._clock_ns() * _NS + _GREETING_S
            self._selector.register(self._watched.target, selectors.EVENT_READ, self._owner_died)
            self._answer(waiting, messages.Ok(self._config.to_dict()))

    def _owner_died(self) -> None:
        if self.owner is not None:
            self._drop(self.owner, "its process has ended")

    def disconnect_owner(self) -> None:
        """Make room: the launcher has stopped its workers."""
        if self.owner is not None:
            self._dismissed.append(self.owner.pid)
            self._drop(self.owner, "its worker was stopped")

    def _answer(self, connection: _Connection, message: messages.Message) -> None:
        """Send without waiting; who does not read its answers is dropped."""
        try:
            send(connection.end, CODEC, message)
        except OSError as error:
            self._drop(connection, f"it takes no answer: {error}")

    def _refuse(self, connection: _Connection, cause: str) -> None:
        with contextlib.suppress(OSError):
            send(connection.end, CODEC, messages.Failed(cause))
        self._drop(connection, cause)

    def _drop(self, connection: _Connection, reason: str) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.end)
        connection.end.close()
        if connection.stacks is not None:
            os.close(connection.stacks[1])
        if connection is self.owner:
            self._free_slot(connection, reason)
        else:
            _log.info("process %d is hung up on: %s", connection.pid, reason)

    def _free_slot(self, owner: _Connection, reason: str) -> None:
        self.owner = None
        watched, self._watched = self._watched, None
        if watched is not None:
            self._selector.unregister(watched.target)
            ending = watched.close(reason)
            if ending is not None:
                self._ending.append(ending)
        _log.info("%s is not watched any more: %s", owner.rank, reason)
        self._on_owner(None)
        self._fill_slot()
