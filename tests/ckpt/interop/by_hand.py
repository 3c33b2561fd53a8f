"""Steps written by hand: with the layouts of more ranks than a test can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.native import crc32c
from ckpt.saving.for_readers import database_files
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.documents import digest, encode_document, encode_root
from ckpt.storage.pack_index import PackIndex, Region, StoredArray
from ckpt.storage.zarr_entries import Hierarchy
from ckpt.storage.zarr_names import references
from tests.ckpt.storage.chunks import inner_chunk_array

WORLD_SIZE = 520
_EMPTY: dict[str, Any] = {"values": [], "aliases": [], "containers": []}


@dataclass
class Layouts:
    """Arrays and their contents, each in a region of its own."""

    arrays: list[StoredArray] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    contents: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def add(
        self,
        name: str | tuple[str | int, ...],
        shape: tuple[int, ...],
        chunk: tuple[int, ...],
        ranks: Sequence[int],
        *,
        dtype: str = "float32",
        inner: tuple[int, ...] | None = None,
        starts: Sequence[int] | None = None,
        box: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        rank: int | None = None,
    ) -> None:
        """Add an array with random bits, of the path `name`. `box` is its offset in its tensor, and its shape."""
        meta = ArrayMeta(shape, dtype, chunk, inner)
        number = len(self.arrays)
        offset, whole = box or ((0,) * len(shape), shape)
        region = len(self.regions) if ranks else None
        path = tuple(name.split("/")) if isinstance(name, str) else name
        self.arrays.append(StoredArray(number, path, meta, region, 0, offset, whole, rank))
        if ranks:
            at = np.array([0] * len(ranks) if starts is None else starts, np.int64)
            file = np.full(len(ranks), number, np.int64)
            self.regions.append(Region(np.array(ranks, np.int64), file, at))
        raw = np.random.default_rng(number).integers(0, 256, (*meta.shape, meta.stored.itemsize), np.uint8)
        stored = meta.stored
        self.contents.append(raw.view(stored.numpy_dtype).reshape((*shape, *stored.trailing)))

    @property
    def index(self) -> PackIndex:
        return PackIndex(tuple(self.arrays), tuple(self.regions))


def layouts() -> Layouts:
    """Return arrays with the owners that parallel training gives them, on `WORLD_SIZE` ranks."""
    made = Layouts()
    made.add("even", (24, 5), (4, 5), range(6))
    made.add("uneven", (22, 5), (4, 5), range(6), inner=(1, 5), dtype="bfloat16")
    made.add("mesh/in order", (11, 15), (4, 4), [4 * i + j for i in range(3) for j in range(4)], inner=(2, 4))
    made.add("mesh/transposed", (11, 15), (4, 4), [i + 3 * j for i in range(3) for j in range(4)], inner=(4, 1))
    made.add("mesh/strided", (6, 8), (3, 2), [7 + 500 * i + 3 * j for i in range(2) for j in range(4)], dtype="int16")
    deep = [5 + 100 * i + 20 * k + 3 * j for i in range(2) for j in range(3) for k in range(4)]
    made.add("mesh/deep", (4, 3, 7), (2, 1, 2), deep, dtype="complex32")
    made.add("two chunks each", (13, 4), (2, 4), [r for r in range(4) for _ in range(2)][:7], starts=[0, 48] * 3 + [0])
    made.add("irregular", (7,), (1,), [3, 511, 512, 3, 9, 1, 519], starts=[0, 0, 0, 16, 0, 32, 16], dtype="float8_e5m2")
    made.add("replicated", (3, 2), (3, 2), [2], dtype="int64")
    made.add("scalar", (), (), [1], dtype="float64")
    made.add("empty", (0, 3), (1, 3), [])
    for rank in (0, 3, 515):
        made.add("own", (rank % 7 + 1, 2), (rank % 7 + 1, 2), [rank], rank=rank)
    for rank, (first, rows) in enumerate([(0, 3), (3, 1), (4, 6)]):
        made.add("boxes", (rows, 3), (rows, 3), [rank], box=((first, 0), (10, 3)), dtype="uint8")
    return made


def write_step(step: Path, index: PackIndex, contents: Sequence[np.ndarray[Any, Any]], world_size: int) -> None:
    """Write a step without values and without compressed arrays. `contents` are the elements as they are stored."""
    packs: dict[str, bytearray] = {}
    checksums: dict[str, dict[int, bytes]] = {}  # by offset
    for array, elements in zip(index.arrays, contents, strict=True):
        for position in array.meta.chunk_indices():
            layout, place = array.meta.layout(position), index.place(array, position)
            chunk = memoryview(bytearray(layout.encoded_bytes))
            for inner in layout.inner_chunks:
                box = tuple(slice(o, o + n) for o, n in zip(inner.origin, inner.shape, strict=True))
                inner_chunk_array(array.meta, layout, inner, chunk)[...] = elements[(*box, ...)]
                end = inner.offset + layout.inner_chunk_bytes
                crc = crc32c(chunk[inner.offset : end]).to_bytes(4, "little")
                chunk[end : end + 4] = crc
                checksums.setdefault(place.file, {})[place.offset + inner.offset] = crc
            chunk[layout.index_offset :] = layout.index
            pack = packs.setdefault(place.file, bytearray())
            pack.extend(bytes(max(0, place.offset + place.nbytes - len(pack))))
            assert not any(pack[place.offset : place.offset + place.nbytes]), "chunks overlap"
            pack[place.offset : place.offset + place.nbytes] = chunk
    files: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for file, pack in sorted(packs.items()):
        (step / file).parent.mkdir(parents=True, exist_ok=True)
        (step / file).write_bytes(pack)
        rank, number = map(int, file.split("/rank_")[1].split("_"))
        crcs = b"".join(crc for _, crc in sorted(checksums[file].items()))
        files[rank].append([number, len(pack), crc32c(crcs)])
    _write_documents(step, index, files)


def _write_documents(step: Path, index: PackIndex, files: dict[int, list[list[int]]]) -> None:
    about: dict[str, Any] = {"save": "by-hand", "plan": "none", "world_size": len(files)}
    written = {
        "index": encode_document(index.to_document()),
        "state": encode_document(dict(_EMPTY)),
        "references": references(index),
    }
    summary = {name: {"bytes": len(data), "crc32c": crc32c(data)} for name, data in written.items()}
    database = database_files(Hierarchy.of(index))
    summary |= {name: digest(data) for name, data in database.items()}
    parts = []
    for rank, of_rank in files.items():
        part = encode_document({**about, **_EMPTY, "rank": rank, "files": of_rank, "times": {}})
        path = step / f"parts/{rank // 512:03d}/rank_{rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(part)
        parts.append(crc32c(part))
    every = [file for of_rank in files.values() for file in of_rank]
    about |= {"format": 2, "step": 1, "owner": 1, "continues": None, "restart": None, "metrics": {}}
    about["versions"] = {"ckpt": "0.1.0", "torch": "2.13.0"}
    about |= {"bytes": sum(size for _, size, _ in every), "files": len(every), "tensors": len(index.arrays)}
    root = {"zarr_format": 3, "node_type": "group", "attributes": {"ckpt": {**about, **summary, "parts": parts}}}
    (step / "zarr.json").write_bytes(encode_root(root))
    (step / "intent.json").write_bytes(encode_document(about))
    for name, data in written.items():
        (step / f"{name}.json").write_bytes(data)
    for name, data in database.items():
        (step / name).write_bytes(data)
