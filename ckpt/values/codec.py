"""Encode values as JSON and decode them, without loss of value or type.

A value without a JSON form of its own is an object whose member ``$`` names its type: ``{"$": "tuple", "items": [1,
2]}``. docs/format.md lists all of them. Decoding makes values of the types in this package and of types that the
program has registered. For any other name it returns an `Unregistered`; nothing is imported or called by name.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointError, StateError
from ckpt.values.registry import (
    STANDARD,
    STANDARD_BY_NAME,
    TORCH,
    Form,
    Unregistered,
    all_parts,
    encoder_named,
    encoder_of,
    form_of,
    name_of,
)

_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_MAX_NESTING = 100
_DICTIONARIES: Mapping[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: Mapping[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class UnencodableError(TypeError):
    """A value cannot be stored. `path` has the keys that lead to it within the value."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str | int] = []


def encode_value(value: Any) -> Any:
    """Return the JSON form of `value`; `decode_value` returns an equal value of the same type.

    Accepts what docs/format.md lists: numbers (nan with its bits, infinity, -0.0), strings, containers with the order
    of their keys, and standard types of Python, numpy and torch; any `enum.Enum` and named tuple; registered types, and
    values of them; and what `decode_value` returns. Raises `UnencodableError`, a `TypeError`, for anything else, also
    for subclasses, which could not be decoded again.
    """
    return _encode(value, 0, False)


def decode_value(encoded: Any) -> Any:
    """Return the value whose JSON form is `encoded`; `CheckpointCorruptError` if it is not one.

    Returns an `Unregistered` for a type that is not registered. StateError if a registered ``from_json`` raises.
    """
    return _Decoder({}).decode(encoded, 0)


def resolve(value: Any, like: Any) -> Any:
    """Return the decoded `value`, made with the enums and named tuples that occur in `like`, too."""
    if next(unregistered_in(value), None) is None:
        return value
    kinds = {name_of(type(part)): type(part) for part in all_parts(like) if form_of(type(part)) is not None}
    return _Decoder(kinds).decode(encode_value(value), 0)


def unregistered_in(value: Any) -> Iterator[Unregistered]:
    """Yield the placeholders in `value` for values of types that are not registered."""
    return Unregistered.within(value)


# -- encoding ----------------------------------------------------------------------------------------------------------


def _encode(value: Any, depth: int, inside_registered: bool) -> Any:
    """Encode a value; one that is `inside_registered`, part of a registered type's value, must be of a known type."""
    if depth > _MAX_NESTING:
        raise UnencodableError(f"nested deeper than {_MAX_NESTING}, or contains itself")
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
    named = _encode_named(value, kind, depth, inside_registered)
    if named is None:
        named = _encode_container(value, kind, depth, inside_registered)
    return _encode_other(value, kind, depth, inside_registered) if named is None else named


def _encode_named(value: Any, kind: type[Any], depth: int, inside_registered: bool) -> Any:
    """Encode a registered type, a value of one, an enum or a named tuple; None for other types."""
    data: Any
    if isinstance(value, type):
        if encoder_of(value) is None:
            raise UnencodableError(
                f"the class {name_of(value)} itself cannot be stored unless the program has registered it, since a "
                "load imports nothing: call ckpt.register_encoder before, or put its name there"
            )
        return {"$": "class", "type": name_of(value), "value": None}
    encoder = encoder_of(kind)
    form: Form | None = "registered" if encoder is not None and encoder.to_json is not None else form_of(kind)
    if form is None and kind is not Unregistered:
        return None
    name = name_of(kind)
    if kind is Unregistered:
        name, form, data = value.name, value.form, value.data
    elif inside_registered and encoder is None:
        raise UnencodableError(f"{name} is part of a registered type and must be registered, too")
    elif encoder is not None and encoder.to_json is not None:
        data, inside_registered = encoder.to_json(value), True
    elif form == "namedtuple":
        data = tuple(zip(kind._fields, value, strict=True))
    else:
        data = value._name_ if form == "enum" else value._value_
    return {"$": form, "type": name, "value": _encode(data, depth + 1, inside_registered)}


def _encode_container(value: Any, kind: type[Any], depth: int, inside_registered: bool) -> Any:
    def items(of: Iterable[Any]) -> list[Any]:
        return [_encode_item(number, item, depth, inside_registered) for number, item in enumerate(of)]

    def pairs(of: Mapping[Any, Any]) -> list[Any]:
        return [
            [_encode(key, depth + 1, inside_registered), _encode_item(key, item, depth, inside_registered)]
            for key, item in of.items()
        ]

    if kind is list:
        if value and {int}.issuperset(map(type, value)) and min(value) >= -(2**63) and max(value) < 2**64:
            return value.copy()  # such as the numbers of the parameters of an optimizer: its items are their own forms
        return items(value)
    if kind is tuple:
        return {"$": "tuple", "items": items(value)}
    if kind is set or kind is frozenset:  # equal sets have the same form
        encoded = [_encode_item(f"(in a {kind.__name__})", item, depth, inside_registered) for item in value]
        return {"$": kind.__name__, "items": sorted(encoded, key=lambda item: json.dumps(item, sort_keys=True))}
    if kind is deque:
        return {"$": "deque", "items": items(value), "maxlen": value.maxlen}
    if kind is Namespace:
        return {"$": "Namespace", "items": pairs(vars(value))}
    if kind not in _DICTIONARIES.values():
        return None
    keys = list(value)
    plain = kind is dict and all(type(key) is str and _is_plain(key) and key != "$" for key in keys)
    if plain and keys == sorted(keys):  # documents are written in this order
        return {key: _encode_item(key, item, depth, inside_registered) for key, item in value.items()}
    return {"$": kind.__name__, "items": pairs(value)}


def _encode_item(key: Any, item: Any, depth: int, inside_registered: bool) -> Any:
    try:
        return _encode(item, depth + 1, inside_registered)
    except UnencodableError as error:
        error.path.insert(0, key if isinstance(key, str | int) else repr(key))
        raise


def _encode_other(value: Any, kind: type[Any], depth: int, inside_registered: bool) -> Any:
    standard = STANDARD.get(kind)
    if kind.__module__ == "torch":
        if kind.__name__ == "dtype":
            return {"$": "torch.dtype", "name": str(value).removeprefix("torch.")}
        standard = TORCH.get(kind.__name__)
    if standard is not None:
        try:
            parts = standard.to_value(value)
        except ValueError as error:
            raise UnencodableError(f"this {standard.name} cannot be stored: {error}") from error
        return {"$": standard.name, "value": _encode(parts, depth + 1, inside_registered)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc" and value.dtype.isbuiltin == 1:
        return {"$": "numpy", "dtype": value.dtype.str, "base64": _base64(value.tobytes())}
    raise UnencodableError(
        f"a {name_of(kind)} cannot be stored; a state holds tensors, numpy arrays, objects with state_dict() and "
        "load_state_dict(), dicts and lists of these, numbers, strings, and other values of the standard library, such "
        "as tuples, sets, paths, times, enums and Decimal; of other types those given to ckpt.register_encoder"
    )


# -- decoding ----------------------------------------------------------------------------------------------------------


class _Decoder:
    """Decodes values of standard and registered types, and of the enums and named tuples in `kinds`, by name."""

    def __init__(self, kinds: Mapping[str, type[Any]]) -> None:
        self._kinds = kinds

    def decode(self, encoded: Any, depth: int) -> Any:
        if depth > _MAX_NESTING:
            raise CheckpointCorruptError(
                f"a value is nested deeper than {_MAX_NESTING}, more than any value that can be stored"
            )
        if isinstance(encoded, list):
            return [self.decode(item, depth + 1) for item in encoded]
        if not isinstance(encoded, dict):
            if type(encoded) is float and math.isinf(encoded):  # JSON allows 1e999
                raise CheckpointCorruptError("a number is too large for a float")
            return encoded
        if "$" not in encoded:
            return {key: self.decode(item, depth + 1) for key, item in encoded.items()}
        try:
            return self._tagged(encoded["$"], encoded, depth + 1)
        except (CheckpointError, ImportError):
            raise
        except Exception as error:  # constructors may raise anything
            raise CheckpointCorruptError(f"invalid value of type {encoded['$']!r:.80}: {error!r:.200}") from error

    def _tagged(self, tag: str, encoded: dict[str, Any], depth: int) -> Any:
        if tag in STANDARD_BY_NAME:
            return STANDARD_BY_NAME[tag].from_value(self.decode(encoded["value"], depth))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.decode(item, depth) for item in _items(encoded))
        if tag in _DICTIONARIES:
            return _DICTIONARIES[tag](self._pairs(encoded, depth))
        match tag:
            case "deque":
                return deque((self.decode(item, depth) for item in _items(encoded)), encoded["maxlen"])
            case "Namespace":
                return Namespace(**self._pairs(encoded, depth))
            case "enum" | "flag" | "namedtuple" | "registered" | "class":
                return self._named(tag, str(encoded["type"]), self.decode(encoded["value"], depth))
            case "torch.dtype":
                return _torch_dtype(encoded["name"])
        return _decode_scalar(tag, encoded)

    def _pairs(self, encoded: dict[str, Any], depth: int) -> dict[Any, Any]:
        items = [(self.decode(key, depth), self.decode(item, depth)) for key, item in _items(encoded)]
        result = dict(items)
        if len(result) != len(items):
            raise ValueError("a key occurs twice")
        return result

    def _named(self, form: Form, name: str, data: Any) -> Any:
        """Return the value; a placeholder if its type is not known or no longer has this value."""
        placeholder = Unregistered(name, data, form)
        encoder = encoder_named(name)
        if form == "registered":
            if encoder is None or encoder.from_json is None or next(unregistered_in(data), None) is not None:
                return placeholder
            try:
                return encoder.from_json(data)
            except Exception as error:
                raise StateError(
                    f"the from_json that is registered for {name} raised {error!r} for what the checkpoint has: "
                    f"{str(data)[:200]}"
                ) from error
        kind = encoder.kind if encoder is not None else self._kinds.get(name)
        if form == "class":
            return placeholder if kind is None else kind
        if kind is None or form_of(kind) != form:
            return placeholder
        if form == "namedtuple":
            fields, values = (*zip(*data, strict=True),) or ((), ())
            return kind._make(values) if fields == kind._fields else placeholder
        try:
            return kind[data] if form == "enum" else kind(data)
        except (KeyError, ValueError):
            return placeholder


def _decode_scalar(tag: str, encoded: dict[str, Any]) -> Any:
    match tag:
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
    raise ValueError("unknown type")


def _items(encoded: dict[str, Any]) -> list[Any]:
    items = encoded["items"]
    if not isinstance(items, list):
        raise ValueError("the items are not a list")
    return items


def _numpy_scalar(dtype: str, data: bytes) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype) or len(data) != np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes are not a scalar of the dtype {dtype!r:.80}")
    return np.frombuffer(data, dtype)[0]


def _torch_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError(f"torch {torch.__version__} has no dtype {name!r:.80}; a newer version may have")
    return dtype


def _is_plain(text: str) -> bool:
    """Return whether JSON preserves `text`: it joins two lone surrogates to one character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(encoded: dict[str, Any]) -> bytes:
    return base64.b64decode(encoded["base64"], validate=True)
