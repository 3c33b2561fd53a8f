"""The Zarr v3 metadata of a step: its arrays, groups and root; and its arrays as tensorstores.

The Zarr specification is at https://zarr-specs.readthedocs.io/en/latest/v3/.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import mod
from typing import Any

from ckpt.native import CHECKSUM_BYTES
from ckpt.storage.chunk_layout import INDEX_ENTRY_BYTES, ChunkLayout, chunk_layout, indices
from ckpt.storage.compression import MAX_FRAME_BYTES, Compression
from ckpt.storage.dtypes import StoredDtype, stored

MAX_DIMENSIONS = 64
"""The most dimensions of a tensor in torch and numpy."""

_MAX_RATIO = 1 << 15  # zstd stores a block of 128 KiB in 4 bytes at best
_FRAME_BYTES = 1024  # Blosc adds less than this to incompressible data

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}
_DTYPE_ATTRIBUTE = "torch_dtype"


@dataclass(frozen=True)
class ArrayMeta:
    """A tensor as a Zarr array. All shapes are the tensor's, in elements of its `dtype` (torch's name).

    `inner_chunk_shape`, if any, divides `chunk_shape`. With a `compression`, an inner chunk has at most
    `MAX_FRAME_BYTES`.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    inner_chunk_shape: tuple[int, ...] | None = None
    compression: Compression | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        shape, chunk = self.shape, self.chunk_shape
        inner = chunk if self.inner_chunk_shape is None else self.inner_chunk_shape
        if not len(shape) == len(chunk) == len(inner) <= MAX_DIMENSIONS:
            raise ValueError(f"chunks {chunk} and {inner} do not have the dimensions of {shape}")
        sizes = shape + chunk + inner
        if sizes and (set(map(type, sizes)) != {int} or min(sizes) < 0 or max(sizes) >= 1 << 63):
            raise ValueError(f"shape {shape}, chunks {chunk} or {inner} are no sizes")
        if 0 in chunk or 0 in inner:
            raise ValueError(f"chunks {chunk} or {inner} have no elements")
        if any(map(mod, chunk, inner)):
            raise ValueError(f"inner chunks {inner} do not divide chunks {chunk}")
        if self.compression is not None and self.inner_chunk_bytes > MAX_FRAME_BYTES:
            raise ValueError(f"inner chunks of {self.inner_chunk_bytes} bytes are too large to be compressed")

    @property
    def stored(self) -> StoredDtype:
        """How the elements are stored."""
        return stored(self.dtype)

    @property
    def sharded(self) -> bool:
        """Whether chunks are shards, which consist of inner chunks."""
        return self.inner_chunk_shape is not None

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """The number of chunks along each dimension."""
        return tuple([-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True)])

    @functools.cached_property
    def chunks(self) -> int:
        """The number of chunks."""
        return math.prod(self.grid_shape)

    @functools.cached_property
    def is_one_block(self) -> bool:
        """Whether the array is a single chunk without inner chunks or compression, so contiguous in the file."""
        return self.chunk_shape == self.shape and self.inner_chunk_shape is None and self.compression is None

    def chunk_indices(self) -> Iterable[tuple[int, ...]]:
        """Return the index of each chunk, in C order. An array without elements has none."""
        return indices(tuple(map(range, self.grid_shape)))

    def chunk_key(self, index: tuple[int, ...]) -> str:
        """Return the name of a chunk's file in the directory of the array."""
        return ".".join(["c", *map(str, index), *("0" for _ in self.stored.trailing)])

    def layout(self, index: tuple[int, ...]) -> ChunkLayout:
        """Return the layout of the encoded chunk at `index`, before compression; `ValueError` if outside the grid."""
        if len(index) != len(self.shape) or any(not 0 <= i < n for i, n in zip(index, self.grid_shape, strict=True)):
            raise ValueError(f"chunk {index} is outside the grid {self.grid_shape}")
        inner = self.inner_chunk_shape
        return chunk_layout(self.shape, self.chunk_shape, inner, self.stored.itemsize, index)

    @functools.cached_property
    def index_bytes(self) -> int:
        """The size of a shard's index including its checksum; 0 where chunks are not shards."""
        if self.inner_chunk_shape is None:
            return 0
        inner = zip(self.chunk_shape, self.inner_chunk_shape, strict=True)
        return math.prod(size // part for size, part in inner) * INDEX_ENTRY_BYTES + CHECKSUM_BYTES

    @functools.cached_property
    def inner_chunk_bytes(self) -> int:
        """The size of the elements of an inner chunk, padding included."""
        return math.prod(self.inner_chunk_shape or self.chunk_shape) * self.stored.itemsize

    @functools.cached_property
    def largest_encoded_bytes(self) -> int:
        """The size of the first encoded chunk before compression; no other one is larger."""
        if self.chunk_shape == self.shape and self.inner_chunk_shape is None:
            return self.inner_chunk_bytes + CHECKSUM_BYTES
        return self._encoded_bytes((0,) * len(self.shape))

    @functools.cached_property
    def _is_even(self) -> bool:
        return not any(n > c and n % c for n, c in zip(self.shape, self.chunk_shape, strict=True))

    def encoded_bytes(self, index: tuple[int, ...]) -> int:
        """Return the size of an encoded chunk before compression, without listing inner chunks as `layout` does."""
        return self.largest_encoded_bytes if self._is_even else self._encoded_bytes(index)

    def _encoded_bytes(self, index: tuple[int, ...]) -> int:
        full = self.inner_chunk_shape or self.chunk_shape
        first, last = self.box_of(index)
        inner_chunks = math.prod(-(-(end - start) // size) for start, end, size in zip(first, last, full, strict=True))
        return inner_chunks * (self.inner_chunk_bytes + CHECKSUM_BYTES) + self.index_bytes

    def size_problem(self, index: tuple[int, ...], nbytes: int) -> str | None:
        """Return what is wrong with this size of an encoded chunk, to be put after its path; None if nothing is.

        The size of an uncompressed file is known. A compressed one must have enough bytes for its elements to come out
        of them, and no more than Blosc makes of incompressible data.
        """
        expected = self.encoded_bytes(index)
        if self.compression is None:
            return None if nbytes == expected else f"has {nbytes} bytes instead of {expected}"
        inner_chunk_bytes = self.inner_chunk_bytes
        inner_chunks = (expected - self.index_bytes) // (inner_chunk_bytes + CHECKSUM_BYTES)
        if inner_chunk_bytes > (nbytes - self.index_bytes) * _MAX_RATIO:
            return f"has {nbytes} bytes, which are too few for its array"
        if nbytes > expected + inner_chunks * _FRAME_BYTES:
            return f"has {nbytes} bytes, which are too many for its array"
        return None

    def box_of(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first and the last index (excluded) in the array of a chunk's elements, padding excluded."""
        first = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        return first, tuple(min(o + c, n) for o, c, n in zip(first, self.chunk_shape, self.shape, strict=True))

    def first_byte(self, index: tuple[int, ...], first: tuple[int, ...], last: tuple[int, ...]) -> int | None:
        """Return the byte at which the elements from `first` to `last` begin in a chunk, or None.

        Checksums are not counted. None if the elements are not contiguous in the file apart from checksums: they are if
        each inner chunk consists of whole rows of the chunk's first dimension that has more than one.
        """
        chunk = self.chunk_shape
        dim = next((dim for dim, size in enumerate(chunk) if size > 1), len(chunk))
        after = slice(dim + 1, None)
        inner = self.inner_chunk_shape or chunk
        if not inner[after] == chunk[after] == self.shape[after]:
            return None
        if any(a != 0 or b != n for a, b, n in zip(first[after], last[after], chunk[after], strict=True)):
            return None
        row_bytes = math.prod(chunk[after]) * self.stored.itemsize
        return (first[dim] - index[dim] * chunk[dim]) * row_bytes if dim < len(chunk) else 0

    def array_document(self) -> dict[str, Any]:
        """Return the array's ``zarr.json``."""
        how = self.stored
        codecs: list[dict[str, Any]] = [_BYTES, _CRC32C]
        if self.compression is not None:
            codecs.insert(1, self.compression.zarr_codec(how.itemsize, self.inner_chunk_bytes))
        if self.inner_chunk_shape is not None:
            configuration = {
                "chunk_shape": [*self.inner_chunk_shape, *how.trailing],
                "codecs": codecs,
                "index_codecs": [_BYTES, _CRC32C],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        grid = {"name": "regular", "configuration": {"chunk_shape": [*self.chunk_shape, *how.trailing]}}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [*self.shape, *how.trailing],
            "data_type": how.zarr_name,
            "chunk_grid": grid,
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": how.fill_value,
            "codecs": codecs,
            "attributes": {**self.attributes, **({_DTYPE_ATTRIBUTE: self.dtype} if how.raw else {})},
        }


def group_document() -> dict[str, Any]:
    """Return the ``zarr.json`` of a group below the root."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def groups(directories: Iterable[str]) -> list[str]:
    """Return the groups that contain the arrays in `directories`, sorted, without the root."""
    parents: set[str] = set()
    for directory in directories:
        while (directory := directory.rpartition("/")[0]) and directory not in parents:
            parents.add(directory)
    return sorted(parents)


def root_document(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``zarr.json`` of a step, for `encode_root`; `summary` is its attribute ``ckpt``."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {"ckpt": dict(summary)}}
