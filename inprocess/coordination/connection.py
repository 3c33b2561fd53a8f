"""One blocking connection to a server: dialling, the greeting, and one request at a time."""

from __future__ import annotations

import contextlib
import enum
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inprocess.coordination.wire import (
    MAX_BODY,
    PROTOCOL,
    Frame,
    FrameReader,
    Host,
    Op,
    WireError,
    encode,
)

__all__ = ["SILENCE_S", "Connection", "Greeting", "Purpose", "Refused", "tune"]

SILENCE_S = 1.0  # a server that says nothing for so long while it is greeted counts as dead
_DEAD_NODE_MS = 5000  # unacknowledged data: the other node is gone
_RECEIVE = 1 << 16


class Purpose(enum.Enum):
    """What a connection is for."""

    CLIENT = b"client"
    MIRROR = b"mirror"
    PROBE = b"probe"


@dataclass(frozen=True)
class Greeting:
    """How a connection introduces itself."""

    session: str
    client: bytes
    purpose: Purpose
    earlier: tuple[Host, ...] = ()

    def frame(self) -> bytes:
        hosts = (str(host).encode() for host in self.earlier)
        return encode(Op.HELLO, PROTOCOL, self.session.encode(), self.client, self.purpose.value, *hosts)


class Refused(OSError):
    """A server answered the greeting, but does not serve us; `why` is its answer."""

    def __init__(self, host: Host, why: Op) -> None:
        super().__init__(f"{_name(host)} {_REFUSALS.get(why, why.name)}")
        self.why = why


def tune(sock: socket.socket) -> None:
    """Small requests go out at once, and a dead node is noticed within a few seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_NODE_MS)


class Connection:
    """A connection to one host, used by one thread at a time. Every failure of it is an OSError.

    `owner` is the thread (its ident) that uses it now; None: it is idle.
    """

    def __init__(self, host: Host, silence: float = SILENCE_S) -> None:
        """Dial. OSError if nobody listens there, or nobody answers within `silence` seconds."""
        self.host = host
        self.owner: int | None = None
        self.embedded = False  # whether the server lives in a rank process
        self._reader = FrameReader(MAX_BODY)
        self._frames: list[Frame] = []
        self._silence = silence
        self._socket = _dial(host, silence)

    @property
    def socket(self) -> socket.socket:
        return self._socket

    @property
    def reader(self) -> FrameReader:
        """What was received and not yet asked for, when the socket is handed to somebody else."""
        return self._reader

    def greet(self, greeting: Greeting) -> None:
        """Introduce this connection and wait until the server accepts it. OSError, or `Refused`, if it does not."""
        answer = self.ask(greeting.frame(), self._silence)
        if answer.op is Op.CHECKING and greeting.purpose is Purpose.CLIENT:
            # It is alive, and may have to wait for the silence of each earlier host, twice: dialling and greeting.
            answer = self.receive(2 * self._silence * (len(greeting.earlier) + 1))
        if answer.op is Op.ACCEPTED:
            self.embedded = answer.fields == (b"\x01",)
            return
        raise Refused(self.host, answer.op)

    def ask(self, frame: bytes, patience: float) -> Frame:
        """Send one request and return its answer. OSError if none comes within `patience` seconds."""
        self.send([frame], patience)
        return self.receive(patience)

    def send(self, frames: Iterable[bytes], patience: float) -> None:
        """Send frames without waiting for answers."""
        self._socket.settimeout(max(patience, 0.001))
        for frame in frames:
            self._socket.sendall(frame)

    def receive(self, patience: float) -> Frame:
        """Return the next frame from the server."""
        deadline = time.monotonic() + patience
        while not self._frames:
            left = deadline - time.monotonic()
            self._socket.settimeout(max(left, 0.001))
            data = self._socket.recv(_RECEIVE)
            if not data:
                raise ConnectionResetError(f"{_name(self.host)} closed the connection")
            try:
                self._reader.feed(data)
                self._frames.extend(self._reader.frames())
            except WireError as error:
                raise ConnectionAbortedError(f"{_name(self.host)}: {error}") from error
        return self._frames.pop(0)

    def unread(self) -> Sequence[Frame]:
        """Return the frames that came, and nobody has asked for."""
        frames, self._frames = self._frames, []
        return frames

    def watch(self) -> None:
        """Block until the connection ends, however long that takes; then OSError."""
        self.send([encode(Op.WATCH)], self._silence)
        self._socket.settimeout(None)
        self._socket.recv(1)
        raise ConnectionResetError(f"{_name(self.host)} closed the connection")

    def close(self) -> None:
        """Close the socket; a thread that is in `receive` or `watch` gets an OSError. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake it
        with contextlib.suppress(OSError):
            self._socket.close()


_REFUSALS = {
    Op.CHECKING: "looks whether an earlier host lives",
    Op.NOT_ACTIVE: "stands by, because an earlier host lives",
    Op.OTHER_SESSION: "serves another session",
    Op.SUPERSEDED: "has been replaced by a later host",
}


def _name(host: Host) -> str:
    return f"{host.name}:{host.port}"


def _dial(host: Host, patience: float) -> socket.socket:
    sock = socket.create_connection((host.name, host.port), patience)
    try:
        if sock.getsockname() == sock.getpeername():
            # Dialling a free ephemeral port of this machine can end in a connection with itself.
            raise ConnectionRefusedError(f"nobody listens at {_name(host)}")
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock
