"""What goes over a connection: length-prefixed frames of an operation and byte strings.

    frame   := length of the body (4 bytes, big-endian) body
    body    := operation (1 byte) field*
    field   := length (4 bytes) bytes

Nothing on the wire is ever executed or unpickled. Numbers are 8 byte big-endian fields, durations are milliseconds.
"""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "HOSTS_KEY",
    "MAX_BODY",
    "MAX_CHANGE",
    "MAX_GREETING",
    "PROTOCOL",
    "Frame",
    "FrameReader",
    "Host",
    "Op",
    "WireError",
    "decode_body",
    "encode",
    "body_of",
    "number",
    "pack_number",
    "parse_hosts",
]

PROTOCOL = b"inprocess store 1"
MAX_BODY = 64 << 20  # of one frame; the store is for coordination, not for tensors
MAX_CHANGE = 32 << 20  # of the fields of a change, and of a value: it must fit into the frames of a mirror, too
MAX_GREETING = 64 << 10  # before a connection has introduced itself
HOSTS_KEY = "__hosts__"  # the one key that servers read: lines "position host port"

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">q")


class WireError(ValueError):
    """The bytes on a connection are not frames of this protocol; only that connection is lost."""


class Op(enum.IntEnum):
    """Requests up to 63, answers from 64."""

    HELLO = 1  # protocol, session, client id, purpose, host "position host port" of every earlier server
    SYNC = 2
    GET = 3  # key, timeout
    CHECK = 4  # key*
    WAIT = 5  # timeout, key*
    NUM_KEYS = 6
    WAIT_SIZE = 7  # name, size, timeout
    MEMBERS = 8  # name
    WATCH = 10  # never answered: who sends it waits for the end of the connection
    STEP_DOWN = 9  # from a server that took over: serve nobody any more

    # These change contents; their first two fields are sequence number and floor.
    SET = 16  # key, value
    ADD = 17  # key, amount
    APPEND = 18  # key, value
    COMPARE_SET = 19  # key, expected, desired
    DELETE_KEY = 20  # key
    DELETE_PREFIX = 21  # prefix
    ARRIVE = 22  # name, member
    REPLAY = 23  # the body of a frame that changes contents; not answered

    # From the active server to those that mirror it.
    MIRROR = 32  # client id, the body of a frame that changed contents
    MIRROR_KEY = 33  # key, value
    MIRROR_MEMBERS = 34  # name, member*
    MIRROR_CLIENT = 35  # client id, floor, (sequence number, answer body)*
    MIRROR_RESET = 36

    OK = 64  # what the request asked for
    TIMED_OUT = 65
    FAILED = 66  # text: the request makes no sense
    ACCEPTED = 67  # embedded: 1 if the server lives in a rank process
    CHECKING = 68  # a standby looks whether an earlier host lives; its verdict follows on this connection
    NOT_ACTIVE = 69  # a standby, and an earlier host lives
    OTHER_SESSION = 70
    SUPERSEDED = 71  # a later server has taken over

    @property
    def changes(self) -> bool:
        return Op.SET <= self <= Op.ARRIVE


@dataclass(frozen=True, order=True)
class Host:
    """Where a server listens. Clients use servers in ascending `position`; the primary has position 0."""

    position: int
    name: str
    port: int

    def __str__(self) -> str:
        """Return the text form, which `from_str` reads."""
        return f"{self.position} {self.name} {self.port}"

    @classmethod
    def from_str(cls, text: str) -> Host:
        """Read the text form. ValueError if it is not one."""
        position, name, port = text.split(" ")
        return cls(int(position), name, int(port))


def parse_hosts(text: bytes) -> list[Host]:
    """Return the hosts in the value of `HOSTS_KEY`; lines that are none (somebody else wrote them) are left out."""
    hosts = set()
    for line in text.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            hosts.add(Host.from_str(line))
    return sorted(hosts)


@dataclass(frozen=True)
class Frame:
    """One operation with its fields."""

    op: Op
    fields: tuple[bytes, ...]
    body: bytes  # as it came: mirrors get it unchanged


def pack_number(value: int) -> bytes:
    """Return a number as a field. WireError when it does not fit in 64 bits."""
    try:
        return _NUMBER.pack(value)
    except struct.error:
        raise WireError(f"{value} does not fit in 64 bits") from None


def number(field: bytes) -> int:
    """Read a field as number."""
    if len(field) != _NUMBER.size:
        raise WireError(f"a number has {_NUMBER.size} bytes, not {len(field)}")
    value: int = _NUMBER.unpack(field)[0]
    return value


def encode(op: Op, *fields: bytes) -> bytes:
    """Return a whole frame. WireError when it is larger than `MAX_BODY`."""
    parts = [b"", bytes((op,))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    size = sum(map(len, parts))
    if size > MAX_BODY:
        raise WireError(f"a request of {size} bytes; the limit is {MAX_BODY}")
    parts[0] = _LENGTH.pack(size)
    return b"".join(parts)


def body_of(frame: bytes) -> bytes:
    """Return the body of one encoded frame."""
    return frame[_LENGTH.size :]


def decode_body(body: bytes) -> Frame:
    """Return the frame with this body. WireError if it is malformed."""
    if not body:
        raise WireError("an empty frame")
    try:
        op = Op(body[0])
    except ValueError:
        raise WireError(f"no operation has number {body[0]}") from None
    fields = []
    at = 1
    while at < len(body):
        start = at + _LENGTH.size
        if start > len(body):
            raise WireError("a frame ends within the length of a field")
        at = start + int(_LENGTH.unpack_from(body, at)[0])
        if at > len(body):
            raise WireError("a field is longer than its frame")
        fields.append(body[start:at])
    return Frame(op, tuple(fields), body)


class FrameReader:
    """Cuts a stream of bytes into frames. For one thread.

    `limit` is the largest body accepted; it is checked as soon as the length has come, before anything is stored.
    """

    def __init__(self, limit: int = MAX_BODY) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take in what was received."""
        self._buffer += data

    def frames(self) -> Iterator[Frame]:
        """Yield every frame that is complete. WireError as soon as something cannot be one."""
        while len(self._buffer) >= _LENGTH.size:
            size = int(_LENGTH.unpack_from(self._buffer)[0])
            if size > self.limit:
                raise WireError(f"a frame of {size} bytes; the limit is {self.limit}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode_body(body)

    @property
    def pending(self) -> int:
        """How many bytes of an incomplete frame have come."""
        return len(self._buffer)
