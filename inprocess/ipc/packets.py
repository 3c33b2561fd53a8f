"""Messages between the processes of one host: frozen dataclasses as JSON, in packets of SOCK_SEQPACKET sockets.

    packet := [name of the dataclass, {field: value}]      and up to four file descriptors (SCM_RIGHTS)

A packet is one message: it arrives whole or not at all, so no length can be wrong and no message can be cut. Each
protocol is a `Codec`, a set of dataclasses; a packet that is not a message of that set is refused with `PacketError`.
Nothing is unpickled or executed.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import select
import socket
import types
import typing
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from inprocess.ipc.forks import Origin, in_forked_children
from inprocess.ipc.uncopied import Uncopied

MAX_BYTES = 128 << 10  # below the kernel's default socket buffer (208 KB), so that a lone packet always fits
_MAX_FDS = 4
_FD_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)

M = TypeVar("M")


class PacketError(ValueError):
    """A packet is not a message of this protocol, or a message cannot be sent as a packet."""


class Codec(Generic[M]):
    """The messages of one protocol: dataclasses with distinct names.

    Fields are int, float, bool, str, None, `Any` (whatever JSON holds), dicts and lists of JSON values, tuples of
    these, other dataclasses of these, and unions of them. `decode` checks every field against its annotation.
    """

    def __init__(self, *kinds: type[M]) -> None:
        self._kinds: dict[str, Callable[[Any], M]] = {kind.__name__: _reader(kind) for kind in kinds}

    def encode(self, message: M) -> bytes:
        """Return the packet. PacketError if the message is not JSON or larger than `MAX_BYTES`."""
        name = type(message).__name__
        try:
            packet = json.dumps([name, asdict(message)]).encode()  # type: ignore[call-overload]
        except (TypeError, ValueError, RecursionError) as error:
            raise PacketError(f"{name} cannot be sent as JSON: {error}") from error
        if len(packet) > MAX_BYTES:
            raise PacketError(f"{name} has {len(packet)} bytes; the limit of a message is {MAX_BYTES} bytes")
        return packet

    def decode(self, packet: bytes) -> M:
        """Return the message of a packet. PacketError if it is not one of this protocol."""
        try:
            name, values = json.loads(packet)
            return self._kinds[name](values)
        except PacketError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PacketError(f"not a message of this protocol: {packet[:80]!r}") from error


@dataclass(frozen=True, slots=True)
class Packet(Generic[M]):
    """A received message with its file descriptors, which the receiver closes."""

    message: M
    fds: tuple[int, ...] = ()

    def close_fds(self) -> None:
        """Close the descriptors. Call it once."""
        _close_all(self.fds)


def send(sock: socket.socket, codec: Codec[M], message: M, fds: tuple[int, ...] = ()) -> None:
    """Send one packet; the socket's timeout applies. OSError, PacketError. The caller keeps its descriptors."""
    _send_packet(sock, codec.encode(message), fds)


def receive(sock: socket.socket, codec: Codec[M]) -> Packet[M]:
    """Receive one packet; the socket's timeout applies. EOFError at the end, PacketError, OSError."""
    data, extra, flags, _ = sock.recvmsg(MAX_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)  # recv_fds() drops the flag
    fds = tuple(fd for level, kind, part in extra if (level, kind) == _RIGHTS for fd in array.array("i", part))
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise PacketError(f"a packet of more than {MAX_BYTES} bytes or {_MAX_FDS} descriptors")
        if not data:
            raise EOFError("the other end closed the connection")
        return Packet(codec.decode(data), fds)
    except BaseException:
        _close_all(fds)
        raise


class Channel(Uncopied, Generic[M]):
    """One end of a non-blocking packet connection. Neither side ever waits until the other reads.

    `send` keeps what the socket does not accept in an outbox; `try_send` drops it. A closed connection is reported only
    by `receive`. `try_send` may be called from any thread, everything else from one thread. In a fork of the process
    that made it, the channel is closed: nothing is sent, and the connection of the parent stays as it is.
    """

    def __init__(self, sock: socket.socket, codec: Codec[M]) -> None:
        """Take ownership of `sock`."""
        sock.setblocking(False)
        self._socket = sock
        self._codec = codec
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._origin = Origin()
        in_forked_children(self.close)

    @classmethod
    def pair(cls, codec: Codec[M]) -> tuple[Channel[M], socket.socket]:
        """Return this process's end, and the socket that a child process inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, codec), theirs

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 after `close`."""
        return self._socket.fileno()

    @property
    def poll_events(self) -> int:
        """The events to poll `fileno` for."""
        return select.POLLIN | (select.POLLOUT if self._outbox else 0)

    def send(self, message: M, *fds: int) -> None:
        """Send in order, later if the socket is full. The caller keeps its descriptors and may close them at once.

        PacketError for a message that cannot be sent. A closed connection is not an error here.
        """
        data = self._codec.encode(message)
        if not self._origin.is_here:
            return
        if self._outbox or not self._try_send(data, fds):
            self._outbox.append((data, tuple(os.dup(fd) for fd in fds)))

    def try_send(self, message: M) -> bool:
        """Send at once or not at all. False if the connection is closed, or the socket is full."""
        data = self._codec.encode(message)
        if not self._origin.is_here:
            return False
        try:
            _send_packet(self._socket, data, ())
        except OSError:
            return False
        return True

    def flush(self) -> None:
        """Send as much of the outbox as the socket accepts now."""
        while self._origin.is_here and self._outbox and self._try_send(*self._outbox[0]):
            _close_all(self._outbox.popleft()[1])

    def receive(self) -> Packet[M] | None:
        """Return the next packet; None if there is none yet.

        EOFError if the connection is closed and everything sent before has been received. PacketError.
        """
        while True:
            if not self._origin.is_here:
                raise EOFError(f"the connection belongs to process {self._origin.pid}; this is a fork of it")
            try:
                return receive(self._socket, self._codec)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # reported once if the peer died with unread messages; what it has sent can still be read
            except OSError as error:
                raise EOFError(f"the connection is broken: {error}") from error

    @property
    def peer_gone(self) -> bool:
        """Whether the other end is closed, or its process dead. There may still be messages to receive."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))

    def end_sending(self) -> None:
        """Close the sending direction and drop the outbox. The peer still gets what was sent, and can answer."""
        self.flush()
        self._drop_outbox()
        if self._origin.is_here:  # a fork has a copy of the descriptor, and would end the connection of its parent
            with contextlib.suppress(OSError):  # the connection is closed already
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end and drop the outbox. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()
        self._drop_outbox()

    def _drop_outbox(self) -> None:
        while self._outbox:
            _close_all(self._outbox.popleft()[1])

    def _try_send(self, data: bytes, fds: tuple[int, ...]) -> bool:
        try:
            _send_packet(self._socket, data, fds)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # the kernel's limit of descriptors in flight
                return False
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
        return True


def _send_packet(sock: socket.socket, data: bytes, fds: tuple[int, ...]) -> None:
    if fds:
        socket.send_fds(sock, [data], fds, socket.MSG_NOSIGNAL)
    else:
        sock.send(data, socket.MSG_NOSIGNAL)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


# -- fields of dataclasses ---------------------------------------------------------------------------------------------


def _reader(annotation: Any) -> Callable[[Any], Any]:
    """Return a function that checks a JSON value against an annotation and returns it as that type."""
    if is_dataclass(annotation):
        return _dataclass_reader(typing.cast("type", annotation))
    if annotation is Any:
        return lambda value: value
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union_reader([_reader(option) for option in typing.get_args(annotation)])
    if origin is tuple:
        return _tuple_reader(typing.get_args(annotation))
    accepted: tuple[type, ...] = (int, float) if annotation is float else (origin or annotation,)

    def read(value: Any) -> Any:
        if type(value) not in accepted:
            raise PacketError(f"a {type(value).__name__} where {annotation} is expected")
        return value

    return read


def _union_reader(options: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for option in options[:-1]:
            with contextlib.suppress(PacketError):
                return option(value)
        return options[-1](value)

    return read


def _tuple_reader(items: tuple[Any, ...]) -> Callable[[Any], Any]:
    is_open = items[-1:] == (Ellipsis,)
    readers = [_reader(item) for item in items if item is not Ellipsis]

    def read(value: Any) -> Any:
        if type(value) is not list or not (is_open or len(value) == len(readers)):
            raise PacketError(f"not a tuple of {items}")
        each = readers * len(value) if is_open else readers
        return tuple(reader(item) for reader, item in zip(each, value, strict=True))

    return read


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}

    def read(values: Any) -> Any:
        if not isinstance(values, dict) or values.keys() != readers.keys():
            raise PacketError(f"not the fields of {kind.__name__}: {str(values)[:80]}")
        try:
            return kind(**{name: reader(values[name]) for name, reader in readers.items()})
        except PacketError as error:
            raise PacketError(f"{kind.__name__}: {error}") from None

    return read
