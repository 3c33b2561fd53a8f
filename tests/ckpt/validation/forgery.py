"""Steps with documents whose checksums are correct, but which no writer would write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.native import crc32c
from ckpt.storage.documents import decode_document, decode_root, encode_document, encode_root


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


def reseal_index(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index, and update its checksum in the root document."""
    file = step / "index.json"
    index = decode_document(file.read_bytes(), file.name)
    change(index)
    data = encode_document(index)
    file.write_bytes(data)
    about = {"bytes": len(data), "crc32c": crc32c(data)}
    reseal_root(step, lambda root: root["attributes"]["ckpt"].update(index=about))


def array_of(index: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return the entry of a tensor in an index."""
    found: dict[str, Any] = next(array for array in index["arrays"] if array["path"] == list(path))
    return found
