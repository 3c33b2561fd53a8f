"""Client of the coordination store without a thread of its own: thousands of them fit into a process."""

import select
import socket
import time
from collections import Counter
from datetime import timedelta
from itertools import count

from inprocess.coordination.client import StoreClient, _Call
from inprocess.coordination.frame_stream import ClientConnection
from inprocess.coordination.rank_verbs import RankVerbs
from inprocess.coordination.verbs import Guard
from inprocess.coordination.wire import Access, Frame, FrameReader, Op, encode
from inprocess.exception import StaleViewError, StoreError, StoreTimeoutError
from inprocess.ipc.proofs import fresh_nonce

_RECEIVE = 1 << 16
_CONNECT_S = 300.0


class SimulatedClient(StoreClient, RankVerbs):
    """Client that sends the frames of a `StoreClient` for the same calls, from the calling thread. For one thread.

    `sent` counts the frames by operation, `bytes_received` what came back. PING goes along when it is due, while a
    request waits or with the next one.
    """

    def __init__(self, access: Access, *, ping_s: float) -> None:
        self.access = access
        self.failure = None
        self.sent: Counter[Op] = Counter()
        self.bytes_received = 0
        self._timeout = timedelta(seconds=_CONNECT_S)
        self._ids = count(1)
        self._ping_s = ping_s
        self._begun: dict[tuple[Op, tuple[bytes, ...]], _Call] = {}
        self._answers: dict[int, Frame] = {}
        self._reader = FrameReader()
        self._link = _connect(access)
        self._ping_at = time.monotonic() + ping_s

    def begin_wait(self, key: str, guard: Guard) -> None:
        """Request a key as `get` does, without waiting: the next `get` or `wait` for it uses this request."""
        fields = (guard.key.encode(), guard.value.encode(), key.encode())
        self._begun[Op.GET, fields] = self._begin(Op.GET, fields)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._link.close()

    def _begin(self, op: Op, fields: tuple[bytes, ...]) -> _Call:
        call = _Call(op, fields)
        call.id = next(self._ids)
        self._transmit(op, call.frame(call.id))
        return call

    def _transmit(self, op: Op, frame: bytes) -> None:
        self.sent[op] += 1
        self._link.sendall(frame)

    def _ask(self, op: Op, *fields: bytes, timeout: timedelta | None = None, label: str = "") -> tuple[bytes, ...]:
        self._ping_if_due()
        call = self._begun.pop((op, fields), None) or self._begin(op, fields)
        seconds = (self._timeout if timeout is None else timeout).total_seconds() if op.waits else _CONNECT_S
        answer = self._answer(call, time.monotonic() + seconds)
        if answer is None:
            answer = self._give_up_wait(call, label)
        if answer.op is Op.OK:
            return answer.fields
        text = b" ".join(answer.fields).decode(errors="replace")
        raise StaleViewError(text) if answer.op is Op.STALE else StoreError(f"{answer.op.name}: {text}")

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
            if not _readable(self._link, min(deadline, max(self._ping_at, now)) - now):
                self._ping_if_due()
                continue
            data = self._link.recv(_RECEIVE)
            if not data:
                raise StoreError("the server closed the connection")
            self.bytes_received += len(data)
            self._ping_at = time.monotonic() + self._ping_s
            self._reader.feed(data)
            self._answers.update((frame.id, frame) for frame in self._reader.frames() if frame.id)
        return self._answers.pop(call.id)

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


def _readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds + 1))
