import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import decode_document, decode_root, encode_document, encode_root

DOCUMENT = {"step": 7, "name": "\u00e9\n", "zero": -0.0, "rate": 1e-8, "list": [1, {"b": None, "a": True}]}
ROOT = {"zarr_format": 3, "node_type": "group", "attributes": {"ckpt": {"step": 7}, "other": 1}}
FORMS = [(DOCUMENT, encode_document, decode_document), (ROOT, encode_root, decode_root)]
Encode = Callable[[dict[str, Any]], bytes]
Decode = Callable[[bytes, str], dict[str, Any]]


@pytest.mark.parametrize(("document", "encode", "decode"), FORMS)
def test_round_trip(document: dict[str, Any], encode: Encode, decode: Decode) -> None:
    assert decode(encode(document), "x") == document
    json.loads(encode(document))


@pytest.mark.parametrize(("document", "encode", "decode"), FORMS)
def test_every_flipped_bit_is_found(document: dict[str, Any], encode: Encode, decode: Decode) -> None:
    data = encode(document)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError, match="step/x"):
            decode(bytes(damaged), "step/x")


@pytest.mark.parametrize(("document", "encode", "decode"), FORMS)
def test_every_truncation_is_found(document: dict[str, Any], encode: Encode, decode: Decode) -> None:
    data = encode(document)
    for size in range(len(data)):
        with pytest.raises(CheckpointCorruptError):
            decode(data[:size], "x")


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
        encode_document({"a": "\ud800"}),
        encode_root({"attributes": {"ckpt": {"a": "\udfff"}}}),
    ],
    ids=lambda data: repr(data[:10]),
)
@pytest.mark.parametrize("decode", [decode_document, decode_root])
def test_invalid_documents(data: bytes, decode: Decode) -> None:
    with pytest.raises(CheckpointCorruptError, match="where"):
        decode(data, "where")
