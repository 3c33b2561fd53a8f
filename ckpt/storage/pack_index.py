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

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.regions import ALIGNMENT, FilePlaces, Region, chunk_sizes, regions_from_documents

__all__ = [
    "ALIGNMENT",
    "ChunkPlace",
    "PackIndex",
    "Region",
    "StoredArray",
    "Table",
    "chunk_number",
    "pack_file",
    "unravel",
]

_RANKS_PER_DIRECTORY = 512
_MAX_BYTES = 1 << 60


def pack_file(rank: int, number: int) -> str:
    """Return the path of a file of a rank's pack, relative to the step."""
    return f"packs/{rank // _RANKS_PER_DIRECTORY:03d}/rank_{rank:05d}_{number:03d}"


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
    def from_document(
        cls, document: Mapping[str, Any], world_size: int, table: Callable[[int], Table] | None = None
    ) -> PackIndex:
        """Return the index that a document describes, after checking it; it may come from anywhere.

        ValueError, or another error of a wrong structure, unless it is one that `to_document` may have made: all
        numbers are possible, each region has a copy for every chunk of its arrays, and no two chunks overlap.
        """
        if type(document["arrays"]) is not list or type(document["regions"]) is not list:
            raise ValueError("the arrays or regions are no list")
        regions = regions_from_documents(document["regions"], world_size)
        arrays = tuple(_array(number, entry, world_size) for number, entry in enumerate(document["arrays"]))
        index = cls(arrays, regions, table)
        index._check_regions()
        if index._places().overlap():
            raise ValueError("two regions overlap in a file")
        return index

    def files(self) -> dict[tuple[int, int], int]:
        """Return the size of each file, by rank and number of the file; before compression, if there is any."""
        return self._places().file_sizes()

    def arrays_of_regions(self) -> list[list[StoredArray]]:
        """Return the arrays in each region, by offset."""
        arrays: list[list[StoredArray]] = [[] for _ in self.regions]
        for array in self.arrays:
            if array.region is not None:
                arrays[array.region].append(array)
        for members in arrays:
            members.sort(key=lambda array: array.offset)
        return arrays

    def _places(self) -> FilePlaces:
        last = [members[-1] for members in self.arrays_of_regions()]
        return FilePlaces.of(self.regions, [array.offset + chunk_sizes(array.meta) for array in last])

    def _check_regions(self) -> None:
        for region, members in zip(self.regions, self.arrays_of_regions(), strict=True):
            end, copies = 0, len(region.ranks)
            if not members:
                raise ValueError("a region has no arrays")
            for array in members:
                if array.offset < end or math.prod(array.meta.grid_shape) != copies:
                    name = display(array.path)
                    raise ValueError(f"{name} overlaps with another array, or its region has too few or many copies")
                end = array.offset + array.meta.file_bytes((0,) * len(array.meta.shape))  # no chunk is larger
            if end >= _MAX_BYTES:
                raise ValueError(f"a region has {end} bytes")

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


def _array(number: int, entry: Mapping[str, Any], world_size: int) -> StoredArray:
    path, shape = tuple(entry["path"]), tuple(entry["shape"])
    region, offset, rank = entry.get("region"), entry.get("offset", 0), entry.get("rank")
    if set(map(type, path)) - {str, int}:
        raise ValueError(f"{path!r:.80} is not a path of strings and integers")
    if {type(region), type(rank)} - {int, type(None)} or type(offset) is not int:
        raise ValueError(f"{display(path)} has the place {region!r:.20}, {offset!r:.20}, {rank!r:.20}")
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"{display(path)} is of rank {rank} of {world_size}")
    about: dict[str, Any] = {"name": list(path)}
    about |= {key: entry[key] for key in ("rank", "box_offset", "tensor_shape") if key in entry}
    inner = None if "inner" not in entry else tuple(entry["inner"])
    meta = ArrayMeta(shape, entry["dtype"], tuple(entry["chunk"]), inner, entry.get("compression"), {"ckpt": about})
    box_offset = tuple(entry.get("box_offset", (0,) * len(shape)))
    tensor_shape = tuple(entry.get("tensor_shape", shape))
    _check_sizes(path, meta, box_offset, tensor_shape)
    if (region is None) != (0 in shape) or (region is not None and region < 0):
        raise ValueError(f"{display(path)} has shape {list(shape)}, but is in region {region}")
    if offset % ALIGNMENT or not 0 <= offset < _MAX_BYTES:
        raise ValueError(f"{display(path)} begins at byte {offset} of its region")
    array = StoredArray(number, path, meta, region, offset, box_offset, tensor_shape, rank)
    if array.to_document() != entry:
        raise ValueError(f"the entry of {display(path)} is not as this package writes it")
    return array


def _check_sizes(path: Path, meta: ArrayMeta, box_offset: tuple[int, ...], tensor_shape: tuple[int, ...]) -> None:
    """Raise ValueError for what would be too large for numpy or the file system, and for boxes that are none."""
    if not len(box_offset) == len(tensor_shape) == len(meta.shape):
        raise ValueError(f"the box of {display(path)} does not have the dimensions of the tensor")
    for value in (*box_offset, *tensor_shape):
        if type(value) is not int or not 0 <= value < _MAX_BYTES:
            raise ValueError(f"{display(path)} has a box with {value!r:.40}")
    try:
        itemsize = meta.stored.itemsize
    except (StateError, TypeError):
        raise ValueError(f"{display(path)} has the dtype {meta.dtype!r:.80}, which cannot be stored") from None
    shapes = (meta.shape, meta.chunk_shape, tensor_shape)
    if any(math.prod(filter(None, shape)) * itemsize >= _MAX_BYTES for shape in shapes):
        raise ValueError(f"{display(path)} has an impossible shape: {list(tensor_shape)!r:.80}")
