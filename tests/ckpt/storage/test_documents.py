import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import seal, seal_root, unseal, unseal_root

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
        seal({"a": "\ud800"}),
        seal_root({"attributes": {"ckpt": {"a": "\udfff"}}}),
    ],
    ids=lambda data: repr(data[:10]),
)
@pytest.mark.parametrize("unseal", [unseal, unseal_root])
def test_what_is_no_sealed_document(data: bytes, unseal: Unseal) -> None:
    with pytest.raises(CheckpointCorruptError, match="where"):
        unseal(data, "where")
