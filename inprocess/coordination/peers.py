"""The server's end of a connection: what came in, what still has to go out."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator

from inprocess.coordination.connection import Purpose, tune
from inprocess.coordination.waiters import Waiter
from inprocess.coordination.wire import MAX_GREETING, Frame, FrameReader, WireError

__all__ = ["Peer"]

_RECEIVE = 1 << 16
_MAX_BACKLOG = 256 << 20  # bytes that a peer has not taken; one that does not read must not fill our memory


class Peer:
    """One accepted connection, non-blocking, in the thread of the server.

    `client` and `purpose` are known once it has introduced itself; until then only a small frame is accepted. While
    `waiter` is set the peer owes us silence: it has asked something and waits.
    """

    def __init__(
        self, sock: socket.socket, name: str, selector: selectors.BaseSelector, reader: FrameReader | None = None
    ) -> None:
        self.socket = sock
        self.name = name
        self.reader = reader or FrameReader(MAX_GREETING)
        self.client: bytes | None = None
        self.purpose: Purpose | None = None
        self.accepted = False
        self.waiter: Waiter | None = None
        self.closed = False
        self._selector = selector
        self._out = bytearray()
        self._close_when_sent = False
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # it may be gone already, which the first read will tell
            tune(sock)
        selector.register(sock, selectors.EVENT_READ, self)

    def frames(self) -> Iterator[Frame]:
        """Read what is there and yield the complete frames.

        ConnectionResetError when the peer has closed; WireError when what it sends is not of this protocol.
        """
        try:
            data = self.socket.recv(_RECEIVE)
        except BlockingIOError:
            return
        if not data:
            cut = f" within a frame ({self.reader.pending} bytes of it had come)" if self.reader.pending else ""
            raise WireError(f"closed{cut}") if cut else ConnectionResetError("closed")
        self.reader.feed(data)
        yield from self.reader.frames()

    def drain(self) -> Iterator[Frame]:
        """Yield the frames of all that has come so far, up to the end of the connection. WireError as in `frames`."""
        with contextlib.suppress(OSError):
            while data := self.socket.recv(_RECEIVE):
                self.reader.feed(data)
                yield from self.reader.frames()

    def send(self, frame: bytes, *, then_close: bool = False) -> None:
        """Send a frame, later if the peer is slow. OSError when that cannot be."""
        if self.closed:
            return
        self._out += frame
        self._close_when_sent |= then_close
        if len(self._out) > _MAX_BACKLOG:
            raise ConnectionAbortedError("does not read what it is sent")
        self.flush()

    def flush(self) -> None:
        """Send as much as the peer takes now. OSError when the connection is broken."""
        while self._out:
            try:
                sent = self.socket.send(memoryview(self._out)[: 1 << 20])
            except BlockingIOError:
                break
            del self._out[:sent]
        if self._close_when_sent and not self._out:
            self.close()
        elif not self.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            if self._selector.get_key(self.socket).events != events:
                self._selector.modify(self.socket, events, self)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self.socket)
            self.socket.close()
