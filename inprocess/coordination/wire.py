"""Protocol between client and server: length-prefixed frames, and the proof that both ends know the secret.

    frame   := length of the body (4 bytes, big-endian) body
    body    := operation (1 byte) id (8 bytes) field*
    field   := length (4 bytes) bytes

The server begins with a challenge. The answer of the client proves that it knows the secret of the job, and the answer
of the server to that proves the same of the server: HMAC-SHA256 (RFC 2104) over both nonces, the name of the job and
the role of the sender. The server reads nothing else from a connection before that. Later frames are not signed.

Requests have an id chosen by the client, which the answers repeat, in any order. Nothing that is received is executed
or unpickled. Numbers are big-endian fields of 8 bytes.
"""

from __future__ import annotations

import enum
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from inprocess.ipc import proofs

PROTOCOL = b"inprocess store 4"
MAX_VALUE = 4 << 20  # of one key; the store is for coordination, not for tensors
MAX_BODY = 8 << 20  # of one frame
MAX_GREETING = 1 << 10  # of a frame before the connection is authenticated

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">BQ")
_START = struct.Struct(">IBQ")  # the length and the head
_NUMBER = struct.Struct(">q")


class WireError(ValueError):
    """The bytes on a connection are not frames of this protocol. Only that connection is closed."""


@dataclass(frozen=True)
class Access:
    """Address and secret of the server of a job. `job` is a nonce; the secret does not appear in `repr`."""

    host: str
    port: int
    job: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def to_document(self) -> dict[str, Any]:
        """Return the fields as JSON types, including the secret."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Access:
        """Read what `to_document` returned."""
        return cls(str(document["host"]), int(document["port"]), str(document["job"]), str(document["secret"]))


class Op(enum.IntEnum):
    """Operations: requests up to 63, answers from 64. A guarded request begins with key and value of the guard.

    Those from 5 to 22 are the verbs of the store, see `verbs`.
    """

    HELLO = 1  # client id, nonce, proof
    PING = 2
    BYE = 3  # the client sends nothing more
    CANCEL = 4  # the id of a waiting request: it is answered now, unless it was answered before
    CHECK = 5  # key*
    NUM_KEYS = 6
    MEMBERS = 7  # name

    # Answered when the condition holds. Guarded.
    GET = 8  # guard, guard, key*: when all exist; answered with their values
    WAIT_SIZE = 9  # guard, guard, name, size: when the set has that size
    MEET = 10  # guard, guard, name, key, member, size: when the key exists, or at once if the set is full

    ATTEND = 11  # guard, guard, name, member: until the connection ends

    # Change contents, once for each id of a client. Guarded; then the floor: all ids below are settled.
    SET = 16  # key*, value*
    ADD = 17  # key, amount
    APPEND = 18  # key, value
    COMPARE_SET = 19  # key, expected, desired
    DELETE_KEY = 20  # key
    DELETE_PREFIX = 21  # prefix
    ARRIVE = 22  # name, member

    CHALLENGE = 64  # protocol, nonce
    WELCOME = 65  # proof
    REFUSED = 66
    PONG = 67
    OK = 68  # what the request asked for
    FAILED = 69  # text: the request cannot be applied
    STALE = 70  # the value of the guard's key, which differs from the guard's
    CANCELLED = 71  # the condition of the waiting request does not hold yet

    __hash__ = int.__hash__  # that of enums is a function in Python, and the server looks up each request in a table

    def __init__(self, code: int) -> None:
        self.reads = 5 <= code <= 7
        self.waits = 8 <= code <= 10
        self.changes = 16 <= code <= 22


_OPS: Mapping[int, Op] = MappingProxyType({int(op): op for op in Op})


class Frame(NamedTuple):
    """One operation with its id and fields."""

    op: Op
    id: int
    fields: tuple[bytes, ...]


def proof(access: Access, who: bytes, *nonces: bytes) -> bytes:
    """Return the proof of knowing the secret; compare with `hmac.compare_digest`."""
    return proofs.proof(access.secret, PROTOCOL, who, access.job.encode(), *(nonce.hex().encode() for nonce in nonces))


def pack_number(value: int) -> bytes:
    """Return a number as a field. WireError if it does not fit in 64 bits."""
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


def encode(op: Op, id: int = 0, *fields: bytes) -> bytes:
    """Return a whole frame. WireError if it is larger than `MAX_BODY`."""
    return encode_packed(op, id, pack_fields(*fields))


def encode_packed(op: Op, id: int, packed: bytes) -> bytes:
    """Return a whole frame with fields from `pack_fields`, which thousands of frames may share."""
    size = _HEAD.size + len(packed)
    if size > MAX_BODY:
        raise WireError(f"a request of {size} bytes; the limit is {MAX_BODY}")
    return _START.pack(size, op, id) + packed


def pack_fields(*fields: bytes | bytearray) -> bytes:
    """Return the fields as they stand in a frame."""
    parts: list[bytes | bytearray] = []
    for part in fields:
        parts += (_LENGTH.pack(len(part)), part)
    return b"".join(parts)


def _decode(data: bytes, at: int, end: int) -> Frame:
    """Return the frame whose body is this part of the data."""
    try:
        code, id = _HEAD.unpack_from(data, at)
        op = _OPS.get(code)
        if op is None or end - at < _HEAD.size:
            raise WireError(f"no operation has number {code}" if op is None else "a frame without operation and id")
        at += _HEAD.size
        fields = []
        while at < end:
            (size,) = _LENGTH.unpack_from(data, at)
            start = at + _LENGTH.size
            at = start + size
            fields.append(data[start:at])
    except struct.error:
        raise WireError("a frame ends within a number") from None
    if at > end:  # also if a length was read beyond the end
        raise WireError("a field is longer than its frame")
    return tuple.__new__(Frame, (op, id, tuple(fields)))  # in a fifth of the time of Frame(...)


class FrameReader:
    """Cuts a stream of bytes into frames. For one thread.

    `limit` is the largest body accepted; it is checked as soon as the length is received, before the body is stored.
    """

    __slots__ = ("_at", "_data", "limit")

    def __init__(self, limit: int = MAX_BODY) -> None:
        self.limit = limit
        self._data: bytes | bytearray = b""
        self._at = 0  # the start of the next frame

    def take(self, data: bytes) -> list[Frame]:
        """Add received bytes, and return every complete frame."""
        size = len(data)
        if self._at == len(self._data) and size > _LENGTH.size and size <= self.limit:
            (body,) = _LENGTH.unpack_from(data)
            if body == size - _LENGTH.size:  # nearly always one frame alone, and a server handles thousands of them
                return [_decode(data, _LENGTH.size, size)]
        self.feed(data)
        return list(self.frames())

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
            return
        if not isinstance(self._data, bytearray):
            self._data, self._at = bytearray(self._data[self._at :]), 0  # which grows in place: a frame may be large
        self._data += data

    def frames(self) -> Iterator[Frame]:
        """Yield every complete frame. WireError as soon as the bytes cannot be one."""
        while len(self._data) - self._at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, self._at)
            if size > self.limit:
                raise WireError(f"a frame of {size} bytes; the limit is {self.limit}")
            start = self._at + _LENGTH.size
            end = start + size
            if len(self._data) < end:
                return
            if isinstance(self._data, bytearray):
                self._data = bytes(self._data)
            self._at = end
            yield _decode(self._data, start, end)
        if self._at == len(self._data):
            self._data, self._at = b"", 0  # of thousands of connections, most are silent for long
