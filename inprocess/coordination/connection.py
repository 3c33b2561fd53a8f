"""One end of a connection between client and server: frames over a socket, and the time without a sign of life."""

from __future__ import annotations

import contextlib
import socket
import time

from inprocess.coordination.wire import Frame, FrameReader

__all__ = ["FrameStream", "Silence"]

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
