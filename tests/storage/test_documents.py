import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import decode_value, encode_value, seal, seal_root, unseal, unseal_root

DOCUMENT = {"step": 7, "name": "\u00e9\n", "zero": -0.0, "rate": 1e-8, "list": [1, {"b": None, "a": True}]}
ROOT = {"zarr_format": 3, "node_type": "group", "attributes": {"ckpt": {"step": 7}, "other": 1}}
SEALS = [(DOCUMENT, seal, unseal), (ROOT, seal_root, unseal_root)]
Seal = Callable[[dict[str, Any]], bytes]
Unseal = Callable[[bytes, str], dict[str, Any]]


@pytest.mark.parametrize(("document", "seal", "unseal"), SEALS)
def test_seal_round_trip(document: dict[str, Any], seal: Seal, unseal: Unseal) -> None:
    assert unseal(seal(document), "x") == document
    json.loads(seal(document))


@pytest.mark.parametrize(("document", "seal", "unseal"), SEALS)
def test_every_flipped_bit_is_found(document: dict[str, Any], seal: Seal, unseal: Unseal) -> None:
    data = seal(document)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError, match="step/x"):
            unseal(bytes(damaged), "step/x")


@pytest.mark.parametrize(("document", "seal", "unseal"), SEALS)
def test_every_truncation_is_found(document: dict[str, Any], seal: Seal, unseal: Unseal) -> None:
    data = seal(document)
    for size in range(len(data)):
        with pytest.raises(CheckpointCorruptError):
            unseal(data[:size], "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"a":NaN}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":1,"a":1}',
    ],
    ids=lambda data: repr(data[:10]),
)
@pytest.mark.parametrize("unseal", [unseal, unseal_root])
def test_what_is_no_sealed_document(data: bytes, unseal: Unseal) -> None:
    with pytest.raises(CheckpointCorruptError, match="where"):
        unseal(data, "where")


def same(a: Any, b: Any) -> bool:
    """Equal, of equal types all the way down, in the same order, floats bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
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
    document = unseal(seal({"value": encode_value(value)}), "x")
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
        "\ud83d\ude00",  # halves of a pair, not the character
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
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) else "int",
)
def test_special_values(value: Any) -> None:
    assert same(decode_value(unseal(seal({"v": encode_value(value)}), "x")["v"]), value)


def nested() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, nested(), np.zeros(2), bytearray(), type("Sub", (int,), {})(1), [lambda: 0]], ids=type
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_value(value)


@pytest.mark.parametrize(
    "encoded",
    [{"$": "set", "items": []}, {"$": "tuple"}, {"$": "float", "hex": "zz"}, {"$": "bytes", "base64": "?"}, {"$": []}],
)
def test_damaged_values(encoded: Any) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_value(encoded)
