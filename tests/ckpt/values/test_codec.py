"""Values of every type that a state may hold survive JSON unchanged."""

from __future__ import annotations

import io
import json
import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path as FilePath
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import decode_document, encode_document
from ckpt.values.codec import UnencodableError, decode_value, encode_value
from ckpt.values.registry import ArrayValue


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, with equal types and orders at all levels, and floats bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return same(sorted(a, key=repr), sorted(b, key=repr))
    if isinstance(a, Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, (datetime, time)):
        return same(
            [a.replace(tzinfo=None).isoformat(), a.fold, a.tzinfo],
            [b.replace(tzinfo=None).isoformat(), b.fold, b.tzinfo],
        )
    if isinstance(a, timezone):
        return (a.utcoffset(None), a.tzname(None)) == (b.utcoffset(None), b.tzname(None))
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    return bool(a == b)


HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_values_keep_value_and_type(value: Any) -> None:
    document = decode_document(encode_document({"value": encode_value(value)}), "x")
    assert same(decode_value(document["value"]), value)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(2**63) - 1,
        math.nan,
        struct.unpack("d", b"\x01\0\0\0\0\0\xf8\xff")[0],
        -math.inf,
        -0.0,
        "\ud83d\ude00",  # two lone surrogates, not the character
        {"$": "tuple", "items": []},
        {"b": 1, "a": 2},
        {1: "int", "1": "str", (1,): "tuple", None: "none"},
        OrderedDict(b=1, a=2),
        Counter({3: 2}),
        np.float32(0.1),
        np.int64(-1),
        np.bool_(True),
        np.complex64(1 - 0j),
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.device("cpu"),
        torch.Size((2, 3)),
        torch.Size(()),
        {3, "a", None, (1, 2.5)},
        frozenset({frozenset({1}), frozenset()}),
        deque([1, {2}], maxlen=5),
        deque(),
        Namespace(lr=0.1, **{"not an identifier": (1,), "$": 2}),
        FilePath("/data/run 7/\udcff"),
        FilePath(""),
        PurePosixPath("a/../b"),
        PureWindowsPath("C:\\x"),
        date(2, 1, 1),
        datetime(2024, 10, 27, 2, 30, 0, 7, fold=1),
        datetime(2024, 10, 27, 2, 30, tzinfo=UTC),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-5, seconds=1), "EST")),
        time(1, 2, 3, 4, tzinfo=UTC, fold=1),
        timedelta.min,
        UTC,
        timezone(timedelta(0), "Z"),
        Decimal("1.50"),
        Decimal("-sNaN123"),
        Decimal("1E+999999"),
        Fraction(10**30, 7),
        UUID(int=5),
        range(10, 0, -3),
        slice(None, (1, 2)),
        bytearray(b"\x00\xff"),
        ArrayValue("torch", "bfloat16", (2, 1), b"\x00\x01\x02\xff"),
        ArrayValue("numpy", ">f8", (), b"12345678"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_special_values(value: Any) -> None:
    assert same(decode_value(decode_document(encode_document({"v": encode_value(value)}), "x")["v"]), value)


def nested() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value", [object(), {1, object()}, nested(), np.zeros(2), type("Sub", (int,), {})(1), [lambda: 0]], ids=type
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_value(value)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "class", "items": []},
        {"$": "tuple"},
        {"$": "float", "hex": "zz"},
        {"$": "bytes", "base64": "?"},
        {"$": []},
    ],
)
def test_damaged_values(encoded: Any) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_value(encoded)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "Decimal", "value": "one"},
        {"$": "Fraction", "value": [1, 0]},
        {"$": "timedelta", "value": [10**30, 0, 0]},
        {"$": "datetime", "value": ["2024-01-01", 0, "utc"]},
        {"$": "UUID", "value": [1]},
        {"$": "range", "value": [1, 2, 0]},
        {"$": "set", "items": [[1]]},
        {"$": "Namespace", "items": [[1, 2]]},
        {"$": "torch.device", "value": "toaster"},
        {"$": "torch.Size", "value": ["a"]},
        {"$": "BytesIO", "value": [{"$": "bytes", "base64": ""}, -1]},
        {"$": "array", "value": ["jax", "float32", [1], {"$": "bytes", "base64": ""}]},
        {"$": "array", "value": ["torch", "float32", [-1], {"$": "bytes", "base64": ""}]},
        {"$": "array", "value": ["torch", "float32", [1], ""]},
        {"$": "enum", "type": "x.Y"},
        {"$": "namedtuple", "value": 3},
    ],
    ids=str,
)
def test_damaged_standard_values(encoded: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match="invalid value of type"):
        decode_value(encoded)


def test_a_file_in_memory_keeps_its_position() -> None:
    file = io.BytesIO(b"abcdef")
    file.seek(4)
    again = decode_value(encode_value(file))
    assert (again.read(), again.getvalue()) == (b"ef", b"abcdef")
    file.close()
    with pytest.raises(TypeError, match="this BytesIO cannot be stored: I/O operation on closed file"):
        encode_value(file)


def test_equal_sets_have_equal_forms() -> None:
    numbers = [8 * n for n in range(50)]  # otherwise small integers are ordered by their hashes
    forms = {json.dumps(encode_value(set(order))) for order in (numbers, numbers[::-1])}
    assert len(forms) == 1


@pytest.mark.parametrize("levels", [100, 101])
@pytest.mark.parametrize("tag", ["list", "tuple", "deque"])
def test_what_can_be_written_can_be_read_however_deep_it_is(levels: int, tag: str) -> None:
    kind = {"list": list, "tuple": tuple, "deque": deque}[tag]
    value: Any = None
    encoded: Any = None
    for _ in range(levels):
        value = kind([value])
        encoded = [encoded] if tag == "list" else {"$": tag, "items": [encoded], "maxlen": None}
    if levels > 100:
        with pytest.raises(TypeError, match="nested deeper than 100"):
            encode_value(value)
        with pytest.raises(CheckpointCorruptError, match="nested deeper than 100"):
            decode_value(encoded)
    else:
        assert same(decode_value(encode_value(value)), value)


def test_an_error_says_where_inside_of_the_value() -> None:
    with pytest.raises(UnencodableError, match=r"a builtins\.function cannot be stored") as caught:
        encode_value([1, {"a": Namespace(b=(0, lambda: 0))}])
    assert caught.value.path == [1, "a", "b", 1]
