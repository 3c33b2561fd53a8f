"""Sealed JSON documents.

A sealed document is canonical JSON (sorted keys, no spaces, ASCII) with a member ``crc32c`` that is the checksum of the
document without that member. What `unseal` checks are the bytes themselves, so any changed bit is found, also in a
place that a JSON parser would shrug off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.native import crc32c

__all__ = ["MAX_DOCUMENT_BYTES", "EncodedList", "canonical", "seal", "seal_root", "unseal", "unseal_root"]

MAX_DOCUMENT_BYTES = 1 << 30
"""No document of a checkpoint is larger."""

_MAX_DEPTH = 400  # a value is nested 100 deep at most; each level is up to three of the document
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPED, _STRING = re.compile(rb"\\.", re.DOTALL), re.compile(rb'"[^"]*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_CLOSES = 4  # the bit that tells ] and } from [ and {
_SEAL = "crc32c"
_MAX_LOOKALIKES = 8


def canonical(document: Any) -> bytes:
    """Return the one serialisation of a JSON-able `document`; `ValueError` for nan and infinity."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
        "ascii"
    )


@dataclass(frozen=True)
class EncodedList:
    """A list in its canonical form, for one that is long and written again and again."""

    data: bytes
    items: int

    @classmethod
    def of(cls, items: Sequence[Any] | EncodedList) -> EncodedList:
        """That of `items`, which may be one already."""
        return items if isinstance(items, EncodedList) else cls(canonical(items), len(items))

    @classmethod
    def joined(cls, lists: Iterable[EncodedList]) -> EncodedList:
        """All of them, one behind the other."""
        filled = [part for part in lists if part.items]
        return cls(b"[" + b",".join(part.data[1:-1] for part in filled) + b"]", sum(part.items for part in filled))


def seal(document: dict[str, Any]) -> bytes:
    """Return the sealed form of `document`, whose keys are strings; a member may be an `EncodedList`. It has no member
    ``crc32c`` yet."""
    members = {key: canonical(key) + b":" + _form(member) for key, member in document.items()}
    members[_SEAL] = b'"%s":%d' % (_SEAL.encode(), crc32c(_object(members)))
    return _object(members)


def _form(member: Any) -> bytes:
    return member.data if isinstance(member, EncodedList) else canonical(member)


def _object(members: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(members[key] for key in sorted(members)) + b"}"


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Return the document that `seal` turned into `data`, without the seal.

    `where` is the file, for the message of the `CheckpointCorruptError` that is raised for any other bytes.
    """
    document = _parse(data, where)
    _check(document.pop(_SEAL, None), data, where)
    return document


def seal_root(document: dict[str, Any]) -> bytes:
    """Return `document`, the root group of a step, with the seal in ``attributes.ckpt``, where Zarr allows it."""
    return canonical(_with_root_seal(document, crc32c(canonical(document))))


def unseal_root(data: bytes, where: str) -> dict[str, Any]:
    """Return the document that `seal_root` turned into `data`; `CheckpointCorruptError` for any other bytes."""
    document = _parse(data, where)
    try:
        checksum = document["attributes"]["ckpt"].pop(_SEAL, None)
    except (KeyError, TypeError, AttributeError):
        _corrupt(where, "it has no seal")
    _check(checksum, data, where)
    return document


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_DOCUMENT_BYTES:
        _corrupt(where, f"it has {len(data)} bytes")
    try:
        text = data.decode("ascii")
        if _depth(data) > _MAX_DEPTH:
            _corrupt(where, f"it is nested deeper than {_MAX_DEPTH}")
        document = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(data):
            json.dumps(document, ensure_ascii=False).encode()  # ValueError for half a character, which cannot be shown
        if isinstance(document, dict):
            return document
    except (ValueError, RecursionError) as error:
        _corrupt(where, f"it is not JSON ({error}), perhaps truncated", error)
    _corrupt(where, "it is not in the form it was written in")


def _depth(data: bytes) -> int:
    """How deep the lists and objects of a JSON document are nested. Whoever walks through it may do so by recursion."""
    if b"\\" in data:
        data = _ESCAPED.sub(b"", data)
    brackets = data.translate(None, _NO_BRACKETS).replace(b'""', b"")
    if b'"' in brackets:
        brackets = _STRING.sub(b"", brackets)
    steps = np.where(np.frombuffer(brackets, np.uint8) & _CLOSES, np.int8(-1), np.int8(1))
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check(checksum: object, data: bytes, where: str) -> None:
    """Whether `data` has `checksum` without the member that says so, and without the comma before or behind that."""
    if type(checksum) is not int or not 0 <= checksum < 1 << 32:
        _corrupt(where, "it has no seal")
    member = b'"%s":%d' % (_SEAL.encode(), checksum)
    at = -1
    for _ in range(_MAX_LOOKALIKES):
        at = data.find(member, at + 1)
        if at < 0:
            break
        end = at + len(member)
        if any(
            crc32c(data[last:], crc32c(data[:first])) == checksum
            for first, last in ((at, end + 1), (at - 1, end), (at, end))
        ):
            return
    _corrupt(where, f"its checksum is not {checksum}, as recorded")


def _with_root_seal(document: dict[str, Any], checksum: int) -> dict[str, Any]:
    attributes = document["attributes"]
    return {**document, "attributes": {**attributes, "ckpt": {**attributes["ckpt"], _SEAL: checksum}}}


def _corrupt(where: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointCorruptError(f"{where} is damaged: {why}; restore from another step or copy") from cause
