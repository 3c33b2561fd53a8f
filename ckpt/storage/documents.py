"""JSON documents that carry their own checksum; those of saves and steps in directories.

A document is canonical JSON (sorted keys, no spaces, ASCII) with a member ``crc32c``, the checksum of the document
without that member. Decoding checks the bytes themselves, so it finds every changed bit, also where a JSON parser would
ignore it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import CheckpointCorruptError, StateError
from ckpt.native import crc32c
from ckpt.storage.names import PUBLISHED_STEP, parse_save_name
from ckpt.storage.regular_files import read_document_at

ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""The exceptions that code raises when a document does not have the expected structure."""

MAX_DOCUMENT_BYTES = 1 << 30
"""The largest size of a document."""

_MAX_DEPTH = 400  # a value is nested 100 deep at most, and each level may take three in the document
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPED, _STRING = re.compile(rb"\\.", re.DOTALL), re.compile(rb'"[^"]*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_CLOSES = 4  # the bit that is set in ] and } but not in [ and {
_MEMBER = "crc32c"
_MAX_MATCHES = 8  # of the text of the member; a value may contain it, too


def canonical_json(document: Any) -> bytes:
    """Return the canonical JSON of `document`; `ValueError` for nan and infinity."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
        "ascii"
    )


def encode_document(document: dict[str, Any]) -> bytes:
    """Return `document`, whose keys are strings, as JSON with its checksum. Raises what `readable` raises."""
    members = {key: canonical_json(key) + b":" + canonical_json(member) for key, member in document.items()}
    members[_MEMBER] = b'"%s":%d' % (_MEMBER.encode(), crc32c(_object(members)))
    return readable(_object(members))


def _object(members: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(members[key] for key in sorted(members)) + b"}"


def decode_document(data: bytes, where: str) -> dict[str, Any]:
    """Check `data` and return the document that `encode_document` has encoded, without the checksum.

    Raises `CheckpointCorruptError` for any other bytes; `where` names the file in its message.
    """
    document = _parse(data, where)
    _check(document.pop(_MEMBER, None), data, where)
    return document


def digest(data: bytes) -> dict[str, Any]:
    """Return the digest of a file for the root. The CRC of a file that ends in its own CRC is a constant."""
    return {"bytes": len(data), "blake2b": hashlib.blake2b(data, digest_size=16).hexdigest()}


def is_recorded(data: bytes, recorded: Any) -> bool:
    """Return whether the root, which says `recorded` of a document, is of this one."""
    return recorded in ({"bytes": len(data), "crc32c": crc32c(data)}, digest(data))


def encode_root(document: dict[str, Any]) -> bytes:
    """Return the root group of a step as JSON, with its checksum in ``attributes.ckpt``, where Zarr allows it.

    Raises what `readable` raises.
    """
    return readable(canonical_json(_with_root_checksum(document, crc32c(canonical_json(document)))))


def readable(data: bytes) -> bytes:
    """Return an encoded document; StateError if no reader would accept it, so that it must not be published."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise StateError(
            f"a document of the checkpoint would have {len(data):,} bytes, and {MAX_DOCUMENT_BYTES:,} are allowed: it "
            "holds the values of the state that are not tensors, and the names of all; put large values into tensors"
        )
    return data


def decode_root(data: bytes, where: str) -> dict[str, Any]:
    """Check `data` and return the document that `encode_root` has encoded, or raise `CheckpointCorruptError`."""
    document = _parse(data, where)
    try:
        checksum = document["attributes"]["ckpt"].pop(_MEMBER, None)
    except (KeyError, TypeError, AttributeError):
        _corrupt(where, "it has no checksum")
    _check(checksum, data, where)
    return document


@contextmanager
def well_formed(where: str) -> Iterator[None]:
    """Raise CheckpointCorruptError for `ILL_FORMED` in the block: the document `where` has another structure.

    Its checksum may be correct all the same: the document may have been made by hand.
    """
    try:
        yield
    except ILL_FORMED as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointCorruptError(f"{where} does not describe a checkpoint: {why:.300}") from error


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_DOCUMENT_BYTES:
        _corrupt(where, f"it has {len(data)} bytes")
    try:
        document = parse_json(data)
        if _SURROGATE.search(data):
            json.dumps(
                document, ensure_ascii=False
            ).encode()  # ValueError for a lone surrogate, which cannot be printed
        if isinstance(document, dict):
            return document
    except ValueError as error:
        _corrupt(where, f"it is not JSON ({error}), perhaps truncated", error)
    _corrupt(where, "it is not a JSON object")


def parse_json(data: bytes) -> Any:
    """Parse JSON in ASCII, in time and memory in proportion to its size. ValueError for anything else.

    Refuses what Python parses but cannot use safely: lists and objects nested hundreds deep, numbers that are not
    finite, integers of more than 4,300 digits.
    """
    text = data.decode("ascii")
    if _depth(data) > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH}")
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _depth(data: bytes) -> int:
    """Return how deep the lists and objects of a JSON document are nested. Below the limit, recursion is safe."""
    if b"\\" in data:
        data = _ESCAPED.sub(b"", data)
    brackets = data.translate(None, _NO_BRACKETS).replace(b'""', b"")
    if b'"' in brackets:
        brackets = _STRING.sub(b"", brackets)
    steps = np.where(np.frombuffer(brackets, np.uint8) & _CLOSES, np.int8(-1), np.int8(1))
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # JSON allows 1e999
        raise ValueError(f"{text:.40} is too large for a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(checksum: object, data: bytes, where: str) -> None:
    """Check that `data` has `checksum` without the member ``crc32c`` and the comma before or after it."""
    if type(checksum) is not int or not 0 <= checksum < 1 << 32:
        _corrupt(where, "it has no checksum")
    member = b'"%s":%d' % (_MEMBER.encode(), checksum)
    at = -1
    for _ in range(_MAX_MATCHES):
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


def _with_root_checksum(document: dict[str, Any], checksum: int) -> dict[str, Any]:
    attributes = document["attributes"]
    return {**document, "attributes": {**attributes, "ckpt": {**attributes["ckpt"], _MEMBER: checksum}}}


def _corrupt(where: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointCorruptError(f"{where} is damaged: {why}; restore from another step or copy") from cause


# -- documents of saves and steps in directories -----------------------------------------------------------------------

FORMAT_VERSION = 2
INTENT = "intent.json"
_MAX_RANKS = 1 << 20
_OF_STEP = (INTENT, "index.json", "state.json", "parts", "packs")
_FEW_OF_STEP = 3


def checked_intent(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the intent of a save, after checking what a reader relies on; one of another format as it is.

    CheckpointCorruptError if it is invalid: nothing else says how many ranks to look for.
    """
    if document.get("format") == FORMAT_VERSION:
        with well_formed(where):
            world_size = document["world_size"]
            if type(world_size) is not int or not 0 < world_size <= _MAX_RANKS:
                raise ValueError(f"{world_size!r:.40} is not a number of ranks from 1 to {_MAX_RANKS}")
    return document


def intent_of_step(path: str) -> dict[str, Any] | None:
    """Return the intent of the published step in directory `path`; None if it is missing or damaged.

    StorageError if it cannot be read: then nothing is known of the step, and nothing may be deleted for that.
    """
    try:
        return read_json(os.path.join(path, INTENT))
    except CheckpointCorruptError:
        return None


def owner_of_step(path: str) -> int:
    """Return the token of the owner that saved the step in directory `path`; 0 if its intent does not say.

    StorageError if it cannot be read.
    """
    save = parse_save_name(str((intent_of_step(path) or {}).get("save", "")))
    return 0 if save is None else save.owner


def step_around(path: str) -> str | None:
    """Return the directory of the step that a path is in, or is itself, or leads to; None if there is none."""
    if "\0" in path:
        return None  # no file has such a path: its first use says so
    for folder in dict.fromkeys((os.path.realpath(path), path)):
        while (parent := os.path.dirname(folder)) != folder:
            if _is_step(folder):
                return folder
            folder = parent
    return None


def _is_step(path: str) -> bool:
    """Return whether there is a step, perhaps damaged, or a name in a root that a step will have."""
    found = sum(_is_seen(os.path.join(path, name)) for name in _OF_STEP)
    if PUBLISHED_STEP.fullmatch(os.path.basename(path)) is None:
        return found >= _FEW_OF_STEP
    return found > 0 or any(_is_seen(os.path.join(os.path.dirname(path), name)) for name in (".owner", "records"))


def _is_seen(path: str) -> bool:
    """Return whether there is something at `path`. If that cannot be told, the first use of the root fails anyway.

    An error here would reach one rank alone, before ranks can agree.
    """
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def read_json(path: str) -> dict[str, Any] | None:
    """Return the document at `path`; None if it does not exist.

    CheckpointCorruptError if it is damaged, StorageError if it cannot be read.
    """
    data = read_bytes(path)
    return None if data is None else decode_document(data, path)


def read_bytes(path: str) -> bytes | None:
    """Return the content of a document; None if it does not exist."""
    return read_document_at(path, MAX_DOCUMENT_BYTES)
