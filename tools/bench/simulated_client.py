"""Client of the coordination store without a thread of its own: thousands of them fit into a process."""

import queue
import select
import socket
import threading
import time
from collections import Counter
from datetime import timedelta
from itertools import count

from inprocess.coordination.client import StoreClient, _Call
from inprocess.coordination.frame_stream import ClientConnection
from inprocess.coordination.rank_verbs import RankVerbs
from inprocess.coordination.verbs import Guard
from inprocess.coordination.wire import Access, Frame, FrameReader, Op, encode
from inprocess.exception import StoreError, StoreTimeoutError
from inprocess.ipc.proofs import fresh_nonce

_RECEIVE = 1 << 16
_CONNECT_S = 300.0


class Receiver:
    """Receives for all clients of a process, in one thread, from `register` to `close`.

    So that an answer does not wake a thread up at the expense of the server, which is on another machine in a real job.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._clients: dict[int, SimulatedClient] = {}
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    def register(self, client: "SimulatedClient", link: socket.socket) -> None:
        """Pass what comes over this connection to its client."""
        self._clients[link.fileno()] = client
        self._epoll.register(link, select.EPOLLIN)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if not self._clients[descriptor].receive():
                    self._epoll.unregister(descriptor)


class SimulatedClient(StoreClient, RankVerbs):
    """Client that sends the frames of a `StoreClient` for the same calls, from the calling thread. For one thread.

    `sent` counts the frames by operation, `bytes_received` what came back. PING goes along when it is due, while a
    request waits or with the next one.
    """

    def __init__(self, access: Access, receiver: Receiver, *, ping_s: float) -> None:
        self.access = access
        self.failure = None
        self.sent: Counter[Op] = Counter()
        self.bytes_received = 0
        self._timeout = timedelta(seconds=_CONNECT_S)
        self._ids = count(1)
        self._ping_s = ping_s
        self._begun: dict[tuple[Op, tuple[bytes, ...]], _Call] = {}
        self._answers: dict[int, Frame] = {}
        self._received: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()  # None: the connection is closed
        self._reader = FrameReader()
        self._link = _connect(access)
        self._ping_at = time.monotonic() + ping_s
        receiver.register(self, self._link)

    def begin_wait(self, key: str, guard: Guard) -> None:
        """Request a key as `get` does, without waiting: the next `get` or `wait` for it uses this request."""
        fields = (guard.key.encode(), guard.value.encode(), key.encode())
        call = self._begun[Op.GET, fields] = _Call(Op.GET, fields)
        self._begin(call)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._link.close()

    def _begin(self, *calls: _Call) -> None:
        for call in calls:
            call.id = next(self._ids)
            self.sent[call.op] += 1
        self._link.sendall(b"".join(call.frame(call.id) for call in calls))

    def _transmit(self, op: Op, frame: bytes) -> None:
        self.sent[op] += 1
        self._link.sendall(frame)

    def _ask(self, *calls: _Call, timeout: timedelta | None = None, label: str = "") -> list[tuple[bytes, ...]]:
        self._ping_if_due()
        begun = [self._begun.pop((call.op, call.fields), call) for call in calls]
        self._begin(*[call for call in begun if not call.id])
        return [self._fields(call) for call in [self._answered(call, timeout, label) for call in begun]]

    def _answered(self, call: _Call, timeout: timedelta | None, label: str) -> _Call:
        seconds = (self._timeout if timeout is None else timeout).total_seconds() if call.op.waits else _CONNECT_S
        call.answer = self._answer(call, time.monotonic() + seconds) or self._give_up_wait(call, label)
        return call

    def _give_up_wait(self, call: _Call, label: str) -> Frame:
        self._transmit(Op.CANCEL, encode(Op.CANCEL, call.id))
        answer = self._answer(call, time.monotonic() + _CONNECT_S)
        if answer is None or answer.op is Op.CANCELLED:
            raise StoreTimeoutError(label)
        return answer

    def _answer(self, call: _Call, deadline: float) -> Frame | None:
        """Return the answer, None if there is none in time."""
        while call.id not in self._answers:
            now = time.monotonic()
            if now >= deadline:
                return None
            try:
                frame = self._received.get(timeout=max(0.001, min(deadline, self._ping_at) - now))
            except queue.Empty:
                self._ping_if_due()
                continue
            if frame is None:
                raise StoreError("the server closed the connection")
            self._ping_at = time.monotonic() + self._ping_s
            self._answers[frame.id] = frame
        return self._answers.pop(call.id)

    def receive(self) -> bool:
        """Receive once, in the thread of the receiver; return whether the connection is open."""
        try:
            data = self._link.recv(_RECEIVE)
        except OSError:
            data = b""
        self.bytes_received += len(data)
        self._reader.feed(data)
        for frame in self._reader.frames():
            if frame.id:
                self._received.put(frame)
        if not data:
            self._received.put(None)
        return bool(data)

    def _ping_if_due(self) -> None:
        if time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + self._ping_s
            self._transmit(Op.PING, encode(Op.PING))


def _connect(access: Access) -> socket.socket:
    """Connect, with retries: of thousands of clients at once the server drops those with a slow handshake."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        sock = socket.create_connection((access.host, access.port), _CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            ClientConnection(sock).greet(access, fresh_nonce(), deadline)
        except OSError:
            sock.close()
            if time.monotonic() >= deadline:
                raise
            continue
        sock.setblocking(True)
        return sock
