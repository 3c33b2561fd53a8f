"""Small packs for tests of readers: arrays written one after the other by a few ranks, and their index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import PackIndex, StoredArray, chunk_number
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.regions import Region
from tests.ckpt.storage.chunks import job

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Pack:
    """A pack of rank 0 below `root`, with a file for each array."""

    root: Path
    index: PackIndex

    def file(self, number: int = 0) -> Path:
        return self.root / pack_file(0, number)

    def place(self, index: tuple[int, ...], number: int = 0) -> tuple[int, int]:
        """Return where a chunk of an array begins in its file, and its size."""
        place = self.index.place(self.index.arrays[number], index)
        return place.offset, place.nbytes


def write_pack(root: Path, arrays: dict[str, tuple[ArrayMeta, Array]]) -> Pack:
    """Write arrays by name."""
    writer = PackWriter(str(root), 0)
    stored, regions, table = [], [], {}
    for number, (name, (meta, array)) in enumerate(arrays.items()):
        region = None
        if 0 not in meta.shape:
            file, chunks = job(meta, array, number)
            written = writer.write(file)
            region = len(regions)
            same = np.zeros(len(chunks), np.int64)
            regions.append(Region(same, same + number, np.array([chunk.offset for chunk in chunks])))
            assert [chunk_number(chunk.index, meta.grid_shape) for chunk in chunks] == list(range(len(chunks)))
            table |= {(number, copy): (number, at, nbytes) for _, copy, at, nbytes in written.chunks}
        origin = (0,) * len(meta.shape)
        stored.append(StoredArray(number, (name,), meta, region, 0, origin, meta.shape))
    writer.finish()
    return Pack(root, PackIndex(tuple(stored), tuple(regions), lambda rank: table))
