"""The client's connection to its monitor.

    caller                    request, answered within a few seconds or given up
    thread "monitor-link"     sleeps until the connection breaks; connects again, to the same or another monitor

What is open needs no telling: the new monitor gets the same board. The training never waits for a connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from inprocess.fault_tolerance.fork_guard import ForkGuard
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import PacketError, receive, send
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.wakeup import Wakeup
from inprocess.monitor_process import messages
from inprocess.monitor_process.messages import CODEC

__all__ = ["LinkError", "MonitorLink"]

_log = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S = 3.0
_INIT_TIMEOUT_S = 90.0  # a monitor may wait for the rank before us to be gone
_RECONNECT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class LinkError(Exception):
    """The monitor refuses, or does not answer."""


class MonitorLink:
    """`open` it, tell it the descriptor of the board with `attach`, and `close` it. `request` on any thread.

    `stacks` is the signal number and the descriptor of a `StackReporter`, or None.
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
        """Whether a monitor is there, as far as is known."""
        return self._end is not None and not self._broken.is_set()

    def open(self) -> dict[str, Any]:
        """Connect and introduce this rank; returns the settings. LinkError, OSError, PacketError."""
        self._end, settings = self._introduce(_INIT_TIMEOUT_S)
        return settings

    def attach(self, board_fd: int) -> None:
        """Hand the board over; keeps the descriptor, and closes it in `close`. LinkError, OSError, PacketError."""
        self._board_fd = board_fd
        if self._end is None:
            raise LinkError("not connected")
        _ask(self._end, messages.Attach(), (board_fd,))
        self._keeper.start()

    def request(self, message: messages.Message) -> bool:
        """Have a message answered. False if no monitor is there, or it is stuck; that was logged once.

        LinkError with what the monitor objects to.
        """
        with self._lock:
            end = self._end
            if end is None or self._broken.is_set():
                return False
            try:
                _ask(end, message)
            except (OSError, EOFError, PacketError) as error:
                _log.warning("the monitor of this rank does not answer; going on without: %s", error or "too slow")
                self._broken.set()
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes the keeper
                return False
        return True

    def close(self) -> None:
        """Hang up, in the process that has connected; a forked child only closes its copies. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if not self._same_process:
            self.close_copies()
            return
        self._wake.set()
        if self._end is not None:
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)  # reaches the monitor also if a child has a copy
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
            os.close(board_fd)
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
            raise ConnectionError("the monitor hung up") from None
        except BaseException:
            end.close()
            raise
        return end, settings

    def _keep(self) -> None:
        """Keeper thread."""
        while self._wait_broken():
            _log.warning("the connection to the monitor is lost; connecting again")
            if not self._connect_again():
                return

    def _wait_broken(self) -> bool:
        """Sleep until the connection breaks; False when `close` was called."""
        end = self._end
        if end is None:
            return False
        poll = select.poll()
        poll.register(end, select.POLLRDHUP)  # not POLLIN: answers are for those who ask
        poll.register(self._wake, select.POLLIN)
        poll.poll()
        self._broken.set()
        return not self._closing

    def _connect_again(self) -> bool:
        """Replace the connection. False if it is refused, if that does not succeed in a minute, or on `close`."""
        deadline = time.monotonic() + _RECONNECT_S
        pause_s = _FIRST_PAUSE_S
        error: Exception | None = None
        while not self._closing and time.monotonic() < deadline:
            try:
                self._replace()
                _log.warning("connected to the monitor again")
                return True
            except LinkError as refusal:
                error = refusal
                break
            except (OSError, EOFError, PacketError) as problem:
                error = problem
            if select.select([self._wake], [], [], pause_s)[0]:
                return False
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if not self._closing:
            _log.error("no monitor watches this rank any more: %s", error)
        return False

    def _replace(self) -> None:
        end, _ = self._introduce(_REQUEST_TIMEOUT_S)
        try:
            if self._board_fd is None:
                raise LinkError("closed")
            _ask(end, messages.Attach(), (self._board_fd,))
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


def _ask(end: socket.socket, message: messages.Message, fds: tuple[int, ...] = ()) -> dict[str, Any]:
    send(end, CODEC, message, fds)
    packet = receive(end, CODEC)
    packet.close_fds()
    answer = packet.message
    if isinstance(answer, messages.Ok):
        return answer.values
    raise LinkError(answer.cause if isinstance(answer, messages.Failed) else f"an unexpected {type(answer).__name__}")
