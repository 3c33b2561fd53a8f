"""What crosses a process boundary, and the channel it crosses on.

    trainer --- Spawn + socket -------------------------▶ server
    trainer ◀-- Spawned + pidfd, Exited ----------------- server
    trainer --- Attach + memfd, Detach, Run + memfd ----▶ writer
    trainer ◀-- Ready, Event, Finished ------------------ writer

One message is one datagram on a SOCK_SEQPACKET pair: a small JSON object and at most one file descriptor (SCM_RIGHTS).
Nothing here is pickled; the pickled call itself lies in the memfd that goes with `Run`, so that a datagram stays tiny
whatever the arguments are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, get_args

__all__ = [
    "Attach",
    "Channel",
    "Detach",
    "Event",
    "Exited",
    "Finished",
    "Message",
    "Ready",
    "Run",
    "Spawn",
    "Spawned",
    "clip",
    "encode",
]

_FD_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))  # for one descriptor
MAX_MESSAGE_BYTES = 128 << 10  # below the kernel's default socket buffer (208 KB), so that a lone message always fits


@dataclass(frozen=True)
class Spawn:
    """Fork a writer that serves the socket sent along."""

    writer_id: int
    nice: int
    io_class: str | None
    io_level: int


@dataclass(frozen=True)
class Spawned:
    """The writer exists; its pidfd is sent along."""

    writer_id: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """The writer has been reaped, or could not be forked. `how`: what became of it, as the end of a sentence."""

    writer_id: int
    how: str


@dataclass(frozen=True)
class Attach:
    """Calls from now on may name this shared memory region; its memfd is sent along."""

    region_id: str
    name: str
    size: int


@dataclass(frozen=True)
class Detach:
    """No later call names this region: drop the mapping."""

    region_id: str


@dataclass(frozen=True)
class Run:
    """Run the call in the memfd sent along."""

    index: int


@dataclass(frozen=True)
class Ready:
    """The writer reads its socket from now on."""

    pid: int


@dataclass(frozen=True)
class Event:
    """The running function reports something to the trainer."""

    index: int
    event: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The call is over. `error` is empty when it returned, else the last line of `traceback`.

    It ran from `began_ns` to `ended_ns` of CLOCK_MONOTONIC, which is one for all processes of a host.
    """

    index: int
    began_ns: int
    ended_ns: int
    error: str = ""
    traceback: str = ""


Message = Spawn | Spawned | Exited | Attach | Detach | Run | Ready | Event | Finished
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """The datagram. Raises TypeError or ValueError for an `Event` that is not JSON or too large to be a message."""
    data = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(data)} bytes is larger than a message may be ({MAX_MESSAGE_BYTES} bytes)"
        )
    return data


def decode(data: bytes) -> Message:
    fields = json.loads(data)
    message: Message = _KINDS[fields.pop("kind")](**fields)
    return message


def clip(text: str, limit_bytes: int) -> str:
    """`text`, with its middle left out where its JSON form would be longer than `limit_bytes`."""
    while (length := len(json.dumps(text))) > limit_bytes:
        keep = len(text) * (limit_bytes - 32) // length // 2
        text = text[:keep] + "\n[... cut ...]\n" + text[-keep:]
    return text


class Channel:
    """One end of a message socket. Sending never blocks: what the socket does not take waits in an outbox until
    `flush`.

    A dead peer is seen in one place only, `receive`; sending to it is silently useless. Not thread-safe.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of `sock`."""
        sock.setblocking(False)
        self._socket = sock
        self._outbox: deque[tuple[bytes, int | None]] = deque()

    def fileno(self) -> int:
        """-1 after `close`."""
        return self._socket.fileno()

    @property
    def poll_events(self) -> int:
        """What to poll `fileno` for."""
        return select.POLLIN | (select.POLLOUT if self._outbox else 0)

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send in order. The caller keeps its `fd` and may close it at once."""
        data = encode(message)
        if self._outbox or not self._try_send(data, fd):
            self._outbox.append((data, None if fd is None else os.dup(fd)))

    def flush(self) -> None:
        """Send as much of the outbox as the socket takes now."""
        while self._outbox and self._try_send(*self._outbox[0]):
            _close(self._outbox.popleft()[1])

    def receive(self) -> tuple[Message, int | None] | None:
        """The next message and the descriptor it carries, now the caller's.

        Raises BlockingIOError when there is none yet; None when the peer is gone and everything it had sent has been
        received.
        """
        while True:
            try:
                data, extra, _, _ = self._socket.recvmsg(MAX_MESSAGE_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                continue  # said once when the peer died with unread messages; what it had sent is still to be read
            fd = struct.unpack("i", extra[0][2])[0] if extra else None  # recv_fds() would lose the flag
            return (decode(data), fd) if data else None

    @property
    def peer_gone(self) -> bool:
        """Whether the other end is closed or its process dead; what it had sent may still be to be received."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))

    def end_sending(self) -> None:
        """The peer sees the end after what the socket took so far; it can still answer."""
        self.flush()
        self._drop_outbox()
        with contextlib.suppress(OSError):  # the peer is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Idempotent; drops the outbox."""
        self._socket.close()
        self._drop_outbox()

    def _drop_outbox(self) -> None:
        while self._outbox:
            _close(self._outbox.popleft()[1])

    def _try_send(self, data: bytes, fd: int | None) -> bool:
        try:
            socket.send_fds(self._socket, [data], [] if fd is None else [fd])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # the kernel's limit of descriptors in flight
                return False
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
        return True


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
