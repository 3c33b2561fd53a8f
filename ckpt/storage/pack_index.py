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

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.compression import Compression
from ckpt.storage.dtypes import stored
from ckpt.storage.names import pack_file
from ckpt.storage.regions import ALIGNMENT, FilePlaces, Numbers, Region, chunk_sizes, regions_from_documents

__all__ = [
    "ALIGNMENT",
    "ChunkPlace",
    "PackIndex",
    "Region",
    "StoredArray",
    "Table",
    "chunk_number",
]

_MAX_BYTES = 1 << 60
_MAX_PADDING = 2  # the elements of a chunk, divided by those of its array


class StoredArray(NamedTuple):
    """An array in the packs: a tensor, or a box of it (`box_offset` in one of `tensor_shape`), or that of one `rank`.

    `number` is its place in the index. `region` is None where there are no chunks, because the array has no elements;
    `offset` is that in the region. A named tuple: of ten thousand, a frozen dataclass takes ten times as long to make.
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

    @property
    def is_one_block(self) -> bool:
        """Whether the array is a whole tensor, contiguous in the file."""
        return self.meta.is_one_block and self.is_whole and self.region is not None

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
            document["compression"] = meta.compression.to_document()
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
    its part manifest records it. `compared` has the shards whose index was read and is as it must be, by the number of
    the array and the index of the chunk: it need not be read again.
    """

    arrays: tuple[StoredArray, ...]
    regions: tuple[Region, ...]
    table: Callable[[int], Table] | None = None
    compared: set[tuple[int, tuple[int, ...]]] = field(default_factory=set, init=False, repr=False)

    def to_document(self) -> dict[str, Any]:
        """Return the index as JSON."""
        return {
            "arrays": [array.to_document() for array in self.arrays],
            "regions": [region.to_document() for region in self.regions],
        }

    @classmethod
    def from_document(
        cls,
        document: Mapping[str, Any],
        world_size: int,
        table: Callable[[int], Table] | None = None,
        stored_bytes: Callable[[], int] | None = None,
    ) -> PackIndex:
        """Return the index that a document describes, after checking it; it may come from anywhere.

        `stored_bytes` returns the size of all files that it may describe; see `regions_from_documents`.

        ValueError, or another error of a wrong structure, unless it is one that `to_document` may have made: all
        numbers are possible, each region has a copy for every chunk of its arrays, and no two chunks overlap.
        """
        if type(document["arrays"]) is not list or type(document["regions"]) is not list:
            raise ValueError("the arrays or regions are no list")
        regions = regions_from_documents(document["regions"], world_size, stored_bytes)
        index = cls(_arrays(document["arrays"], world_size), regions, table)
        index._check_regions()
        if index._places.overlap():
            raise ValueError("two regions overlap in a file")
        return index

    @functools.cached_property
    def compressed(self) -> bool:
        """Whether any array is compressed: then readers need the part manifests, and sizes of files vary."""
        return any(map(attrgetter("meta.compression"), self.arrays))

    @functools.cached_property
    def first_copies(self) -> Numbers:
        """The rank, the number of the file and the byte where it starts, of the first copy of each region: in rows."""
        return np.array([(each.ranks[0], each.files[0], each.starts[0]) for each in self.regions], np.int64).T

    def files(self) -> dict[tuple[int, int], int]:
        """Return the size of each file, by rank and number of the file; before compression, if there is any."""
        return self._places.file_sizes()

    def arrays_of_regions(self) -> list[list[StoredArray]]:
        """Return the arrays in each region, by offset."""
        arrays: list[list[StoredArray]] = [[] for _ in self.regions]
        for array in self.arrays:
            if array.region is not None:
                arrays[array.region].append(array)
        for members in arrays:
            members.sort(key=lambda array: array.offset)
        return arrays

    @functools.cached_property
    def array_places(self) -> Numbers:
        """Where the first chunk of each array is, in rows: the region or -1, the offset there, the most bytes."""
        regions = [-1 if region is None else region for region in map(attrgetter("region"), self.arrays)]
        offsets = list(map(attrgetter("offset"), self.arrays))
        return np.array([regions, offsets, list(map(attrgetter("meta.largest_encoded_bytes"), self.arrays))], np.int64)

    @functools.cached_property
    def _in_regions(self) -> Numbers:
        """The numbers of the arrays that are in regions, by region and offset."""
        region, offset, _ = self.array_places
        order: Numbers = np.lexsort((offset, region))
        return order[np.searchsorted(region[order], 0) :]

    @functools.cached_property
    def _places(self) -> FilePlaces:
        members = self._in_regions
        region = self.array_places[0, members]
        last = members[np.flatnonzero(np.append(region[1:] != region[:-1], len(region) > 0))]
        arrays = [self.arrays[number] for number in last.tolist()]
        return FilePlaces.of(self.regions, [array.offset + chunk_sizes(array.meta) for array in arrays])

    def _check_regions(self) -> None:
        members = self._in_regions
        region, offset, nbytes = self.array_places[:, members]
        if len(region) and region[-1] >= len(self.regions):
            raise ValueError(f"an array is in region {region[-1]}, and there are {len(self.regions)}")
        if not np.bincount(region, minlength=len(self.regions)).all():
            raise ValueError("a region has no arrays")
        if max(offset.max(initial=0), nbytes.max(initial=0)) >= _MAX_BYTES // 2:
            raise ValueError(f"a region has more than {_MAX_BYTES // 2} bytes")
        copies = np.array([len(each.ranks) for each in self.regions], np.int64)
        chunks = np.array(list(map(attrgetter("meta.chunks"), self.arrays)), np.int64)
        wrong = chunks[members] != copies[region]
        wrong[1:] |= (region[1:] == region[:-1]) & (offset[1:] < (offset + nbytes)[:-1])
        if wrong.any():
            name = display(self.arrays[int(members[wrong][0])].path)
            raise ValueError(f"{name} overlaps with another array, or its region has too few or many copies")

    def start(self, array: StoredArray, index: tuple[int, ...]) -> tuple[int, int, int]:
        """Return where the uncompressed chunk at `index` of the grid of an array lies: rank, number of the file, byte.

        The chunk before compression, if it is compressed.
        """
        assert array.region is not None
        region, meta = self.regions[array.region], array.meta
        copy = 0 if meta.chunk_shape == meta.shape else chunk_number(index, meta.grid_shape)
        return int(region.ranks[copy]), int(region.files[copy]), int(region.starts[copy]) + array.offset

    def place(self, array: StoredArray, index: tuple[int, ...]) -> ChunkPlace:
        """Return where the chunk at `index` of the grid of an array lies.

        KeyError if it is compressed and no part says where it is; CheckpointCorruptError if that part is damaged.
        """
        rank, file, at = self.start(array, index)
        if array.meta.compression is None:
            return ChunkPlace(pack_file(rank, file), at, array.meta.encoded_bytes(index))
        assert self.table is not None
        copy = chunk_number(index, array.meta.grid_shape)
        file, at, nbytes = self.table(rank)[array.number, copy]
        return ChunkPlace(pack_file(rank, file), at, nbytes)


def chunk_number(index: tuple[int, ...], grid_shape: tuple[int, ...]) -> int:
    """Return the number of a chunk, in C order of the grid."""
    number = 0
    for position, size in zip(index, grid_shape, strict=True):
        number = number * size + position
    return number


_MEMBERS = frozenset(
    {
        "path",
        "dtype",
        "shape",
        "chunk",
        "inner",
        "compression",
        "region",
        "offset",
        "box_offset",
        "tensor_shape",
        "rank",
    }
)


_LISTS = frozenset({"path", "shape", "chunk", "inner", "box_offset", "tensor_shape"})
_PATH_TYPES = frozenset({str, int})
_PLAIN = ("path", "dtype", "shape", "chunk", "region", "offset")  # the members of most entries
_plain_members = itemgetter(*_PLAIN)


def _arrays(entries: Sequence[Any], world_size: int) -> tuple[StoredArray, ...]:
    """Return the arrays of an index. Those with plain entries are checked and made column by column, if all are valid.

    Of ten thousand, that takes a fifth of the time. One by one, the entry that is invalid is found.
    """
    names = frozenset(_PLAIN)
    plain = [number for number, entry in enumerate(entries) if entry.keys() == names]
    made = _plain_arrays(plain, [entries[number] for number in plain])
    if len(made) == len(entries):
        return tuple(made)
    found = dict(zip(plain, made, strict=False))
    return tuple([found.get(n) or _array(n, entry, world_size) for n, entry in enumerate(entries)])


def _plain_arrays(numbers: list[int], entries: list[Mapping[str, Any]]) -> list[StoredArray]:
    """Return the arrays of plain entries, which have these numbers; none if one of the entries is invalid."""
    if not entries:
        return []
    path, dtype, shape, chunk, region, offset = zip(*map(_plain_members, entries), strict=True)
    if set(map(type, chain(path, shape, chunk))) != {list} or set(map(type, dtype)) != {str}:
        return []
    if 0 in chain.from_iterable(shape):  # it has no elements, so it is in no region
        return []
    sizes = (*chain.from_iterable(shape), *chain.from_iterable(chunk), *region, *offset)
    if set(map(type, sizes)) != {int} or not 0 <= min(sizes) <= max(sizes) < _MAX_BYTES:
        return []
    if not _PATH_TYPES.issuperset(map(type, chain.from_iterable(path))) or (np.array(offset) % ALIGNMENT).any():
        return []
    shapes, origins = list(map(tuple, shape)), [(0,) * len(each) for each in shape]
    metas = list(map(_checked_meta, dtype, shapes, map(tuple, chunk), repeat(None), repeat(None), origins, shapes))
    rows = zip(numbers, map(tuple, path), metas, region, offset, origins, shapes, repeat(None), strict=False)
    return list(map(tuple.__new__, repeat(StoredArray), rows))  # as `_make`, which is a call of Python for each


def _array(number: int, entry: Mapping[str, Any], world_size: int) -> StoredArray:
    for name, value in entry.items():
        if name in _LISTS and type(value) is not list:
            raise ValueError(f"the entry of an array has {name} {value!r:.80}, which is no list")
    path, shape, chunk = tuple(entry["path"]), tuple(entry["shape"]), tuple(entry["chunk"])
    inner = tuple(entry["inner"]) if "inner" in entry else None
    region, offset, rank = entry.get("region"), entry.get("offset", 0), entry.get("rank")
    box_offset, tensor_shape = (0,) * len(shape), shape
    if "box_offset" in entry:
        box_offset, tensor_shape = tuple(entry["box_offset"]), tuple(entry["tensor_shape"])
        if tensor_shape == shape:
            raise ValueError(f"{display(path)} is a whole tensor, but has a box")
    is_paired = ("region" in entry) == ("offset" in entry) and ("box_offset" in entry) == ("tensor_shape" in entry)
    if not (is_paired and entry.keys() <= _MEMBERS) or None in entry.values():
        raise ValueError(f"the entry of {display(path)} has the members {sorted(entry)!r:.200}")
    if not _PATH_TYPES.issuperset(map(type, path)):
        raise ValueError(f"{path!r:.80} is not a path of strings and integers")
    numbers = (*shape, *chunk, *(inner or ()), *box_offset, *tensor_shape, offset, rank or 0, region or 0)
    if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) < _MAX_BYTES:
        raise ValueError(f"the entry of {display(path)} has a size or place that is no number from 0 to {_MAX_BYTES}")
    if rank is not None and (type(rank) is not int or rank >= world_size):
        raise ValueError(f"{display(path)} is of rank {rank!r:.40} of {world_size}")
    if (region is None) != (0 in shape) or type(region) not in (int, type(None)):
        raise ValueError(f"{display(path)} has shape {list(shape)}, but is in region {region!r:.40}")
    if offset % ALIGNMENT:
        raise ValueError(f"{display(path)} begins at byte {offset} of its region")
    compression = Compression.from_document(entry["compression"]) if "compression" in entry else None
    meta = _checked_meta(entry["dtype"], shape, chunk, inner, compression, box_offset, tensor_shape)
    return StoredArray(number, path, meta, region, offset, box_offset, tensor_shape, rank)


@functools.lru_cache(maxsize=1 << 10)
def _checked_meta(
    dtype: str,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    inner: tuple[int, ...] | None,
    compression: Compression | None,
    box_offset: tuple[int, ...],
    tensor_shape: tuple[int, ...],
) -> ArrayMeta:
    """Return the metadata of arrays with these sizes, all integers: one object for all that are alike.

    ValueError for what would be too large for numpy or the file system.
    """
    meta = ArrayMeta(shape, dtype, chunk, inner, compression)
    if not len(box_offset) == len(tensor_shape) == len(shape):
        raise ValueError(f"a box of shape {shape} at {box_offset} does not fit a tensor of shape {tensor_shape}")
    try:
        itemsize = stored(dtype).itemsize
    except StateError:
        raise ValueError(f"{dtype!r:.80} is not a dtype that can be stored") from None
    if 0 not in shape and math.prod(chunk) > _MAX_PADDING * math.prod(shape):
        raise ValueError(f"chunks {list(chunk)!r:.80} are mostly outside of an array of shape {list(shape)!r:.80}")
    for sizes in (shape, chunk, tensor_shape):
        if math.prod(filter(None, sizes)) * itemsize >= _MAX_BYTES:
            raise ValueError(f"{list(sizes)!r:.80} is an impossible shape")
    return meta
