import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import decode_document, decode_root, encode_document, encode_root

DOCUMENT = {"step": 7, "name": "\u00e9\n", "zero": -0.0, "rate": 1e-8, "list": [1, {"b": None, "a": True}]}
ROOT = {"zarr_format": 3, "node_type": "group", "attributes": {"ckpt": {"step": 7}, "other": 1}}
SEALS = [(DOCUMENT, encode_document, decode_document), (ROOT, encode_root, decode_root)]
Seal = Callable[[dict[str, Any]], bytes]
Unseal = Callable[[bytes, str], dict[str, Any]]


@pytest.mark.parametrize(("document", "encode_document", "decode_document"), SEALS)
def test_seal_round_trip(document: dict[str, Any], encode_document: Seal, decode_document: Unseal) -> None:
    assert decode_document(encode_document(document), "x") == document
    json.loads(encode_document(document))


@pytest.mark.parametrize(("document", "encode_document", "decode_document"), SEALS)
def test_every_flipped_bit_is_found(document: dict[str, Any], encode_document: Seal, decode_document: Unseal) -> None:
    data = encode_document(document)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError, match="step/x"):
            decode_document(bytes(damaged), "step/x")


@pytest.mark.parametrize(("document", "encode_document", "decode_document"), SEALS)
def test_every_truncation_is_found(document: dict[str, Any], encode_document: Seal, decode_document: Unseal) -> None:
    data = encode_document(document)
    for size in range(len(data)):
        with pytest.raises(CheckpointCorruptError):
            decode_document(data[:size], "x")


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
@pytest.mark.parametrize("decode_document", [decode_document, decode_root])
def test_what_is_no_sealed_document(data: bytes, decode_document: Unseal) -> None:
    with pytest.raises(CheckpointCorruptError, match="where"):
        decode_document(data, "where")
