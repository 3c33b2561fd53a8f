"""The index of a step: where in the packs each chunk of each array lies. Free of torch.

A *pack* is what one rank writes: files with encoded Zarr chunks, one behind the other. Ranks that write chunks of the
same arrays mostly have them in the same order, so that is recorded once for all of them. A *region* is a run of bytes
that several packs have, each somewhere: copy `k` of it holds chunk number `k` (in C order of the chunk grid) of every
array in the region, each array at its own offset. So the index grows with the number of tensors plus that of ranks, not
with their product, and where a chunk lies is found without looking at any other chunk.

    index.json    arrays:  path, dtype, shape, chunks; region, offset in it
                  regions: for each copy the rank, the number of the file in its pack, the byte where it starts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt.paths import Path
from ckpt.storage.array_metadata import ArrayMeta

__all__ = ["ALIGNMENT", "ChunkPlace", "PackIndex", "Region", "StoredArray", "Table", "chunk_number", "pack_file"]

ALIGNMENT = 16
"""Chunks begin at multiples of this in a file."""

_RANKS_PER_DIRECTORY = 512

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def pack_file(rank: int, number: int) -> str:
    """Return the path of a file of a rank's pack, relative to the step."""
    return f"packs/{rank // _RANKS_PER_DIRECTORY:03d}/rank_{rank:05d}_{number:03d}"


@dataclass(frozen=True, eq=False)
class Region:
    """The copies of a region: `ranks`, `files` and `starts`, by number of the copy. All int64, 1-d, of one length."""

    ranks: Numbers
    files: Numbers
    starts: Numbers

    def to_document(self) -> dict[str, Any]:
        """Return the region as JSON: each column as runs of [first, count, step]."""
        return {"ranks": _runs(self.ranks), "files": _runs(self.files), "starts": _runs(self.starts)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], most: int) -> Region:
        """Return the region that a document describes; ValueError unless it has 1 to `most` copies."""
        columns = [_numbers(document[name], most) for name in ("ranks", "files", "starts")]
        if not len(columns[0]) == len(columns[1]) == len(columns[2]):
            raise ValueError("the columns of a region differ in length")
        return cls(*columns)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in the packs: a tensor, or a box of it (`box_offset` in one of `tensor_shape`), or that of one `rank`.

    `number` is its place in the index. `region` is None where there are no chunks, because the array has no elements;
    `offset` is that in the region.
    """

    number: int
    path: Path
    meta: ArrayMeta
    region: int | None
    offset: int
    box_offset: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    rank: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the array is a whole tensor."""
        return self.meta.shape == self.tensor_shape

    def to_document(self) -> dict[str, Any]:
        """Return the entry of the index."""
        meta = self.meta
        document: dict[str, Any] = {
            "path": list(self.path),
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "chunk": list(meta.chunk_shape),
        }
        if meta.inner_chunk_shape is not None:
            document["inner"] = list(meta.inner_chunk_shape)
        if meta.compression is not None:
            document["compression"] = meta.compression
        if self.region is not None:
            document |= {"region": self.region, "offset": self.offset}
        if not self.is_whole:
            document |= {"box_offset": list(self.box_offset), "tensor_shape": list(self.tensor_shape)}
        if self.rank is not None:
            document["rank"] = self.rank
        return document


class ChunkPlace(NamedTuple):
    """Where an encoded chunk lies: a file relative to the step, and a range of bytes in it."""

    file: str
    offset: int
    nbytes: int


Table = Mapping[tuple[int, int], tuple[int, int, int]]
"""Where the compressed chunks in a rank's pack lie: by number of array and copy, the file, the offset, the bytes."""


@dataclass(frozen=True, eq=False)
class PackIndex:
    """All arrays of a step and the regions they lie in.

    Of a compressed array the region says only which rank has each chunk: `table` returns where they are in its pack, as
    its part manifest records it.
    """

    arrays: tuple[StoredArray, ...]
    regions: tuple[Region, ...]
    table: Callable[[int], Table] | None = None

    def to_document(self) -> dict[str, Any]:
        """Return the index as JSON."""
        return {
            "arrays": [array.to_document() for array in self.arrays],
            "regions": [region.to_document() for region in self.regions],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], world_size: int) -> PackIndex:
        """Return the index that `to_document` has made."""
        most = max([1, *(math.prod(entry["shape"]) for entry in document["arrays"])])
        regions = tuple(Region.from_document(region, most) for region in document["regions"])
        return cls(tuple(_array(number, entry) for number, entry in enumerate(document["arrays"])), regions)

    def files(self) -> dict[tuple[int, int], int]:
        """Return the size of each file of uncompressed chunks, by rank and number of the file."""
        last = {array.region: array for array in self.arrays if array.region is not None}  # has the highest offset
        sizes: dict[tuple[int, int], int] = {}
        for number, region in enumerate(self.regions):
            array = last[number]
            bytes_of = array.meta.file_bytes
            even = not any(size % part for size, part in zip(array.meta.shape, array.meta.chunk_shape, strict=True))
            whole = bytes_of((0,) * len(array.meta.shape))
            grid = array.meta.grid_shape
            columns = zip(region.ranks.tolist(), region.files.tolist(), region.starts.tolist(), strict=True)
            for copy, (rank, file, start) in enumerate(columns):
                nbytes = whole if even else bytes_of(unravel(copy, grid))
                sizes[rank, file] = max(sizes.get((rank, file), 0), start + array.offset + nbytes)
        return sizes

    def place(self, array: StoredArray, index: tuple[int, ...]) -> ChunkPlace:
        """Return where the chunk at `index` of the grid of an array lies."""
        assert array.region is not None
        region, copy = self.regions[array.region], chunk_number(index, array.meta.grid_shape)
        rank = int(region.ranks[copy])
        if array.meta.compression is None:
            at = int(region.starts[copy]) + array.offset
            return ChunkPlace(pack_file(rank, int(region.files[copy])), at, array.meta.file_bytes(index))
        assert self.table is not None
        file, at, nbytes = self.table(rank)[array.number, copy]
        return ChunkPlace(pack_file(rank, file), at, nbytes)


def chunk_number(index: tuple[int, ...], grid_shape: tuple[int, ...]) -> int:
    """Return the number of a chunk, in C order of the grid."""
    number = 0
    for position, size in zip(index, grid_shape, strict=True):
        number = number * size + position
    return number


def unravel(number: int, grid_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of chunk `number`, in C order of the grid."""
    position = []
    for size in reversed(grid_shape):
        number, index = divmod(number, size)
        position.append(index)
    return tuple(reversed(position))


def _array(number: int, entry: Mapping[str, Any]) -> StoredArray:
    path, shape = tuple(entry["path"]), tuple(entry["shape"])
    about: dict[str, Any] = {"name": list(path)}
    about |= {key: entry[key] for key in ("rank", "box_offset", "tensor_shape") if key in entry}
    inner = None if "inner" not in entry else tuple(entry["inner"])
    meta = ArrayMeta(shape, entry["dtype"], tuple(entry["chunk"]), inner, entry.get("compression"), {"ckpt": about})
    box_offset = tuple(entry.get("box_offset", (0,) * len(shape)))
    tensor_shape = tuple(entry.get("tensor_shape", shape))
    region, offset = entry.get("region"), entry.get("offset", 0)
    return StoredArray(number, path, meta, region, offset, box_offset, tensor_shape, entry.get("rank"))


def _runs(numbers: Numbers) -> list[list[int]]:
    """Return the numbers as runs of [first, count, step]."""
    runs: list[list[int]] = []
    for number in numbers.tolist():
        if runs and runs[-1][1] == 1:
            runs[-1][1:] = 2, number - runs[-1][0]
        elif runs and number == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1, 0])
    return runs


def _numbers(runs: Any, most: int) -> Numbers:
    """Return the numbers that `_runs` has encoded; ValueError unless they are 1 to `most` non-negative integers."""
    total = 0
    for first, count, step in runs:
        if not type(first) is type(count) is type(step) is int or count < 1:
            raise ValueError(f"{[first, count, step]!r:.80} is not a run of numbers")
        total += count
        if total > most or min(first, first + (count - 1) * step) < 0 or max(first, first + count * step) >= 1 << 62:
            raise ValueError(f"{[first, count, step]!r:.80} is not a run of numbers of a region")
    if not total:
        raise ValueError("a region has no copies")
    return np.concatenate([first + step * np.arange(count, dtype=np.int64) for first, count, step in runs])
