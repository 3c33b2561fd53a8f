"""The content of a step, by a reader that shares no code with the package: `tests.ckpt.interop.standalone_reader`.

It trusts the documents, so it reads what they describe. This module adds Blosc, a faster CRC, and a count of how often
each element is stored. It does not look at the checksums of whole files, which only `validate` reads.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import Blosc

from ckpt.storage.documents import canonical_json
from tests.ckpt.interop import standalone_reader

Contents = tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]
"""Tensors: dtype, shape, bytes; values: their form in JSON. By name; ``<name>@rank<r>`` belongs to one rank."""


class _Packs(dict[tuple[int, int], tuple[bytes, None]]):
    """Files that are read when they are needed, so that one that belongs to nothing may be damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, place: tuple[int, int]) -> tuple[bytes, None]:
        rank, file = place
        self[place] = (self._folder / f"packs/{rank // 512:03d}/rank_{rank:05d}_{file:03d}").read_bytes(), None
        return self[place]

    def items(self) -> Any:
        return ()  # their checksums are not looked at


class _Step(standalone_reader.Step):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = _document(folder, "zarr.json")["attributes"]["ckpt"]
        self.state, self.index = _document(folder, "state.json"), _document(folder, "index.json")
        self.regions = [
            {name: standalone_reader.numbers(runs) for name, runs in region.items()} for region in self.index["regions"]
        ]
        self.packs, self.checksums = _Packs(folder), {}
        self.counts: dict[Any, Any] = {}
        self._table: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        if any("compression" in entry for entry in self.index["arrays"]):
            for rank in range(about["world_size"]):
                part = _document(folder, f"parts/{rank // 512:03d}/rank_{rank:05d}.json")
                for array, copy, *place in part.get("chunks", []):
                    assert self._table.setdefault((rank, array, copy), tuple(place)) == tuple(place)

    def _array(self, entry: Any) -> Any:
        whole = self._compressed(entry) if "compression" in entry else super()._array(entry)
        key, zeros = (tuple(entry["path"]), entry.get("rank")), np.zeros(entry.get("tensor_shape", whole.shape), int)
        count = self.counts.setdefault(key, zeros)
        offset = entry.get("box_offset", [0] * whole.ndim)
        count[tuple(slice(o, o + n) for o, n in zip(offset, whole.shape, strict=True))] += 1
        return whole

    def _compressed(self, entry: Any) -> Any:
        shape, chunk, inner = entry["shape"], entry["chunk"], entry.get("inner", entry["chunk"])
        number = next(number for number, each in enumerate(self.index["arrays"]) if each is entry)
        whole = np.zeros(shape, f"V{standalone_reader.ITEM_BYTES.get(entry['dtype'], 1)}")
        for k, index in enumerate(product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)))):
            rank = self.regions[entry["region"]]["ranks"][k]
            file, offset, size = self._table[rank, number, k]
            data = self.packs[rank, file][0][offset : offset + size]
            corners = list(product(*(range(0, c, i) for c, i in zip(chunk, inner, strict=True))))
            pieces = [data]
            if "inner" in entry:
                table = np.frombuffer(_checked(data[-16 * len(corners) - 4 :]), "<u8").reshape(-1, 2).tolist()
                pieces = [data[start : start + length] for start, length in table]
            for corner, piece in zip(corners, pieces, strict=True):
                first = [i * c + o for i, c, o in zip(index, chunk, corner, strict=True)]
                part = whole[(*(slice(a, a + n) for a, n in zip(first, inner, strict=True)), ...)]
                if part.size:
                    elements = np.frombuffer(Blosc().decode(_checked(piece)), whole.dtype).reshape(inner)
                    part[...] = elements[(*map(slice, part.shape), ...)]
        return whole


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


def _document(folder: Path, name: str) -> Any:
    return standalone_reader.parsed((folder / name).read_bytes())


def _checked(data: bytes) -> bytes:
    assert google_crc32c.value(data[:-4]) == int.from_bytes(data[-4:], "little"), "damaged chunk"
    return data[:-4]


standalone_reader.crc32c = google_crc32c.value
standalone_reader.checked = _checked
