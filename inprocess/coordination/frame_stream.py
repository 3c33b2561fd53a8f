"""One end of a connection between client and server: frames over a socket."""

from __future__ import annotations

import contextlib
import hmac
import socket
import time

from inprocess.coordination.wire import (
    MAX_BODY,
    PROTOCOL,
    Access,
    Frame,
    FrameReader,
    Op,
    encode,
    proof,
)
from inprocess.ipc.proofs import fresh_nonce

_RECEIVE = 1 << 16
_SEND = 1 << 20
_CLOSED = "the other end closed the connection"


class FrameStream:
    """Frames over a connected TCP socket, at most `limit` bytes each. It does not close the socket.

    Every failure is an OSError, or a WireError if invalid data were received.
    """

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
        if not self.unsent:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return
            frame = frame[sent:]
        self.unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send as much as the other end accepts now."""
        while self.unsent:
            try:
                sent = self._socket.send(memoryview(self.unsent)[:_SEND])
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
        self.reader.feed(data)
        return list(self.reader.frames())

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
