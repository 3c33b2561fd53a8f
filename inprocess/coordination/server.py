"""The server of the coordination store: one thread that owns all contents and all connections.

accepting a client        position 0: at once
                          standby:    CHECKING -> Scout.look -> an earlier host lives: NOT_ACTIVE
                                                             -> none does: active from here on, ACCEPTED
a change                  Contents.change -> frames to the mirrors -> answer -> waiters that it satisfies
STEP_DOWN                 a later server took over while this process was stopped: nobody is served any more
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from inprocess.coordination.connection import Connection, Purpose
from inprocess.coordination.peers import Peer
from inprocess.coordination.requests import Identity, Requests
from inprocess.coordination.standby import Scout
from inprocess.coordination.wire import Host, WireError

__all__ = ["StoreServer"]

_log = logging.getLogger(__name__)
_BACKLOG = 4096
_RETRY_S = 0.05


class StoreServer:
    """Serves one store from a thread of this process.

    `position` 0 is the primary and serves at once. Any other position is a standby: it mirrors the active server (see
    `follow`) and serves nobody until a client asks for it and no earlier host answers any more; from then on it stays
    active. `host` is the name others reach this machine by; the socket is bound to all addresses, except for a loopback
    name. `port` 0 picks a free one. `session` says which job and which call of the wrapper this store is for; clients
    with another session are turned away. `embedded` tells clients that the server lives in a rank process.

    All methods may be called from any thread. `close` ends the thread and frees every socket.
    """

    def __init__(self, host: str, port: int, *, session: str, position: int = 0, embedded: bool = False) -> None:
        self._host = Host(position, host, port)
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._scout = Scout(session, str(position), self._adopt_upstream)
        self._requests = Requests(Identity(position, session, embedded), self._look, self._scout.upstream_lost)
        self._thread = threading.Thread(target=self._serve, name=f"inprocess-store-server-{position}", daemon=True)
        self._closing = False

    def start(self, bind_timeout: float = 0.0) -> None:
        """Bind and begin to serve. Once.

        OSError (EADDRINUSE) if the port is still taken after `bind_timeout` seconds, e.g. by the server of the
        previous call that has not quite ended; the server is closed then.
        """
        try:
            self._listener = _bind(self._host, bind_timeout)
        except BaseException:
            self.close()
            raise
        self._listener.setblocking(False)
        self._host = Host(self._host.position, self._host.name, self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()

    @property
    def host(self) -> Host:
        """Position, name and real port: what a standby registers with `StoreClient.register_host`."""
        return self._host

    @property
    def address(self) -> tuple[str, int]:
        """Host name and real port."""
        return self._host.name, self._host.port

    @property
    def client_count(self) -> int:
        """How many different clients are connected now."""
        return len(self._requests.clients)

    @property
    def request_count(self) -> int:
        """How many requests were received so far."""
        return self._requests.count

    @property
    def mirror_count(self) -> int:
        """How many standbys copy this server now."""
        return self._requests.mirror_count

    @property
    def active(self) -> bool:
        """Whether this server accepts clients."""
        return self._requests.active and not self._requests.superseded

    def follow(self, hosts: Iterable[Host]) -> None:
        """Keep a copy of the contents of the active one of these hosts, until this server itself is active.

        Hosts with a higher position are left out. Call it once, after `start`.
        """
        earlier = list(hosts)
        self._submit(lambda: self._requests.add_earlier(earlier))
        self._scout.follow(self._earlier)

    def stop_listening(self) -> None:
        """Give the port back, but go on serving the clients that are connected; they cannot connect again."""
        self._submit(self._close_listener)

    def close(self) -> None:
        """Stop serving; all connections break. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._scout.stop()
        if self._thread.is_alive():
            self._submit(lambda: None)
            self._thread.join()
        while self._tasks:
            self._tasks.popleft()()  # a connection that was handed over must not be left open
        self._close_peers()
        self._close_listener()
        self._wake_reader.close()
        self._wake_writer.close()
        self._selector.close()

    def _submit(self, task: Callable[[], None]) -> None:
        """Have the thread of the server run this soon."""
        self._tasks.append(task)
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: nobody is there to run it
            self._wake_writer.send(b"\0")

    # In the threads of the scout.

    def _earlier(self) -> Sequence[Host]:
        found: list[Host] = []
        done = threading.Event()

        def collect() -> None:
            found.extend(self._requests.earlier())
            done.set()

        self._submit(collect)
        while not done.wait(_RETRY_S) and not self._closing:
            pass
        return found

    def _adopt_upstream(self, connection: Connection) -> None:
        def adopt() -> None:
            peer = Peer(connection.socket, "upstream", self._selector, connection.reader)
            self._requests.mirror_from(peer, connection.unread())

        if self._closing:
            connection.close()
        else:
            self._submit(adopt)

    def _look(self, earlier: Sequence[Host]) -> None:
        self._scout.look(earlier, lambda living: self._submit(lambda: self._requests.verdict(living)))

    # In the thread of the server.

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException:
            _log.exception("store server %d ends, its clients must find another one", self._host.position)
            raise
        finally:
            self._close_peers()
            self._close_listener()

    def _turn(self) -> None:
        deadline = self._requests.waiters.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = self._selector.select(timeout)
        if any(key.fileobj is self._listener for key, _ in ready):
            self._accept()
            ready = self._selector.select(0)
        # Those who are no clients come first: when this process was stopped, and a later server has taken over, the
        # word of it is among them, and no client may be served any more.
        for key, events in sorted(ready, key=lambda entry: _is_client(entry[0].data)):
            if isinstance(key.data, Peer) and not (self._requests.superseded and _is_client(key.data)):
                self._attend(key.data, events)
            elif key.fileobj is self._wake_reader:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
        while self._tasks:
            self._tasks.popleft()()
        self._requests.expire()
        if self._requests.superseded:
            self._close_served_peers()

    def _attend(self, peer: Peer, events: int) -> None:
        try:
            if peer.closed:
                return
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                for frame in peer.frames():
                    if peer.closed:
                        return
                    self._requests.handle(peer, frame)
        except (OSError, WireError, ValueError) as error:
            self._requests.drop(peer, error)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    sock, address = self._listener.accept()
                except BlockingIOError:
                    raise
                except OSError as error:
                    _log.error("store server %d cannot accept a connection: %s", self._host.position, error)
                    time.sleep(_RETRY_S)  # most likely out of descriptors, which only time can heal
                    return
                Peer(sock, f"{address[0]}:{address[1]}", self._selector)

    def _close_listener(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _peers(self) -> list[Peer]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Peer)]

    def _close_served_peers(self) -> None:
        for peer in self._peers():
            if peer.accepted:
                self._requests.drop(peer, ConnectionAbortedError("superseded"))

    def _close_peers(self) -> None:
        for peer in self._peers():
            self._requests.drop(peer, ConnectionAbortedError("the server closes"))


def _is_client(data: object) -> bool:
    return isinstance(data, Peer) and data.accepted and data.purpose is Purpose.CLIENT


def _bind(host: Host, timeout: float) -> socket.socket:
    """Return a listening socket."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _listen(host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _listen(host: Host) -> socket.socket:
    """Bind to loopback if that is the host's name, else to all addresses, of both families where there are two.

    Not to the address of the name: behind an address translation, no interface of this machine has it.
    """
    if host.name == "localhost" or host.name.startswith("127."):
        return socket.create_server((host.name, host.port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", host.port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", host.port), backlog=_BACKLOG)
