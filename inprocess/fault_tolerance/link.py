"""The client's connection to its monitor.

    caller                    sends requests, and waits a few seconds for the answer
    thread "monitor-link"     sleeps until the connection breaks; connects again, to the same or another monitor
    exit of the interpreter   closes the connection, before anything else: the monitor does not watch that

A new monitor gets the same board, so open sections are not announced again. The training never waits for a connection.
A later client of the same process takes the place of an earlier one, which the monitor then refuses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import uuid
import weakref
from dataclasses import replace
from typing import Any, Self

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR
from inprocess.fault_tolerance.recorder import ForkGuard
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import PacketError, receive, send
from inprocess.ipc.threads import JoinableThread, before_exit
from inprocess.ipc.wakeup import Wakeup
from inprocess.main_thread.stacks import StackReporter
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import CODEC, RankInfo
from inprocess.sections.board import Board
from inprocess.sections.gate import CLIENT_BOARD_ENV, SECTION_BOARD_ENV
from inprocess.sections.making import make_board

__all__ = ["LinkError", "MonitorConnection", "MonitorLink"]

_log = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S = 3.0
_INIT_TIMEOUT_S = 90.0  # a monitor may have to wait for the end of the rank before
_RECONNECT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class LinkError(Exception):
    """The monitor refuses a request, or there is no monitor."""


class MonitorConnection:
    """The `board` that a monitor reads, and the `link` to the monitor: None for that of the in-process wrapper."""

    def __init__(self, board: Board, link: MonitorLink | None = None, stacks: StackReporter | None = None) -> None:
        self.board = board
        self.link = link
        self._stacks = stacks

    @classmethod
    def find(cls, rank_info: RankInfo) -> Self:
        """Find the board of the wrapper around the calling function, else connect to the monitor's socket.

        LinkError, BoardError, OSError, ValueError.
        """
        pid, _, fd = os.environ.get(SECTION_BOARD_ENV, "").partition(":")
        if pid != str(os.getpid()):
            return cls._connect(rank_info)
        board = Board.attach(int(fd))
        if board.has_live_client():
            raise LinkError("another client of this process is initialized; shut it down first")
        return cls(board)

    @classmethod
    def _connect(cls, rank_info: RankInfo) -> Self:
        path = os.environ.get(FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR)
        if path is None:
            raise LinkError(
                f"{FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR} is not set: this process was not started by a launcher"
            )
        stacks = StackReporter()
        stacks.install()
        hello = messages.Init(rank_info, stacks.signal_number, client=uuid.uuid4().hex)
        link = MonitorLink(path, hello, stacks.fd)
        try:
            board, fd = make_board(FaultToleranceConfig.from_kwargs(**link.open()))
            board.begin(0, board.stamp())
            link.attach(fd)
        except BaseException:
            _close(link, stacks)
            raise
        return cls(board, link, stacks)

    def confirm(self, events: int) -> None:
        """Wait until the monitor has read the board. LinkError if it has read fewer events than this."""
        if self.link is not None:
            self.link.request(messages.Confirm(events))

    def close(self) -> None:
        """Close the connection; in a forked child only its copies of the descriptors. Idempotent."""
        _close(self.link, self._stacks)

    def close_copies(self) -> None:
        """In a forked child: close the descriptors that would keep the connection open."""
        if self.link is not None:
            self.link.close_copies()


def _close(link: MonitorLink | None, stacks: StackReporter | None) -> None:
    if link is not None:
        link.close()
    if stacks is not None and threading.current_thread() is threading.main_thread():
        stacks.uninstall()


class MonitorLink:
    """A connection that is made again when it breaks: `open`, `attach`, then `request` on any thread; `close`.

    `stacks_fd` is the descriptor of a `StackReporter`, or None.
    """

    def __init__(self, path: str, hello: messages.Init, stacks_fd: int | None) -> None:
        self._path = path
        self._hello = hello
        self._stacks_fd = stacks_fd
        self._board_fd: int | None = None
        self._lock = threading.Lock()
        self._end: socket.socket | None = None
        self._broken = threading.Event()
        self._closing = False
        self._wake = Wakeup()
        self._same_process = ForkGuard()
        self._keeper = JoinableThread(self._keep, "monitor-link")

    @property
    def connected(self) -> bool:
        """Whether the connection works, as far as is known."""
        return self._end is not None and not self._broken.is_set()

    def open(self) -> dict[str, Any]:
        """Connect and send `hello`; returns the settings. LinkError, OSError, PacketError."""
        self._end, settings = self._introduce(_INIT_TIMEOUT_S)
        return settings

    def attach(self, board_fd: int) -> None:
        """Send the board. Takes ownership of its descriptor. LinkError, OSError, PacketError."""
        self._board_fd = board_fd
        os.environ[CLIENT_BOARD_ENV] = f"{os.getpid()}:{board_fd}"  # for a wrapper that stops the clocks
        if self._end is None:
            raise LinkError("not connected")
        _ask(self._end, messages.AttachBoard(), (board_fd,))
        self._keeper.start()
        # What runs while the interpreter exits, such as handlers, may take longer than any limit.
        before_exit(weakref.WeakMethod(self.close))

    def request(self, message: messages.Message) -> bool:
        """Send a message and wait for the answer. False, and logged once, if the monitor is dead or does not answer.

        LinkError if it refuses the request.
        """
        with self._lock:
            end = self._end
            if end is None or self._broken.is_set():
                return False
            try:
                _ask(end, message)
            except (OSError, EOFError, PacketError) as error:
                _log.warning(
                    "the monitor of this rank does not answer, going on without it: %s", str(error) or "timeout"
                )
                self._broken.set()
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes the keeper
                return False
        return True

    def close(self) -> None:
        """Close the connection; in a forked child only its copies of the descriptors. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if not self._same_process:
            self.close_copies()
            return
        self._wake.set()
        end = self._end
        if end is not None:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # reaches the monitor also if a child has a copy
        if self._keeper is not threading.current_thread():
            self._keeper.join()
        self.close_copies()

    def close_copies(self) -> None:
        """Close the descriptors of this process."""
        end, self._end = self._end, None
        if end is not None:
            end.close()
        board_fd, self._board_fd = self._board_fd, None
        if board_fd is not None:
            _close_board(board_fd)
        self._wake.close()

    # -- connecting ----------------------------------------------------------------------------------------------------

    def _introduce(self, timeout_s: float) -> tuple[socket.socket, dict[str, Any]]:
        end = unix_sockets.connect(self._path, timeout_s)
        try:
            fds = () if self._stacks_fd is None else (self._stacks_fd,)
            settings = _ask(end, replace(self._hello, again=self._keeper.ident is not None), fds)
            end.settimeout(_REQUEST_TIMEOUT_S)
        except EOFError:
            end.close()
            raise ConnectionError("the monitor closed the connection") from None
        except BaseException:
            end.close()
            raise
        return end, settings

    def _keep(self) -> None:
        """Keeper thread."""
        while self._wait_broken():
            if not self._connect_again():
                return

    def _wait_broken(self) -> bool:
        """Sleep until the connection breaks: True; or until `close`: False."""
        end = self._end
        if end is None:
            return False
        poll = select.poll()
        poll.register(end, select.POLLRDHUP)  # not POLLIN: answers are for the threads that send requests
        poll.register(self._wake, select.POLLIN)
        poll.poll()
        self._broken.set()
        return not self._closing

    def _connect_again(self) -> bool:
        """Replace the connection. False if it is refused, if it does not succeed in a minute, or on `close`."""
        deadline = time.monotonic() + _RECONNECT_S
        pause_s = _FIRST_PAUSE_S
        error: Exception | None = None
        while not self._closing and time.monotonic() < deadline:
            try:
                self._replace()
                _log.warning("reconnected to the monitor")
                return True
            except LinkError as refusal:
                if not self._closing:
                    _log.warning("this client is not watched any more: %s", refusal)
                    self._release()
                return False
            except (OSError, EOFError, PacketError) as problem:
                if error is None:
                    _log.warning("the connection to the monitor is lost; reconnecting")
                error = problem
            if select.select([self._wake], [], [], pause_s)[0]:
                return False
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if not self._closing:
            _log.error("this rank has no monitor any more: %s", error)
        return False

    def _release(self) -> None:
        """Close the connection and the board: no monitor needs them any more."""
        with self._lock:
            end, self._end = self._end, None
            board_fd, self._board_fd = self._board_fd, None
        if end is not None:
            end.close()
        if board_fd is not None:
            _close_board(board_fd)

    def _replace(self) -> None:
        end, _ = self._introduce(_REQUEST_TIMEOUT_S)
        try:
            if self._board_fd is None:
                raise LinkError("closed")
            _ask(end, messages.AttachBoard(), (self._board_fd,))
        except BaseException:
            end.close()
            raise
        with self._lock:
            if self._closing:
                end.close()
                raise LinkError("closed")
            old, self._end = self._end, end
            self._broken.clear()
        if old is not None:
            old.close()


def _close_board(fd: int) -> None:
    if os.environ.get(CLIENT_BOARD_ENV) == f"{os.getpid()}:{fd}":  # else that of a later client, or of the parent
        del os.environ[CLIENT_BOARD_ENV]
    os.close(fd)


def _ask(end: socket.socket, message: messages.Message, fds: tuple[int, ...] = ()) -> dict[str, Any]:
    send(end, CODEC, message, fds)
    packet = receive(end, CODEC)
    packet.close_fds()
    answer = packet.message
    if isinstance(answer, messages.Ok):
        return answer.values
    raise LinkError(
        answer.cause if isinstance(answer, messages.RequestFailed) else f"unexpected answer {type(answer).__name__}"
    )
