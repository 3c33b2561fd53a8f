"""A socket to which the ranks of a launcher connect, and the session of one of them.

    connection   NEW ──Init──▶ WAITING ──no session──▶ GREETED ──AttachBoard──▶ WATCHED
                    │                                      └──── ends ───────────┴──▶ session ends; the next may begin
                    └──QueryStanding──▶ answered, and closed

One rank has a session at a time, and only the end of its connection or of its process, whichever is seen first, ends
the session. A rank that connects before the one it replaces has ended waits a while. A later client of the same process
replaces the earlier one at once: that is of a function that has been left.
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

from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import Packet, PacketError, receive, send
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import CODEC, RankInfo
from inprocess.monitor_process.session import Session, SessionServices
from inprocess.monitor_process.watched import WatchedProcess
from inprocess.sections.board import BoardError
from inprocess.sections.report import Standing

_log = logging.getLogger(__name__)
_GREETING_S = 10.0
_MOST_CONNECTIONS = 32


class _Phase(enum.Enum):
    NEW = enum.auto()
    WAITING = enum.auto()
    GREETED = enum.auto()
    WATCHED = enum.auto()


@dataclass
class _Connection:
    end: socket.socket
    pid: int
    deadline: float  # for the next phase; without meaning once it is WATCHED
    phase: _Phase = _Phase.NEW
    rank: RankInfo | None = None
    client: str = ""
    stacks: tuple[int, int] | None = None  # the signal, and a descriptor that this object owns


class RankSocket:
    """Listens at a path and watches one rank at a time. Everything on the thread of the loop that owns `selector`.

    The loop calls the data of ready selector keys, and `step` when `next_step_s` has come. `on_session` is called with
    the rank whose board is watched from now on, and with None when its session has ended. OSError if the path cannot be
    listened at.
    """

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        services: SessionServices,
        on_session: Callable[[RankInfo | None], None],
    ) -> None:
        self.path = path
        self._selector = selector
        self._services = services
        self._on_session = on_session
        self._connections: list[_Connection] = []
        self._owner: _Connection | None = None  # of the session; both or neither is None
        self._session: Session | None = None
        self._ending: list[WatchedProcess] = []  # were told to end, and disconnected before they did
        self._dismissed: deque[int] = deque(maxlen=16)  # may live a while; their clients must not come back
        self._replaced: deque[str] = deque(maxlen=256)  # clients that must not come back
        self._listener = unix_sockets.listen(path)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close all connections and remove the socket. Idempotent."""
        for connection in list(self._connections):
            self._drop(connection, "the monitor ends")
        while self._ending:
            self._ending.pop().close()
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
            unix_sockets.remove_socket(self.path)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def next_step_s(self) -> float | None:
        """When to call `step`, in seconds of CLOCK_MONOTONIC; None: not before something is received."""
        times = [c.deadline for c in self._connections if c.phase is not _Phase.WATCHED]
        if self._session is not None and self._session.next_look_s is not None:
            times.append(self._session.next_look_s)
        times += [process.kill_at_s for process in self._ending if process.kill_at_s is not None]
        return min(times, default=None)

    def note_suspension(self, missed_s: float) -> None:
        """Let no limit pass because this process was suspended: the others may go on some seconds later."""
        for connection in self._connections:
            connection.deadline += missed_s
        for process in self._ending:
            process.note_suspension(missed_s)
        if self._session is not None:
            self._session.note_suspension(missed_s)

    def step(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        for connection in [c for c in self._connections if c.phase is not _Phase.WATCHED and now_s >= c.deadline]:
            is_waiting = connection.phase is _Phase.WAITING
            self._refuse(connection, "another process is monitored, and has not ended" if is_waiting else "too slow")
        session = self._session
        if session is not None and session.next_look_s is not None and now_s >= session.next_look_s:
            session.look()
        for process in list(self._ending):
            process.kill_if_due()
            if process.kill_at_s is None:
                self._ending.remove(process)
                process.close()

    # -- the session ---------------------------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        """Return where the watched rank is, if there is one."""
        return None if self._session is None else self._session.standing()

    def kill(self, reason: str) -> None:
        """Terminate the watched rank, if there is one."""
        if self._session is not None:
            self._session.kill(reason)

    def end_session(self) -> None:
        """The launcher has stopped its workers: close the connection of the watched rank, for the next one."""
        if self._owner is not None:
            self._dismissed.append(self._owner.pid)
            self._drop(self._owner, "its worker was stopped")

    def _begin_session(self) -> None:
        """Let the connection that has waited longest begin its session, if there is none."""
        while self._session is None:
            waiting = next((c for c in self._connections if c.phase is _Phase.WAITING), None)
            if waiting is None or waiting.rank is None:
                return
            try:
                session = Session(waiting.pid, waiting.rank, waiting.stacks, self._services)
            except OSError:
                self._drop(waiting, "its process has ended")
                continue
            self._session, self._owner = session, waiting
            waiting.phase = _Phase.GREETED
            waiting.deadline = time.monotonic() + _GREETING_S
            self._selector.register(session.process, selectors.EVENT_READ, self._owner_died)
            self._answer(waiting, messages.Ok(self._services.task.settings))

    def _replace_others_of(self, connection: _Connection) -> None:
        """Drop the earlier connections of this process, and have this one begin the next session."""
        earlier = [c for c in self._connections if c.pid == connection.pid and c.client and c is not connection]
        if not earlier:
            return
        self._connections.remove(connection)
        self._connections.insert(0, connection)
        for each in earlier:
            self._replaced.append(each.client)
            self._drop(each, "another client of its process has taken its place")

    def _owner_died(self) -> None:
        if self._owner is not None:
            self._drop(self._owner, "its process has ended")

    def _end_session(self, session: Session, reason: str) -> None:
        self._session = self._owner = None
        self._selector.unregister(session.process)
        process = session.close(reason)
        if process is not None:
            self._ending.append(process)
        _log.info("%s is not watched any more: %s", session.rank, reason)
        self._on_session(None)
        self._begin_session()

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
            connection = _Connection(end, pid, time.monotonic() + _GREETING_S)
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
            self._drop(connection, f"invalid message: {error}")
            return
        except (EOFError, OSError) as error:
            self._drop(connection, str(error))
            return
        try:
            self._handle(connection, packet)
        finally:
            packet.close_fds()

    def _handle(self, connection: _Connection, packet: Packet[messages.Message]) -> None:
        session, phase = self._session, connection.phase
        match packet.message:
            case messages.Init(_, _, again=True) if connection.pid in self._dismissed:
                self._refuse(connection, "the launcher stops this worker")
            case messages.Init(_, _, again=True, client=client) if client in self._replaced:
                self._refuse(connection, "another client of its process has taken its place")
            case messages.Init(rank, stack_signal, again, client) if phase is _Phase.NEW:
                connection.rank, connection.client = rank, client
                if packet.fds and stack_signal is not None:
                    connection.stacks = stack_signal, os.dup(packet.fds[0])
                connection.phase = _Phase.WAITING
                connection.deadline = time.monotonic() + self._services.task.slot_wait_s
                if not again:
                    self._replace_others_of(connection)
                self._begin_session()
            case messages.AttachBoard() if phase is _Phase.GREETED and packet.fds and session is not None:
                self._attach(connection, session, packet.fds[0])
            case messages.Confirm(events) if phase is _Phase.WATCHED and session is not None:
                self._confirm(connection, session, events)
            case messages.QueryStanding() if phase is _Phase.NEW:
                standing = None if session is None else session.standing(by_stacks=True)
                self._answer(connection, messages.Ok({} if standing is None else standing.to_json()))
                self._drop(connection, "its query is answered")
            case message:
                self._refuse(connection, f"unexpected message {type(message).__name__}")

    def _attach(self, connection: _Connection, session: Session, fd: int) -> None:
        try:
            session.attach(fd)
        except BoardError as error:
            self._refuse(connection, str(error))
            return
        connection.phase = _Phase.WATCHED
        self._answer(connection, messages.Ok())
        session.look()
        _log.info("watching %s", connection.rank)
        self._on_session(connection.rank)

    def _confirm(self, connection: _Connection, session: Session, events: int) -> None:
        session.look()
        if session.events < events:
            self._answer(connection, messages.RequestFailed(f"the board has {session.events} events, not {events}"))
        else:
            self._answer(connection, messages.Ok())

    def _answer(self, connection: _Connection, message: messages.Message) -> None:
        """Send without waiting; a connection whose peer does not read its answers is closed."""
        try:
            send(connection.end, CODEC, message)
        except OSError as error:
            self._drop(connection, f"it takes no answer: {error}")

    def _refuse(self, connection: _Connection, cause: str) -> None:
        with contextlib.suppress(OSError):
            send(connection.end, CODEC, messages.RequestFailed(cause))
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
        if connection is self._owner and self._session is not None:
            self._end_session(self._session, reason)
        else:
            _log.info("connection of process %d closed: %s", connection.pid, reason)
