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
import select
import socket
import threading
import time
from collections.abc import Callable

from inprocess.coordination.contents import Answer, Contents, Waiter, Waiters, answer_number
from inprocess.coordination.frame_stream import ServerConnection
from inprocess.coordination.wire import MAX_BODY, PROTOCOL, Access, Frame, Op, WireError, encode, number, proof
from inprocess.exception import StoreError
from inprocess.ipc.suspension import Suspension, starts_again
from inprocess.ipc.wakeup import Wakeup

_log = logging.getLogger(__name__)
_BACKLOG = 4096
_GREETING_S = 5.0
_MOST_STRANGERS = 256  # connections that have not proved anything yet
_STRANGER_S = 0.5  # what such a connection may take when others wait
_MOST_READY = 512  # connections that are handled before their answers are sent
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
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._accepting = False
        self._wake = Wakeup()
        self._connections: dict[int, ServerConnection] = {}  # by descriptor: the strangers and the peers
        self._strangers: dict[ServerConnection, None] = {}  # in the order of arrival
        self._peers: dict[ServerConnection, None] = {}
        self._to_send: list[ServerConnection] = []  # that have been answered in this turn
        self._contents = Contents()
        self._waiters: Waiters[ServerConnection] = Waiters()
        self._check_at = 0.0
        self._suspension = Suspension()
        self._thread = threading.Thread(target=self._serve, name="inprocess-store-server", daemon=True)
        self._closing = False
        self.request_count = 0

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
        self._epoll.register(self._wake.fileno(), select.EPOLLIN)
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
        self._epoll.close()

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
        ready = self._epoll.poll(pause_s, _MOST_READY)
        missed_s += self._suspension.missed_s()
        self._suspension.expect(0.0)
        now = time.monotonic()
        if missed_s:  # the clients may go on some seconds later
            again = starts_again(missed_s, self._silence_s)
            for peer in (*self._strangers, *self._peers):
                peer.heard_at = now if again else peer.heard_at + missed_s
        for fd, events in ready:
            if fd in self._connections:
                self._attend(self._connections[fd], events, now)
            elif fd == self._wake.fileno():
                self._wake.clear()
            else:
                self._accept()
        self._send_answers()
        if now >= self._check_at:
            self._drop_silent(now)

    def _attend(self, peer: ServerConnection, events: int, now: float) -> None:
        try:
            if events & select.EPOLLOUT:
                peer.flush()
            if events & ~select.EPOLLOUT:
                frames = peer.receive()
                if peer.client is not None:
                    peer.heard_at = now
                for frame in frames:
                    if peer.closed:
                        return
                    self._handle(peer, frame)
        except (OSError, ValueError) as error:
            self._drop(peer, error)

    def _send_answers(self) -> None:
        for peer in self._to_send:
            try:
                peer.flush()
            except OSError as error:
                self._drop(peer, error)
        self._to_send.clear()

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
            peer = ServerConnection(sock, f"{address[0]}:{address[1]}", self._epoll, self._to_send)
            self._connections[peer.fileno()] = peer
            self._strangers[peer] = None
            peer.queue(encode(Op.CHALLENGE, 0, PROTOCOL, peer.nonce))

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
            self._epoll.unregister(self._listener)
            self._accepting = False
            self._check_at = min(self._check_at, time.monotonic() + _ACCEPT_PAUSE_S)

    def _accept_again(self) -> None:
        if not self._accepting and self._listener is not None:
            self._epoll.register(self._listener, select.EPOLLIN)
            self._accepting = True

    def _drop(self, peer: ServerConnection, reason: BaseException) -> None:
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
        self._connections.pop(peer.fileno(), None)
        peer.close()

    def _leave_sets(self, peer: ServerConnection) -> None:
        """Remove the members that are there only while this peer is."""
        for name, member in peer.attends:
            self._contents.leave(peer, name, member)
        peer.attends.clear()

    def _close_listener(self) -> None:
        if self._listener is not None:
            if self._accepting:
                self._epoll.unregister(self._listener)
                self._accepting = False
            self._listener.close()
            self._listener = None

    def _close_all(self) -> None:
        for peer in [*self._strangers, *self._peers]:
            self._drop(peer, ConnectionAbortedError("the server is closed"))
        self._close_listener()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _handle(self, peer: ServerConnection, frame: Frame) -> None:
        """Process a frame. ValueError if it is invalid: the connection must be closed."""
        op = frame.op
        if peer.client is None:
            self._greet(peer, frame)
        elif op.changes:
            self.request_count += 1
            self._change(peer, peer.client, frame)
        elif op.waits:
            self.request_count += 1
            self._wait(peer, frame)
        elif op.reads:
            self.request_count += 1
            peer.answer(frame.id, self._contents.read(frame))
        elif op is Op.PING:
            peer.queue(encode(Op.PONG))
        elif op is Op.ATTEND:
            self.request_count += 1
            self._let_attend(peer, frame)
        elif op is Op.BYE:
            self._contents.forget_client(peer.client)
            self._drop(peer, ConnectionResetError("the client has ended"))
        elif op is Op.CANCEL:
            waiter = peer.waiting.get(frame.id)
            if waiter is not None:
                self._release(waiter, (Op.CANCELLED, b""))
        else:
            raise WireError(f"{op.name} is not a request")

    def _greet(self, peer: ServerConnection, frame: Frame) -> None:
        if frame.op is not Op.HELLO or len(frame.fields) != 3:
            raise WireError(f"{frame.op.name} is not a greeting")
        client, nonce, theirs = frame.fields
        expected = proof(self._access, b"client", peer.nonce, nonce, client)
        if not hmac.compare_digest(theirs, expected):
            peer.send(encode(Op.REFUSED))  # before it is closed
            raise WireError("the client does not know the secret of this job")
        peer.client = client
        peer.reader.limit = MAX_BODY
        del self._strangers[peer]
        self._peers[peer] = None
        peer.queue(encode(Op.WELCOME, 0, proof(self._access, b"server", nonce, peer.nonce)))

    def _change(self, peer: ServerConnection, client: bytes, frame: Frame) -> None:
        answer, keys, set_name = self._contents.change(client, frame)
        for key in keys:
            self._key_changed(key)
        if set_name is not None:
            self._set_grew(set_name)
        peer.answer(frame.id, answer)  # at the end: it fails if the client does not read

    def _let_attend(self, peer: ServerConnection, frame: Frame) -> None:
        guard_key, guard_value, name, member = frame.fields
        peer.attends[name, member] = None
        answer = self._contents.stale((guard_key, guard_value)) or self._contents.attend(peer, name, member)
        self._set_grew(name)
        peer.answer(frame.id, answer)

    def _wait(self, peer: ServerConnection, frame: Frame) -> None:
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

    def _file(self, waiter: Waiter[ServerConnection]) -> None:
        waiter.peer.waiting[waiter.id] = waiter
        for key in waiter.keys:
            if key not in self._contents.keys:
                self._waiters.file(waiter, key)
                return
        self._waiters.file(waiter)

    def _key_changed(self, key: bytes) -> None:
        if not self._waiters.depend_on(key):
            return
        for waiter in self._waiters.of_guard(key, self._contents.keys.get(key, b"")):
            self._release(waiter, self._contents.stale_answer(key))
        answers: dict[tuple[bytes, ...], Answer | None] = {}  # one for all waiters of the same keys
        for waiter in self._waiters.of_key(key):
            if waiter.keys not in answers:
                answers[waiter.keys] = self._contents.values(waiter.keys)
            answer = answers[waiter.keys]
            if answer is not None:
                self._release(waiter, answer)
            else:
                self._waiters.discard(waiter)
                self._file(waiter)

    def _set_grew(self, name: bytes) -> None:
        size = len(self._contents.sets.get(name, ()))
        for waiter in self._waiters.of_size(name, size):
            self._release(waiter, answer_number(size))

    def _release(self, waiter: Waiter[ServerConnection], answer: Answer) -> None:
        peer = waiter.peer
        self._waiters.discard(waiter)
        del peer.waiting[waiter.id]
        try:
            peer.answer(waiter.id, answer)
        except OSError as error:
            self._drop(peer, error)


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
