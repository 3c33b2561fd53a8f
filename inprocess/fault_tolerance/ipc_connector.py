"""The launcher's inbox: any process of the user may put objects in it.

    sender      send(object) ─▶ unix socket ─▶ thread of the owner ─▶ list
                            ◀── ok ──────────

Objects are JSON's types, tuples and the dataclasses of `data`; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from typing import Any

from inprocess.fault_tolerance import sockets, wire

__all__ = ["IpcConnector"]

_log = logging.getLogger(__name__)
_MOST_PENDING = 10_000
_TIMEOUT_S = 10.0


class IpcConnector:
    """An inbox at a path of the file system. Made anywhere; one process calls `start_receiving`. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._received: list[Any] = []
        self._thread: threading.Thread | None = None
        self._wake: int | None = None

    def start_receiving(self) -> None:
        """Listen, in a thread. RuntimeError if it does already; OSError if the path cannot be had."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"{self.path} is received from already")
            listener = sockets.listen(self.path)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(
                target=self._run, args=(listener, self._wake), name="ipc-connector", daemon=True
            )
            self._thread.start()

    def stop_receiving(self) -> None:
        """End the thread and remove the socket; what was received stays. Idempotent."""
        with self._lock:
            thread, wake, self._thread, self._wake = self._thread, self._wake, None, None
        if thread is None or wake is None:
            return
        os.eventfd_write(wake, 1)
        thread.join()
        os.close(wake)

    def send(self, obj: Any) -> None:
        """Put an object into the inbox, from any process; returns when it is there. Waits 10 s at most.

        OSError if nobody receives, WireError for an object that cannot be sent, RuntimeError if it is refused.
        """
        with sockets.connect(self.path, _TIMEOUT_S) as end:
            wire.send(end, wire.Item(obj))
            try:
                answer = wire.receive(end).message
            except EOFError:
                raise ConnectionError(f"the receiver at {self.path} hung up") from None
        if not isinstance(answer, wire.Ok):
            raise RuntimeError(f"{self.path}: {getattr(answer, 'cause', answer)}")

    def fetch_received(self) -> list[Any]:
        """Return what has come, in order, and forget it."""
        with self._lock:
            received, self._received = self._received, []
        return received

    def peek_received(self) -> list[Any]:
        """Return what has come, in order; it stays."""
        with self._lock:
            return list(self._received)

    def clear(self) -> None:
        """Forget what has come."""
        self.fetch_received()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self, listener: socket.socket, wake: int) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(sockets.remove_socket, self.path)
            stack.enter_context(listener)
            selector.register(wake, selectors.EVENT_READ)
            selector.register(listener, selectors.EVENT_READ)
            connections: set[socket.socket] = set()
            stack.callback(_close_all, connections)
            while True:
                for key, _ in selector.select():
                    if key.fd == wake:
                        return
                    if key.fileobj is listener:
                        self._accept(listener, selector, connections)
                    elif isinstance(key.fileobj, socket.socket) and not self._serve(key.fileobj):
                        selector.unregister(key.fileobj)
                        connections.discard(key.fileobj)
                        key.fileobj.close()

    def _accept(
        self, listener: socket.socket, selector: selectors.BaseSelector, connections: set[socket.socket]
    ) -> None:
        try:
            end, _ = listener.accept()
        except OSError as error:
            _log.warning("a connection to %s cannot be accepted: %s", self.path, error)
            return
        try:
            sockets.peer_pid(end)
            end.setblocking(False)
            selector.register(end, selectors.EVENT_READ)
            connections.add(end)
        except OSError as error:
            _log.warning("a connection to %s is refused: %s", self.path, error)
            end.close()

    def _serve(self, end: socket.socket) -> bool:
        """Take one packet. False if the connection is over."""
        try:
            packet = wire.receive(end)
            packet.close_fds()
            answer: wire.Message = wire.Failed("an inbox takes items only")
            if isinstance(packet.message, wire.Item):
                answer = self._keep(packet.message.value)
            wire.send(end, answer)
        except BlockingIOError:
            return True
        except wire.WireError as error:
            _log.warning("%s got rubbish: %s", self.path, error)
            return False
        except (EOFError, OSError):
            return False
        return True

    def _keep(self, value: Any) -> wire.Message:
        with self._lock:
            if len(self._received) >= _MOST_PENDING:
                return wire.Failed(f"{_MOST_PENDING} objects wait to be fetched")
            self._received.append(value)
        return wire.Ok()


def _close_all(connections: set[socket.socket]) -> None:
    for end in connections:
        end.close()
