"""The server of the coordination store: one thread that owns all contents and all connections.

    accept --> CHALLENGE --> HELLO with proof --> WELCOME --> requests, in any number at a time
                  |
                  +-- no proof within a few seconds, or a wrong one: closed, and nothing else is read

A job has one server and no copy of it: a process that cannot reach it does not go on (see `client`).
"""

from __future__ import annotations

import errno
import hmac
import logging
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable

from inprocess.coordination.contents import Answer, Contents, Waiter, Waiters
from inprocess.coordination.frame_stream import FrameStream
from inprocess.coordination.wire import (
    MAX_BODY,
    MAX_GREETING,
    PROTOCOL,
    Access,
    Frame,
    Op,
    WireError,
    encode,
    number,
    pack_number,
    proof,
)
from inprocess.exception import StoreError
from inprocess.ipc.proofs import fresh_nonce
from inprocess.ipc.suspension import Suspension, starts_again
from inprocess.ipc.wakeup import Wakeup

_log = logging.getLogger(__name__)
_BACKLOG = 4096
_GREETING_S = 5.0
_MOST_STRANGERS = 256  # connections that have not proved anything yet
_STRANGER_S = 0.5  # what such a connection may take when others wait
_MOST_UNSENT = 64 << 20  # bytes queued for a peer: one that does not read must not fill the memory
_SPARE_DESCRIPTORS = 64
_ACCEPT_PAUSE_S = 0.1
_PORT_PAUSE_S = 0.05


class StoreServer:
    """Serves the store of one job from a thread of this process.

    It listens at `access.host` only; port 0 selects a free port. Only clients that know `access.secret` are served; one
    that is silent for `silence_s` is disconnected. All methods may be called from any thread; `close` ends the thread
    and frees every socket.
    """

    def __init__(self, access: Access, *, silence_s: float = 60.0) -> None:
        self._access = access
        self._silence_s = silence_s
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._accepting = False
        self._wake = Wakeup()
        self._strangers: dict[_Peer, None] = {}  # in the order of arrival
        self._peers: dict[_Peer, None] = {}
        self._contents = Contents()
        self._waiters: Waiters[_Peer] = Waiters()
        self._check_at = 0.0
        self._suspension = Suspension()
        self._thread = threading.Thread(target=self._serve, name="inprocess-store-server", daemon=True)
        self._closing = False
        self.request_count = 0
        self.bytes_sent = 0

    def start(
        self, clients: int = 0, *, port_wait_s: float = 0.0, is_wanted: Callable[[], bool] = lambda: True
    ) -> Access:
        """Bind and begin to serve; return the access with the real port. Call it once.

        A port that is in use is tried again for `port_wait_s`, as long as the server `is_wanted`. OSError if the
        address cannot be used. StoreError if this process may not open enough descriptors for this number of `clients`.
        """
        try:
            _raise_descriptor_limit(clients)
            self._listener = _listen_within(self._access, port_wait_s, is_wanted)
        except BaseException:
            self.close()
            raise
        self._access = Access(self._access.host, self._listener.getsockname()[1], self._access.job, self._access.secret)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept_again()
        self._thread.start()
        return self._access

    @property
    def client_count(self) -> int:
        """How many connections are authenticated and not silent."""
        return len(self._peers)

    def close(self) -> None:
        """Stop serving; all connections break. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.is_alive():
            self._wake.set()
            self._thread.join()
        self._close_all()
        self._wake.close()
        self._selector.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException:
            _log.exception("the store server has failed; the job cannot go on without it")
            raise
        finally:
            self._close_all()

    def _turn(self) -> None:
        pause_s = max(0.0, self._check_at - time.monotonic())
        missed_s = self._suspension.missed_s()  # while it handled requests
        self._suspension.expect(pause_s)
        ready = self._selector.select(pause_s)
        missed_s += self._suspension.missed_s()
        self._suspension.expect(0.0)
        now = time.monotonic()
        if missed_s:  # the clients may go on some seconds later
            again = starts_again(missed_s, self._silence_s)
            for peer in (*self._strangers, *self._peers):
                peer.heard_at = now if again else peer.heard_at + missed_s
        for key, events in ready:
            if isinstance(key.data, _Peer):
                self._attend(key.data, events, now)
            elif key.fileobj is self._wake:
                self._wake.clear()
            else:
                self._accept()
        if now >= self._check_at:
            self._drop_silent(now)

    def _attend(self, peer: _Peer, events: int, now: float) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                frames = peer.receive()
                if peer.client is not None:
                    peer.heard_at = now
                for frame in frames:
                    if peer.closed:
                        return
                    self._handle(peer, frame)
        except (OSError, ValueError) as error:
            self._drop(peer, error)

    def _drop_silent(self, now: float) -> None:
        """Close connections that are silent, or not authenticated, for too long."""
        for peer in [peer for peer in self._strangers if now - peer.heard_at >= _GREETING_S]:
            self._drop(peer, TimeoutError(f"not authenticated within {_GREETING_S:g} s"))
        for peer in [peer for peer in self._peers if now - peer.heard_at >= self._silence_s]:
            self._drop(peer, TimeoutError(f"silent for {self._silence_s:g} s"))
        for peer in self._peers:
            if peer.attends and now - peer.heard_at >= self._silence_s / 4:  # it is stopped, or its node is lost
                self._leave_sets(peer)
        self._check_at = now + min(1.0, self._silence_s / 4)
        self._accept_again()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while self._make_room():
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # most likely out of descriptors: try again later
                _log.error("the store server cannot accept a connection: %s", error)
                self._pause_accepting()
                return
            peer = _Peer(sock, f"{address[0]}:{address[1]}", self._selector, self)
            self._strangers[peer] = None
            try:
                peer.send(encode(Op.CHALLENGE, 0, PROTOCOL, peer.nonce))
            except OSError as error:
                self._drop(peer, error)

    def _make_room(self) -> bool:
        """Return whether one more connection may be accepted; if there are too many, close the oldest stranger."""
        if len(self._strangers) < _MOST_STRANGERS:
            return True
        oldest = next(iter(self._strangers))
        if time.monotonic() - oldest.heard_at < _STRANGER_S:
            self._pause_accepting()
            return False
        self._drop(oldest, TimeoutError("not authenticated, and others wait"))
        return True

    def _pause_accepting(self) -> None:
        if self._accepting and self._listener is not None:
            self._selector.unregister(self._listener)
            self._accepting = False
            self._check_at = min(self._check_at, time.monotonic() + _ACCEPT_PAUSE_S)

    def _accept_again(self) -> None:
        if not self._accepting and self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True

    def _drop(self, peer: _Peer, reason: BaseException) -> None:
        """Forget a peer and close its connection. Idempotent."""
        if peer.closed:
            return
        level = logging.WARNING if isinstance(reason, ValueError) else logging.DEBUG
        _log.log(level, "store server: connection from %s: %s", peer.name, reason)
        for waiter in peer.waiting.values():
            self._waiters.discard(waiter)
        peer.waiting.clear()
        self._leave_sets(peer)
        self._strangers.pop(peer, None)
        self._peers.pop(peer, None)
        peer.close()

    def _leave_sets(self, peer: _Peer) -> None:
        """Remove the members that are there only while this peer is."""
        for name, member in peer.attends:
            self._contents.leave(peer, name, member)
        peer.attends.clear()

    def _close_listener(self) -> None:
        if self._listener is not None:
            if self._accepting:
                self._selector.unregister(self._listener)
                self._accepting = False
            self._listener.close()
            self._listener = None

    def _close_all(self) -> None:
        for peer in [*self._strangers, *self._peers]:
            self._drop(peer, ConnectionAbortedError("the server is closed"))
        self._close_listener()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _handle(self, peer: _Peer, frame: Frame) -> None:
        """Process a frame. ValueError if it is invalid: the connection must be closed."""
        op = frame.op
        if peer.client is None:
            self._greet(peer, frame)
        elif op.reads or op.waits or op.changes or op is Op.ATTEND:
            self.request_count += 1
            self._serve_request(peer, peer.client, frame)
        elif op is Op.PING:
            peer.send(encode(Op.PONG))
        elif op is Op.BYE:
            self._contents.forget_client(peer.client)
            self._drop(peer, ConnectionResetError("the client has ended"))
        elif op is Op.CANCEL:
            waiter = peer.waiting.get(frame.id)
            if waiter is not None:
                self._release(waiter, (Op.CANCELLED, ()))
        else:
            raise WireError(f"{op.name} is not a request")

    def _greet(self, peer: _Peer, frame: Frame) -> None:
        if frame.op is not Op.HELLO or len(frame.fields) != 3:
            raise WireError(f"{frame.op.name} is not a greeting")
        client, nonce, theirs = frame.fields
        expected = proof(self._access, b"client", peer.nonce, nonce, client)
        if not hmac.compare_digest(theirs, expected):
            peer.send(encode(Op.REFUSED))
            raise WireError("the client does not know the secret of this job")
        peer.client = client
        peer.reader.limit = MAX_BODY
        del self._strangers[peer]
        self._peers[peer] = None
        peer.send(encode(Op.WELCOME, 0, proof(self._access, b"server", nonce, peer.nonce)))

    def _serve_request(self, peer: _Peer, client: bytes, frame: Frame) -> None:
        if frame.op.changes:
            change = self._contents.change(client, frame)
            peer.answer(frame.id, change.answer)
            for key in change.keys:
                self._key_changed(key)
            if change.set_name is not None:
                self._set_grew(change.set_name)
        elif frame.op.waits:
            self._wait(peer, frame)
        elif frame.op.reads:
            peer.answer(frame.id, self._contents.read(frame))
        else:  # ATTEND
            guard_key, guard_value, name, member = frame.fields
            peer.attends[name, member] = None
            answer = self._contents.stale((guard_key, guard_value))
            peer.answer(frame.id, answer or self._contents.attend(peer, name, member))
            self._set_grew(name)

    def _wait(self, peer: _Peer, frame: Frame) -> None:
        guard_key, guard_value, *rest = frame.fields
        guard = (guard_key, guard_value)
        answer = self._contents.stale(guard)
        if frame.op is Op.GET:
            waiter = Waiter(peer, frame.id, guard, keys=tuple(rest))
        elif frame.op is Op.MEET:
            name, key, member, size = rest
            waiter = Waiter(peer, frame.id, guard, keys=(key,))
            answer = answer or self._contents.meet(waiter, name, member, number(size))
            self._set_grew(name)
        else:
            name, size = rest
            waiter = Waiter(peer, frame.id, guard, set_name=name, size=number(size))
        answer = answer or self._contents.answer_to(waiter)
        if answer is not None:
            peer.answer(frame.id, answer)
        elif frame.id not in peer.waiting:
            self._file(waiter)

    def _file(self, waiter: Waiter[_Peer]) -> None:
        missing = next((key for key in waiter.keys if key not in self._contents.keys), b"")
        waiter.peer.waiting[waiter.id] = waiter
        self._waiters.file(waiter, missing)

    def _key_changed(self, key: bytes) -> None:
        value = bytes(self._contents.keys.get(key, b""))
        for waiter in self._waiters.of_guard(key, value):
            self._release(waiter, (Op.STALE, (value,)))
        if key in self._contents.keys:
            for waiter in self._waiters.of_key(key):
                answer = self._contents.answer_to(waiter)
                self._waiters.discard(waiter)
                del waiter.peer.waiting[waiter.id]
                if answer is None:
                    self._file(waiter)
                else:
                    self._send_answer(waiter, answer)

    def _set_grew(self, name: bytes) -> None:
        size = len(self._contents.sets.get(name, ()))
        for waiter in self._waiters.of_size(name, size):
            self._release(waiter, (Op.OK, (pack_number(size),)))

    def _release(self, waiter: Waiter[_Peer], answer: Answer) -> None:
        self._waiters.discard(waiter)
        del waiter.peer.waiting[waiter.id]
        self._send_answer(waiter, answer)

    def _send_answer(self, waiter: Waiter[_Peer], answer: Answer) -> None:
        try:
            waiter.peer.answer(waiter.id, answer)
        except OSError as error:
            self._drop(waiter.peer, error)


class _Peer(FrameStream):
    """One accepted connection, non-blocking, in the thread of the server.

    `client` is set once it is authenticated; until then only a small frame is accepted.
    """

    def __init__(self, sock: socket.socket, name: str, selector: selectors.BaseSelector, server: StoreServer) -> None:
        super().__init__(sock, MAX_GREETING)
        self.name = name
        self.nonce = fresh_nonce()
        self.client: bytes | None = None
        self.waiting: dict[int, Waiter[_Peer]] = {}
        self.attends: dict[tuple[bytes, bytes], None] = {}  # sets, and its members there
        self.heard_at = time.monotonic()
        self.closed = False
        self._waits_to_send = False
        self._selector = selector
        self._server = server
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def answer(self, id: int, answer: Answer) -> None:
        """Answer a request."""
        op, fields = answer
        self.send(encode(op, id, *fields))

    def send(self, frame: bytes) -> None:
        if self.closed:
            return
        self._server.bytes_sent += len(frame)
        if len(self.unsent) + len(frame) > _MOST_UNSENT:
            raise ConnectionAbortedError("the client does not read what it is sent")
        super().send(frame)

    def flush(self) -> None:
        super().flush()
        if self._waits_to_send != bool(self.unsent):
            self._waits_to_send = bool(self.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
            self._selector.modify(self._socket, events, self)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens at the address of this name only. OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def _listen_within(access: Access, wait_s: float, is_wanted: Callable[[], bool]) -> socket.socket:
    """Listen at the address; wait for its port, which the server of an earlier start of the job may be just leaving."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return listen(access.host, access.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() >= deadline or not is_wanted():
                after = f" after {wait_s:g} s" if wait_s else ""
                text = f"port {access.port} is still in use by another program, or another job{after}"
                raise OSError(error.errno, text) from None
        time.sleep(_PORT_PAUSE_S)


def _raise_descriptor_limit(clients: int) -> None:
    """Raise the limit so that this process may have a descriptor for each client. StoreError if it cannot."""
    needed = clients + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StoreError(
            f"the server of the coordination store needs {needed} file descriptors, but this process may have {hard}: "
            f"raise the hard limit (`ulimit -Hn {needed}`, LimitNOFILE= of systemd) on the first node"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
