"""One end of a connection between client and server: frames over a socket."""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import time
from typing import TYPE_CHECKING

from inprocess.coordination.wire import (
    MAX_BODY,
    MAX_GREETING,
    PROTOCOL,
    Access,
    Frame,
    FrameReader,
    Op,
    WireError,
    encode,
    encode_packed,
    proof,
)
from inprocess.ipc.proofs import fresh_nonce

if TYPE_CHECKING:
    from inprocess.coordination.contents import Answer, Waiter

_RECEIVE = 1 << 16
_SEND = 1 << 20
_MOST_UNSENT = 64 << 20  # bytes queued for a client: one that does not read must not fill the memory
_CLOSED = "the other end closed the connection"


class FrameStream:
    """Frames over a connected TCP socket, at most `limit` bytes each. It does not close the socket.

    Every failure is an OSError, or a WireError if invalid data were received.
    """

    __slots__ = ("_socket", "reader", "unsent")  # thousands of them are looked at in turn

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self.reader = FrameReader(limit)
        self.unsent = bytearray()
        self._socket = sock
        with contextlib.suppress(OSError):  # a connection that is closed already is reported by the first read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame; if the other end is slow, the rest is sent by a later `flush`."""
        self.queue(frame)
        self.flush()

    def queue(self, frame: bytes) -> None:
        """Let the next `flush` send a frame."""
        self.unsent += frame

    def flush(self) -> None:
        """Send as much as the other end accepts now."""
        while self.unsent:
            try:
                sent = self._socket.send(self.unsent if len(self.unsent) <= _SEND else memoryview(self.unsent)[:_SEND])
            except BlockingIOError:
                return
            del self.unsent[:sent]

    def receive(self) -> list[Frame]:
        """Receive once; return all frames that are complete. ConnectionResetError if the connection was closed."""
        try:
            data = self._socket.recv(_RECEIVE)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError(_CLOSED)
        return self.reader.take(data)

    def fill(self) -> None:
        """Receive once, blocking if the socket is."""
        data = self._socket.recv(_RECEIVE)
        if not data:
            raise ConnectionResetError(_CLOSED)
        self.reader.feed(data)


class RefusedError(Exception):
    """The server does not accept this client, and will not later."""


class ClientConnection(FrameStream):
    """The client's end of a connection, in its thread."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, MAX_BODY)

    def greet(self, access: Access, client: bytes, deadline: float) -> None:
        """Authenticate both ends to each other: client and server of the same job. OSError, RefusedError."""
        challenge = self._next(deadline)
        if challenge.op is not Op.CHALLENGE or len(challenge.fields) != 2 or challenge.fields[0] != PROTOCOL:
            raise RefusedError("is not a server of this protocol and version")
        theirs, ours = challenge.fields[1], fresh_nonce()
        self._socket.sendall(encode(Op.HELLO, 0, client, ours, proof(access, b"client", theirs, ours, client)))
        answer = self._next(deadline)
        expected = proof(access, b"server", ours, theirs)
        if answer.op is Op.REFUSED:
            raise RefusedError("serves another job: the secret or the name of the job differs")
        if answer.op is not Op.WELCOME or not hmac.compare_digest(b"".join(answer.fields), expected):
            raise RefusedError("does not know the secret of this job")
        self._socket.setblocking(False)

    def _next(self, deadline: float) -> Frame:
        while True:
            for frame in self.reader.frames():
                return frame
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self.fill()


class ServerConnection(FrameStream):
    """The server's end of a connection, non-blocking, in its thread.

    `client` is set once it is authenticated; until then only a small frame is accepted. Frames are queued, and sent
    when the server flushes the connections in `to_send`: one call of the system for all answers of a turn.
    """

    __slots__ = (
        "_awaits_room",
        "_epoll",
        "_fd",
        "_to_send",
        "attends",
        "client",
        "closed",
        "heard_at",
        "name",
        "nonce",
        "waiting",
    )

    def __init__(self, sock: socket.socket, name: str, epoll: select.epoll, to_send: list[ServerConnection]) -> None:
        super().__init__(sock, MAX_GREETING)
        self.name = name
        self.nonce = fresh_nonce()
        self.client: bytes | None = None
        self.waiting: dict[int, Waiter[ServerConnection]] = {}
        self.attends: dict[tuple[bytes, bytes], None] = {}  # sets, and its members there
        self.heard_at = time.monotonic()
        self.closed = False
        self._fd = sock.fileno()
        self._epoll = epoll
        self._to_send = to_send
        self._awaits_room = False
        sock.setblocking(False)
        epoll.register(self._fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor, also after `close`."""
        return self._fd

    def answer(self, id: int, answer: Answer) -> None:
        """Queue the answer to a request."""
        try:
            self.queue(encode_packed(answer[0], id, answer[1]))
        except WireError as error:  # values that are too large together
            self.queue(encode(Op.FAILED, id, str(error).encode()))

    def queue(self, frame: bytes) -> None:
        """Queue a frame. A connection whose client does not read what it is sent breaks."""
        if self.closed:
            return
        if not self.unsent:
            self._to_send.append(self)
        self.unsent += frame
        if len(self.unsent) > _SEND:
            self.flush()

    def flush(self) -> None:
        if self.closed:
            return
        super().flush()
        if not self.unsent and not self._awaits_room:
            return
        if len(self.unsent) > _MOST_UNSENT:
            raise ConnectionAbortedError("the client does not read what it is sent")
        if self._awaits_room != bool(self.unsent):
            self._awaits_room = bool(self.unsent)
            self._epoll.modify(self._fd, select.EPOLLIN | (select.EPOLLOUT if self.unsent else 0))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self.closed:
            self.closed = True
            self.unsent.clear()
            self._epoll.unregister(self._fd)
            self._socket.close()
