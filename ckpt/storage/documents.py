"""Sealed JSON documents, and values inside them that keep their Python type.

A sealed document is canonical JSON (sorted keys, no spaces, ASCII) with a member ``crc32c`` that is the checksum of the
document without that member. What `unseal` checks are the bytes themselves, so any changed bit is found, also in a
place that a JSON parser would shrug off.

A value that JSON has no form of is an object with one member ``$`` that names its type: ``{"$": "tuple", "items": [1,
2]}``.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import CheckpointCorruptError, StateError
from ckpt.storage.checksums import crc32c
from ckpt.storage.dtypes import torch_dtype

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "EncodedList",
    "canonical",
    "decode_value",
    "encode_value",
    "seal",
    "seal_root",
    "unseal",
    "unseal_root",
]

MAX_DOCUMENT_BYTES = 1 << 30
"""No document of a checkpoint is larger."""

_MAX_NESTING = 100  # of a value; each level is at most three of the document
_MAX_DEPTH = 400
_ESCAPED, _STRING = re.compile(rb"\\.", re.DOTALL), re.compile(rb'"[^"]*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_CLOSES = 4  # the bit that tells ] and } from [ and {
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_SEAL = "crc32c"
_MAX_LOOKALIKES = 8
_DICTIONARIES: tuple[type[dict[Any, Any]], ...] = (dict, OrderedDict, Counter)


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


def encode_value(value: Any) -> Any:
    """Return the JSON form of `value`; `decode_value` returns an equal value of the same type.

    Takes None, bool, int, float (nan and its bits, infinity, -0.0), complex, str, bytes, numpy scalars, torch dtypes,
    and list, tuple, dict, OrderedDict and Counter of these, with the order of their keys. `TypeError` for anything
    else, also for subclasses: what could not be given back must not be taken.
    """
    return _encode(value, 0)


def decode_value(encoded: Any) -> Any:
    """Return the value whose JSON form is `encoded`; `CheckpointCorruptError` if it is none, or of a dtype that this
    version of torch does not have."""
    if isinstance(encoded, list):
        return [decode_value(item) for item in encoded]
    if type(encoded) is float and math.isinf(encoded):  # 1e999 is JSON
        raise CheckpointCorruptError("a number is too large for a float")
    if not isinstance(encoded, dict):
        return encoded
    if "$" not in encoded:
        return {key: decode_value(item) for key, item in encoded.items()}
    try:
        return _decode_tagged(encoded)
    except (KeyError, TypeError, ValueError, OverflowError, struct.error, StateError) as error:
        raise CheckpointCorruptError(f"not the form of a value of type {encoded['$']!r:.80}: {error!r:.200}") from error


def _encode(value: Any, depth: int) -> Any:
    if depth > _MAX_NESTING:
        raise TypeError(f"nested deeper than {_MAX_NESTING}, or contains itself")
    kind = type(value)
    if kind in (list, tuple):
        items = [_encode(item, depth + 1) for item in value]
        return items if kind is list else {"$": "tuple", "items": items}
    if kind in _DICTIONARIES:
        keys = list(value)
        plain = kind is dict and all(type(key) is str and _is_plain(key) and key != "$" for key in keys)
        if plain and keys == sorted(keys):  # which is their order in the document
            return {key: _encode(item, depth + 1) for key, item in value.items()}
        items = [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]
        return {"$": kind.__name__, "items": items}
    return _encode_scalar(value)


def _encode_scalar(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else {"$": "int", "hex": f"{value:x}"}
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "hex": struct.pack(">d", value).hex()}
    if kind is str:
        return value if _is_plain(value) else {"$": "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}
    if kind is complex:
        return {"$": "complex", "hex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is bytes:
        return {"$": "bytes", "base64": _base64(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc" and value.dtype.isbuiltin == 1:
        return {"$": "numpy", "dtype": value.dtype.str, "base64": _base64(value.tobytes())}
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return {"$": "torch.dtype", "name": str(value).removeprefix("torch.")}
    raise TypeError(f"values of type {kind.__module__}.{kind.__qualname__} cannot be stored")


def _decode_tagged(encoded: dict[str, Any]) -> Any:
    match encoded["$"]:
        case "tuple":
            return tuple(map(decode_value, _items(encoded)))
        case "dict" | "OrderedDict" | "Counter" as name:
            kind = next(kind for kind in _DICTIONARIES if kind.__name__ == name)
            return kind(_distinct([(decode_value(key), decode_value(item)) for key, item in _items(encoded)]))
        case "int":
            return int(encoded["hex"], 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(encoded["hex"]))[0]
        case "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(encoded["hex"])))
        case "str":
            return _bytes(encoded).decode("utf-8", "surrogatepass")
        case "bytes":
            return _bytes(encoded)
        case "numpy":
            return _numpy_scalar(encoded["dtype"], _bytes(encoded))
        case "torch.dtype":
            return torch_dtype(encoded["name"])
    raise ValueError("unknown type")


def _items(encoded: dict[str, Any]) -> list[Any]:
    items = encoded["items"]
    if not isinstance(items, list):
        raise ValueError("the items are no list")
    return items


def _distinct(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(items)
    if len(result) != len(items):
        raise ValueError("a key is there twice")
    return result


def _numpy_scalar(dtype: str, data: bytes) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype) or len(data) != np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes are no scalar of the dtype {dtype!r:.80}")
    return np.frombuffer(data, dtype)[0]


def _is_plain(text: str) -> bool:
    """Whether `text` survives JSON: escaped halves of a surrogate pair come back as one character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(encoded: dict[str, Any]) -> bytes:
    return base64.b64decode(encoded["base64"], validate=True)


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_DOCUMENT_BYTES:
        _corrupt(where, f"it has {len(data)} bytes")
    try:
        text = data.decode("ascii")
        if _depth(data) > _MAX_DEPTH:
            _corrupt(where, f"it is nested deeper than {_MAX_DEPTH}")
        document = json.loads(text, parse_constant=_refuse_constant)
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
