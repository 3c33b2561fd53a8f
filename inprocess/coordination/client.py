"""The client of the coordination store: one connection, any number of requests at a time."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

from inprocess.bounded_waits import wait_until_set
from inprocess.coordination.frame_stream import ClientConnection, RefusedError
from inprocess.coordination.store_compat import CompatibleVerbs
from inprocess.coordination.verbs import StoreVerbs, VerbCall
from inprocess.coordination.wire import Access, Frame, Op, WireError, encode, pack_number
from inprocess.exception import StaleViewError, StoreError, StoreLostError, StoreTimeoutError
from inprocess.ipc.proofs import fresh_nonce
from inprocess.ipc.suspension import Silence
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.wakeup import Wakeup

_log = logging.getLogger(__name__)
_DEFAULT_TIMEOUT = timedelta(seconds=300)
_CONNECT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class StoreClient(StoreVerbs):
    """Access to the store of a job. For any number of threads.

    Requests of different threads share one connection, which a
    thread of the client opens, keeps alive, and opens again when it breaks. Pending requests are then sent again, and
    each change is applied once, however often it is sent.

    If the server is silent for `patience`, the store is lost for good: pending and later requests end with
    StoreLostError, and `lost` is true. So a job that a network failure cuts in two goes on in one part only.

    *Interruption.* An exception raised in the middle of a request (thrown by another thread, for example) leaves the
    client usable; whether the change was applied is then unknown.

    *Fork.* A child has no connection: requests there end with StoreError.
    """

    takes_guards = True

    def __init__(
        self,
        access: Access,
        *,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        connect_timeout: timedelta | None = None,
        patience: timedelta = timedelta(seconds=30),
        ping_interval: timedelta | None = None,
    ) -> None:
        """Connect. StoreError if the server does not accept this client within `connect_timeout` (default: `timeout`).

        `timeout` is the default of requests that wait. A server that is silent for `ping_interval` (default: a sixth of
        `patience`) is sent a ping.
        """
        super().__init__()
        self.access = access
        self.failure: StoreLostError | None = None
        self._timeout = timeout
        self._patience_s = patience.total_seconds()
        self._ping_s = self._patience_s / 6
        if ping_interval is not None:
            self._ping_s = min(ping_interval.total_seconds(), self._patience_s / 3)
        self._id = fresh_nonce()
        self._pid = os.getpid()
        self._outbox: collections.deque[_Call] = collections.deque()  # to be sent, or, with an id, cancelled
        self._calls: dict[int, _Call] = {}  # sent and not answered; this and the ids belong to the client's thread
        self._ids = itertools.count(1)
        self._over = False
        self._wake = Wakeup()
        self._closing = False
        self._socket: socket.socket | None = None
        self._connected = threading.Event()
        self._local_host = ""
        self._silence = Silence(self._patience_s)
        self._connect_s = (connect_timeout or timeout).total_seconds()
        self._thread = JoinableThread(self._run, "inprocess-store-client")
        self._thread.start()
        _clients.add(self)
        try:
            wait_until_set(self._connected, None)
            if self.failure is not None:
                raise self.failure
        except BaseException:
            self.close()
            raise

    @property
    def timeout(self) -> timedelta:
        """The default timeout of requests that wait."""
        return self._timeout

    @property
    def lost(self) -> bool:
        """Whether the store is lost: the server was silent for too long."""
        return self.failure is not None

    def to_document(self) -> dict[str, Any]:
        """Return what another process needs to connect, as JSON types."""
        return {"access": self.access.to_document()}

    @property
    def local_host(self) -> str:
        """The address of this machine towards the server, by which others can reach it."""
        return self._local_host

    def close(self) -> None:
        """Close the connection; requests under way end with StoreError. Idempotent, no thread is left."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def perform(self, call: VerbCall) -> tuple[bytes, ...]:
        return self._ask(_call_of(call), timeout=call.timeout, label=call.label if call.op.waits else "")[0]

    def perform_all(self, calls: Sequence[VerbCall]) -> list[tuple[bytes, ...]]:
        return self._ask(*map(_call_of, calls))

    def _ask(self, *calls: _Call, timeout: timedelta | None = None, label: str = "") -> list[tuple[bytes, ...]]:
        """Send requests together, and return the fields of each answer. Only a single one may wait.

        An exception may be raised at any line; `finally` undoes what has to be undone.
        """
        if os.getpid() != self._pid:
            raise StoreError("this process was forked from one that uses the coordination store, and cannot use it")
        for call in calls:
            encode(call.op, 0, *call.fields)  # WireError here if it is too large
        try:
            if self._closing or self.failure is not None:
                raise self.failure or StoreError("the client of the coordination store is closed")
            self._outbox.extend(calls)
            self._wake.set()
            if self._over:  # the client's thread ended just before
                for call in calls:
                    call.done.set()
            for call in calls:
                self._await(call, timeout, label)
        finally:
            for call in reversed(calls):  # so that of requests that are under way the later ones are left out
                if call.answer is None:
                    call.abandoned = True
                    if call.op.waits:
                        self._outbox.append(call)
        return [self._fields(call) for call in calls]

    def _await(self, call: _Call, timeout: timedelta | None, label: str) -> None:
        waits_s = (self._timeout if timeout is None else timeout).total_seconds() if call.op.waits else None
        if not wait_until_set(call.done, waits_s):
            call.cancelled = True  # if the connection breaks now, the request is sent and cancelled again
            self._outbox.append(call)
            self._wake.set()
            wait_until_set(call.done, None)
        if call.answer is not None and call.answer.op is Op.CANCELLED:
            raise StoreTimeoutError(f"{label} did not appear in the store within {waits_s:g} s")

    def _fields(self, call: _Call) -> tuple[bytes, ...]:
        answer = call.answer
        if answer is None:
            raise self.failure or StoreError("the client of the coordination store was closed")
        if answer.op is Op.OK:
            return answer.fields
        text = b" ".join(answer.fields).decode(errors="replace")
        if answer.op is Op.STALE:
            guard = f"{call.fields[0].decode()} {call.fields[1].decode()}"
            raise StaleViewError(
                f"the others went on without this process: it expects {guard}, but the value is {text} now"
            )
        raise StoreError(f"the store answered {answer.op.name}: {text}")

    # -- the thread of the client --------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: Exception = StoreError("closed")
        pause_s = _FIRST_PAUSE_S
        limit_s = self._connect_s
        try:
            while not self._closing and self._silence.seconds() < limit_s:
                try:
                    with self._connection(limit_s - self._silence.seconds()) as connection:
                        pause_s = _FIRST_PAUSE_S
                        self._resend(connection)
                        self._connected.set()
                        self._converse(connection)
                except RefusedError as refusal:
                    error = refusal
                    break
                except (OSError, WireError) as problem:
                    error = problem
                    _log.info("no connection to the store server at %s: %s", self._place, problem)
                if self._connected.is_set():
                    limit_s = self._patience_s
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if not self._closing:
                self._give_up(error)
        except BaseException as failure:
            self._give_up(StoreError(f"{type(failure).__name__}: {failure}"))
            raise
        finally:
            self._over = True
            for call in [*self._calls.values(), *self._outbox]:
                call.done.set()
            self._connected.set()

    @property
    def _place(self) -> str:
        return f"{self.access.host}:{self.access.port}"

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, RefusedError):
            text = f"the server at {self._place} {error}"
        elif not self._connected.is_set():
            text = f"the server at {self._place} was not reached within {self._connect_s:g} s: {error}"
        else:
            text = (
                f"the server at {self._place} was silent for {self._patience_s:g} s: {error}. Its node is lost, "
                "or this one is cut off from it"
            )
        self.failure = StoreLostError(f"the coordination store is lost: {text}")

    @contextlib.contextmanager
    def _connection(self, left_s: float) -> Iterator[ClientConnection]:
        """Connect and authenticate; a context in which `_socket` is connected."""
        patience_s = max(0.05, min(_CONNECT_S, left_s))
        self._silence.expect(2 * patience_s)
        sock = socket.create_connection((self.access.host, self.access.port), patience_s)
        try:
            if sock.getsockname() == sock.getpeername():
                # Connecting to a free ephemeral port of this machine can connect the socket to itself.
                raise ConnectionRefusedError("no server listens there")
            connection = ClientConnection(sock)
            connection.greet(self.access, self._id, time.monotonic() + patience_s)
            self._socket, self._local_host = sock, sock.getsockname()[0]
            self._silence.end()
            yield connection
        finally:
            self._socket = None
            sock.close()

    def _resend(self, connection: ClientConnection) -> None:
        """Send first what was pending when the last connection broke, in the order of the ids."""
        self._calls = {id: call for id, call in sorted(self._calls.items()) if not call.abandoned}
        for call in self._calls.values():
            connection.queue(call.frame(self._floor()))
            if call.cancelled:
                connection.queue(encode(Op.CANCEL, call.id))

    def _queue(self, connection: ClientConnection, call: _Call) -> None:
        """Queue a call from the outbox, or its cancellation.

        Ids are assigned here, in one thread, so no change with an id below the floor can still be sent.
        """
        if call.id:
            if call.id in self._calls:
                connection.queue(encode(Op.CANCEL, call.id))
        elif not call.abandoned:
            call.id = next(self._ids)
            self._calls[call.id] = call
            connection.queue(call.frame(self._floor()))

    def _converse(self, connection: ClientConnection) -> None:
        """Send and receive until the connection breaks (OSError), or this client closes."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        ping_at = time.monotonic() + self._ping_s
        while not self._closing:
            now = time.monotonic()
            if now >= ping_at:
                connection.send(encode(Op.PING))
                ping_at = now + self._ping_s
            if self._silence.seconds() >= self._patience_s:
                raise TimeoutError(f"the server was silent for {self._patience_s:g} s")
            while self._outbox:
                self._queue(connection, self._outbox.popleft())
            connection.flush()
            poll.register(connection, select.POLLIN | (select.POLLOUT if connection.unsent else 0))
            pause_s = max(0.0, min(ping_at - now, self._patience_s - self._silence.seconds()))
            self._silence.expect(pause_s)
            ready = dict(poll.poll(1000 * pause_s + 1))
            if self._wake.fileno() in ready:
                self._wake.clear()
            if ready.get(connection.fileno(), 0) & select.POLLOUT:
                connection.flush()
            if ready.get(connection.fileno(), 0) & ~select.POLLOUT:
                for frame in connection.receive():
                    self._handle(frame)
                self._silence.end()
                ping_at = time.monotonic() + self._ping_s  # no ping is due after a sign of life
        connection.send(encode(Op.BYE))
        connection.flush()

    def _handle(self, frame: Frame) -> None:
        call = self._calls.pop(frame.id, None)
        if call is not None:
            call.answer = frame
            call.done.set()

    def _floor(self) -> int:
        """Return the lowest id of a change that may not have been answered."""
        return min((id for id, call in self._calls.items() if call.op.changes), default=0)

    def _sleep(self, seconds: float) -> None:
        if not self._closing:
            self._silence.expect(seconds)
            select.select([self._wake], [], [], seconds)
            self._wake.clear()

    def _forked(self) -> None:
        """Close the connection in a forked child, so that it ends when the parent closes it."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.close()


class CoordinationStore(StoreClient, CompatibleVerbs):
    """The client with the verbs of ranks."""


class _Call:
    """A pending request. `id` is 0 until it is sent; no thread waits for the answer to an `abandoned` one."""

    def __init__(self, op: Op, fields: tuple[bytes, ...]) -> None:
        self.id = 0
        self.op = op
        self.fields = fields
        self.answer: Frame | None = None
        self.cancelled = False
        self.abandoned = False
        self.done = threading.Event()

    def frame(self, floor: int) -> bytes:
        fields = self.fields
        if self.op.changes:
            fields = (*fields[:2], pack_number(floor), *fields[2:])
        return encode(self.op, self.id, *fields)


def _call_of(call: VerbCall) -> _Call:
    op, names, values, _, _, guard = call
    fields = (*map(str.encode, names), *values)
    return _Call(op, fields if op.reads else (guard.key.encode(), guard.value.encode(), *fields))


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._forked()


os.register_at_fork(after_in_child=_after_fork)
