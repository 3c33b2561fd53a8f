"""The launcher's inbox: any process of the same user may put objects into it.

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
from dataclasses import asdict
from typing import Any

from inprocess.fault_tolerance.data import WorkloadAction, WorkloadControlRequest
from inprocess.ipc import unix_sockets
from inprocess.ipc.packets import PacketError, receive, send
from inprocess.ipc.wakeup import Wakeup
from inprocess.monitor_process.messages import CODEC, InboxItem, Message, Ok, RankInfo, RequestFailed
from inprocess.sections.timeouts import HeartbeatTimeouts, SectionTimeouts

__all__ = ["IpcConnector"]

_log = logging.getLogger(__name__)
_MOST_PENDING = 10_000
_TIMEOUT_S = 10.0
_TAG = "__kind__"


class IpcConnector:
    """An inbox at a path, for any number of senders; the process that owns it calls `start_receiving`. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._received: list[Any] = []
        self._thread: threading.Thread | None = None
        self._wake: Wakeup | None = None

    def start_receiving(self) -> None:
        """Listen, in a thread. RuntimeError if it is listening already; OSError if it cannot listen at the path."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"this object is already receiving at {self.path}")
            listener = unix_sockets.listen(self.path)
            self._wake = Wakeup()
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
        wake.set()
        thread.join()
        wake.close()

    def send(self, obj: Any) -> None:
        """Put an object into the inbox, from any process; returns when it has arrived. Waits 10 s at most.

        OSError if no process receives, PacketError for an object that cannot be sent, RuntimeError if it is refused.
        """
        with unix_sockets.connect(self.path, _TIMEOUT_S) as end:
            send(end, CODEC, InboxItem(_to_json(obj)))
            try:
                answer = receive(end, CODEC).message
            except EOFError:
                raise ConnectionError(f"the receiver at {self.path} closed the connection") from None
        if not isinstance(answer, Ok):
            raise RuntimeError(f"{self.path}: {getattr(answer, 'cause', answer)}")

    def fetch_received(self) -> list[Any]:
        """Return all received objects in order, and remove them."""
        with self._lock:
            received, self._received = self._received, []
        return received

    def peek_received(self) -> list[Any]:
        """Return all received objects in order, and keep them."""
        with self._lock:
            return list(self._received)

    def clear(self) -> None:
        """Remove all received objects."""
        self.fetch_received()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self, listener: socket.socket, wake: Wakeup) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(unix_sockets.remove_socket, self.path)
            stack.enter_context(listener)
            selector.register(wake, selectors.EVENT_READ)
            selector.register(listener, selectors.EVENT_READ)
            connections: set[socket.socket] = set()
            stack.callback(_close_all, connections)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
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
            unix_sockets.peer_pid(end)
            end.setblocking(False)
            selector.register(end, selectors.EVENT_READ)
            connections.add(end)
        except OSError as error:
            _log.warning("a connection to %s is refused: %s", self.path, error)
            end.close()

    def _serve(self, end: socket.socket) -> bool:
        """Receive one packet. False if the connection is closed or invalid."""
        try:
            packet = receive(end, CODEC)
            packet.close_fds()
            answer: Message = RequestFailed("only InboxItem is accepted here")
            if isinstance(packet.message, InboxItem):
                answer = self._keep(_decoded(packet.message.value))
            send(end, CODEC, answer)
        except BlockingIOError:
            return True
        except PacketError as error:
            _log.warning("%s received an invalid message: %s", self.path, error)
            return False
        except (EOFError, OSError):
            return False
        return True

    def _keep(self, value: Any) -> Message:
        with self._lock:
            if len(self._received) >= _MOST_PENDING:
                return RequestFailed(f"the inbox is full: {_MOST_PENDING} objects have not been fetched")
            self._received.append(value)
        return Ok()


def _close_all(connections: set[socket.socket]) -> None:
    for end in connections:
        end.close()


def _to_json(value: Any) -> Any:
    """Return an object as JSON types. PacketError for a type that cannot be sent."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_to_json(item) for item in value]}
    if isinstance(value, dict) and _TAG not in value and all(isinstance(key, str) for key in value):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, RankInfo):
        return {_TAG: "RankInfo", **asdict(value)}
    if isinstance(value, WorkloadControlRequest):
        return {_TAG: "WorkloadControlRequest", "action": value.action.value, "description": value.description}
    if isinstance(value, WorkloadAction):
        return {_TAG: "WorkloadAction", "action": value.value}
    if isinstance(value, HeartbeatTimeouts | SectionTimeouts):
        return {_TAG: type(value).__name__, "value": value.to_json()}
    raise PacketError(f"a {type(value).__name__} cannot be sent; send JSON types or the dataclasses of `data`")


def _decoded(value: Any) -> Any:
    """Return the object that `_to_json` has described. PacketError if the description is invalid."""
    try:
        return _from_json(value)
    except PacketError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PacketError(f"not an object that can be sent: {str(value)[:80]}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _from_json(item) for key, item in value.items()}
        case "tuple":
            return tuple(_from_json(item) for item in value["items"])
        case "RankInfo":
            return RankInfo(int(value["global_rank"]), int(value["local_rank"]), str(value["host"]), int(value["pid"]))
        case "WorkloadControlRequest":
            return WorkloadControlRequest(WorkloadAction(value["action"]), str(value["description"]))
        case "WorkloadAction":
            return WorkloadAction(value["action"])
        case "HeartbeatTimeouts":
            return HeartbeatTimeouts.from_json(value["value"])
        case "SectionTimeouts":
            return SectionTimeouts.from_json(value["value"])
    raise PacketError(f"not an object of this protocol: {str(value)[:80]}")
