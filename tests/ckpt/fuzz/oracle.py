"""The content of a step, by a reader that shares no code with the package: `tests.ckpt.interop.standalone_reader`.

It trusts the documents, so it reads what they describe. This module adds zstd, a faster CRC, and a count of how often
each element is stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import Zstd

from ckpt.storage.documents import canonical_json
from tests.ckpt.interop import standalone_reader

__all__ = ["contents"]

Contents = tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]
"""Tensors: dtype, shape, bytes; values: their form in JSON. By name; ``<name>@rank<r>`` belongs to one rank."""


class _Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class _Step(standalone_reader.Step):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = standalone_reader.parsed((folder / "zarr.json").read_bytes())
        self.state = standalone_reader.parsed((folder / "state.json").read_bytes())
        nodes = root["consolidated_metadata"]["metadata"]
        self.arrays = {name: node for name, node in nodes.items() if node["node_type"] == "array"}
        self.checksums = _AnyChecksum()
        self.counts: dict[Any, Any] = {}

    def _add(self, found: Any, path: Any, about: Any, dtype: str, box: Any) -> None:
        super()._add(found, path, about, dtype, box)
        none = np.zeros(about.get("tensor_shape", box.shape), int)
        count = self.counts.setdefault((tuple(path), about.get("rank")), none)
        offset = about.get("box_offset", [0] * box.ndim)
        count[tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))] += 1


class _AnyChecksum(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return _Anything()


def contents(step: Path) -> Contents:
    """Return the content of a step. Raises any error if it cannot be read or an element is not stored exactly once."""
    reader = _Step(step)
    tensors = {_name(*key): value for key, value in reader.tensors().items()}
    for count in reader.counts.values():
        assert (count == 1).all(), "an element is not stored exactly once"
    form = {_name(tuple(name), rank): canonical_json(value).decode() for name, rank, value in reader.state["values"]}
    return tensors, form


def _name(path: tuple[str | int, ...], rank: int | None) -> str:
    from ckpt.paths import display

    return display(path) + ("" if rank is None else f"@rank{rank}")


def _checked(data: bytes) -> bytes:
    assert google_crc32c.value(data[:-4]) == int.from_bytes(data[-4:], "little"), "damaged chunk"
    body = data[:-4]
    return bytes(Zstd().decode(body)) if body[:4] == b"\x28\xb5\x2f\xfd" else body


standalone_reader.crc32c = google_crc32c.value
standalone_reader.checked = _checked
