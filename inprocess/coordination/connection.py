"""One end of a connection between client and server: frames over a socket, and the time without a sign of life."""

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
    fresh_nonce,
    proof,
)

__all__ = ["ClientConnection", "FrameStream", "RefusedError", "Silence"]

_RECEIVE = 1 << 16
_SEND = 1 << 20


class FrameStream:
    """A connected TCP socket, and frames of at most `limit` bytes each way. It does not close the socket.

    Every failure is an OSError, or a WireError of what came.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self.reader = FrameReader(limit)
        self.unsent = bytearray()
        self._socket = sock
        with contextlib.suppress(OSError):  # it may be gone already, which the first read will tell
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame, the rest of it with a later `flush` if the other end is slow."""
        self.unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send as much as the other end takes now."""
        while self.unsent:
            try:
                sent = self._socket.send(memoryview(self.unsent)[:_SEND])
            except BlockingIOError:
                return
            del self.unsent[:sent]

    def receive(self) -> list[Frame]:
        """Return the complete frames, with what is there now. ConnectionResetError at the end of the connection."""
        try:
            self.fill()
        except BlockingIOError:
            return []
        return list(self.reader.frames())

    def fill(self) -> None:
        """Receive once, as the socket is: blocking or not."""
        data = self._socket.recv(_RECEIVE)
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        self.reader.feed(data)


_DELAY_S = 0.25  # by which a busy machine may delay a look


class RefusedError(Exception):
    """The server does not accept this client, and never will."""


class ClientConnection(FrameStream):
    """The client's end of a connection, in its thread."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, MAX_BODY)

    def greet(self, access: Access, client: bytes, deadline: float) -> None:
        """Prove that this is a client of the job, and have the server prove the same. OSError; RefusedError."""
        challenge = self._next(deadline)
        if challenge.op is not Op.CHALLENGE or len(challenge.fields) != 2 or challenge.fields[0] != PROTOCOL:
            raise RefusedError("is no server of this protocol and version")
        theirs, ours = challenge.fields[1], fresh_nonce()
        self._socket.sendall(encode(Op.HELLO, 0, client, ours, proof(access, b"client", theirs, ours, client)))
        answer = self._next(deadline)
        expected = proof(access, b"server", ours, theirs)
        if answer.op is Op.REFUSED:
            raise RefusedError("serves another job: the secret or the name of the job is not that of this one")
        if answer.op is not Op.WELCOME or not hmac.compare_digest(b"".join(answer.fields), expected):
            raise RefusedError("does not know the secret of this job")
        self._socket.setblocking(False)

    def _next(self, deadline: float) -> Frame:
        while True:
            for frame in self.reader.frames():
                return frame
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self.fill()


class Silence:
    """For how long nothing was heard, of the time in which somebody listened.

    A process that was stopped, or whose interpreter was held by others, has heard nothing meanwhile; that says nothing
    about the server.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked_at = time.monotonic()
        self._expected_s = 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, self._expected_s + _DELAY_S)
        self._looked_at, self._expected_s = now, 0.0
        return self._seconds

    def expect(self, seconds: float) -> None:
        """The next look will be so much later."""
        self.seconds()
        self._expected_s = seconds

    def end(self) -> None:
        """Something was heard."""
        self._seconds, self._looked_at = 0.0, time.monotonic()
