"""Frames over a socket: what both ends of a connection do with it. For one thread."""

from __future__ import annotations

import contextlib
import socket

from inprocess.coordination.wire import Frame, FrameReader

__all__ = ["FrameStream"]

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
