"""Steps with documents whose checksums are correct, but which no writer would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.native import crc32c
from ckpt.storage.documents import decode_document, decode_root, encode_document, encode_root

__all__ = ["reseal_part", "reseal_root", "rename_array"]


def reseal_root(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = decode_root((step / "zarr.json").read_bytes(), "zarr.json")
    change(document)
    (step / "zarr.json").write_bytes(encode_root(document))


def reseal_part(step: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a part, and update its checksum in the root document."""
    file = step / f"parts/000/rank_{rank:05d}.json"
    part = decode_document(file.read_bytes(), file.name)
    change(part)
    file.write_bytes(encode_document(part))
    reseal_root(step, lambda root: root["attributes"]["ckpt"]["parts"].__setitem__(rank, crc32c(file.read_bytes())))


def rename_array(step: Path, old: str, new: str) -> None:
    """Change the directory of an array from `old` to `new` in the root document and in the part of rank 0."""

    def in_part(part: dict[str, Any]) -> None:
        part["arrays"][new] = part["arrays"].pop(old)
        part["chunks"][new] = part["chunks"].pop(old)

    def in_root(root: dict[str, Any]) -> None:
        nodes = root["consolidated_metadata"]["metadata"]
        nodes[new] = json.loads(json.dumps(nodes.pop(old)))

    reseal_root(step, in_root)
    reseal_part(step, 0, in_part)
