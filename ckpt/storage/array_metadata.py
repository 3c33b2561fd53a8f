"""The Zarr v3 documents of a step, and the geometry of its chunk files.

A chunk file is one chunk's elements in C order and their CRC-32C. With inner chunks it is a shard: each inner chunk
with its CRC-32C, in C order, then the index (offset and length of each, 64-bit) with its CRC-32C:

    plain     | elements | crc |
    sharded   | inner 0 | crc | inner 1 | crc | ... | index | crc |

All numbers are little-endian. Chunks at the edge of an array have the full size too, padded with zeros; only inner
chunks that lie outside altogether are left out. The Zarr specification is at
https://zarr-specs.readthedocs.io/en/latest/v3/.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import mod
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.native import CHECKSUM_BYTES
from ckpt.storage.chunk_layout import INDEX_ENTRY_BYTES, FileLayout, file_layout, indices
from ckpt.storage.documents import canonical
from ckpt.storage.dtypes import StoredDtype, native_name, stored

__all__ = ["MAX_DIMENSIONS", "ArrayMeta", "group_document", "groups", "new_context", "open_array", "root_document"]

MAX_DIMENSIONS = 64
"""Of a tensor: torch and numpy have no more."""

_MOST_SMALLER = 1 << 15  # a block of zstd: 128 KiB in 4 bytes
_LEAST_LARGER, _FRAME_BYTES = 128, 1024  # more than zstd adds to what it cannot compress
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
_CRC32C = {"name": "crc32c"}
_DTYPE_ATTRIBUTE = "torch_dtype"


@dataclass(frozen=True)
class ArrayMeta:
    """A tensor as a Zarr array. All shapes are the tensor's, in elements of its `dtype` (torch's name).

    `inner_chunk_shape`, if any, divides `chunk_shape`. `compression` is None or "zstd".
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    inner_chunk_shape: tuple[int, ...] | None = None
    compression: str | None = None
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
        if self.compression not in (None, "zstd"):
            raise ValueError(f"unknown compression {self.compression!r}")

    @property
    def stored(self) -> StoredDtype:
        """How the elements are stored."""
        return stored(self.dtype)

    @property
    def sharded(self) -> bool:
        """Whether chunks are shards of inner chunks."""
        return self.inner_chunk_shape is not None

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """How many chunks there are along each dimension."""
        return tuple([-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True)])

    def chunk_indices(self) -> Iterable[tuple[int, ...]]:
        """Return the index of each chunk, in C order. An array without elements has none."""
        return indices(tuple(map(range, self.grid_shape)))

    def chunk_key(self, index: tuple[int, ...]) -> str:
        """Return the name of a chunk's file in the directory of the array."""
        return ".".join(["c", *map(str, index), *("0" for _ in self.stored.trailing)])

    def layout(self, index: tuple[int, ...]) -> FileLayout:
        """Return the geometry of the image of the chunk at `index`; `ValueError` if it is outside the grid.

        The file is as the image, unless the array is compressed.
        """
        if len(index) != len(self.shape) or any(not 0 <= i < n for i, n in zip(index, self.grid_shape, strict=True)):
            raise ValueError(f"chunk {index} is outside the grid {self.grid_shape}")
        inner = self.inner_chunk_shape
        return file_layout(self.shape, self.chunk_shape, inner, self.stored.itemsize, index)

    @functools.cached_property
    def index_bytes(self) -> int:
        """The size of the index of a shard, its checksum included; 0 where chunks are no shards."""
        if self.inner_chunk_shape is None:
            return 0
        inner = zip(self.chunk_shape, self.inner_chunk_shape, strict=True)
        return math.prod(size // part for size, part in inner) * INDEX_ENTRY_BYTES + CHECKSUM_BYTES

    @property
    def piece_bytes(self) -> int:
        """The bytes of the elements of a piece, padding included."""
        return math.prod(self.inner_chunk_shape or self.chunk_shape) * self.stored.itemsize

    def file_bytes(self, index: tuple[int, ...]) -> int:
        """Return the size of the image of a chunk without making its layout, which has a part for every piece."""
        full = self.inner_chunk_shape or self.chunk_shape
        first, last = self.box_of(index)
        pieces = math.prod(-(-(end - start) // size) for start, end, size in zip(first, last, full, strict=True))
        return pieces * (self.piece_bytes + CHECKSUM_BYTES) + self.index_bytes

    def misfit(self, index: tuple[int, ...], file_bytes: int) -> str | None:
        """Return what is wrong if the file of a chunk has this size; None if it can have it.

        It has that of its image, or if it is compressed, neither too few bytes for what is said to come out of them,
        nor more than zstd makes of bytes that cannot be compressed.
        """
        expected = self.file_bytes(index)
        if self.compression is None:
            return None if file_bytes == expected else f"has {file_bytes} bytes instead of {expected}"
        piece_bytes = self.piece_bytes
        pieces = (expected - self.index_bytes) // (piece_bytes + CHECKSUM_BYTES)
        if piece_bytes > (file_bytes - self.index_bytes) * _MOST_SMALLER:
            return f"has {file_bytes} bytes, which are too few for its array"
        if file_bytes > expected + pieces * (piece_bytes // _LEAST_LARGER + _FRAME_BYTES):
            return f"has {file_bytes} bytes, which are too many for its array"
        return None

    def box_of(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return from where to where in the array a chunk's elements are, without padding."""
        first = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        return first, tuple(min(o + c, n) for o, c, n in zip(first, self.chunk_shape, self.shape, strict=True))

    def first_byte(self, index: tuple[int, ...], first: tuple[int, ...], last: tuple[int, ...]) -> int | None:
        """Return where the elements from `first` to `last` of the array begin among those in the pieces of a chunk's
        file, one piece behind the other; None if they are not one run there.

        They are one if the pieces are some rows each of the chunk's first dimension that has several, with all there is
        behind it.
        """
        chunk = self.chunk_shape
        dim = next((dim for dim, size in enumerate(chunk) if size > 1), len(chunk))
        behind = slice(dim + 1, None)
        inner = self.inner_chunk_shape or chunk
        if not inner[behind] == chunk[behind] == self.shape[behind]:
            return None
        if any(a != 0 or b != n for a, b, n in zip(first[behind], last[behind], chunk[behind], strict=True)):
            return None
        row_bytes = math.prod(chunk[behind]) * self.stored.itemsize
        return (first[dim] - index[dim] * chunk[dim]) * row_bytes if dim < len(chunk) else 0

    def array_document(self) -> dict[str, Any]:
        """Return the array's ``zarr.json``."""
        how = self.stored
        codecs: list[dict[str, Any]] = [_BYTES, *([_ZSTD] if self.compression else []), _CRC32C]
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

    @functools.cached_property
    def document_bytes(self) -> bytes:
        """The content of the array's ``zarr.json``: the same bytes for equal arrays."""
        return canonical(self.array_document())

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> ArrayMeta:
        """Return the array that `document` describes.

        `CheckpointCorruptError`, naming `where` it is from, unless it is exactly what `array_document` makes of some
        array.
        """
        try:
            meta = cls._parsed(document)
            if meta.array_document() == document:
                return meta
            why: object = "it differs from what this package writes"
        except Exception as error:  # whatever a damaged document leads to
            why = repr(error)
        raise CheckpointCorruptError(f"{where} does not describe an array of a checkpoint: {why}")

    @classmethod
    def _parsed(cls, document: Mapping[str, Any]) -> ArrayMeta:
        attributes = dict(document["attributes"])
        dtype = attributes.pop(_DTYPE_ATTRIBUTE, None) or native_name(document["data_type"])
        if dtype is None:
            raise ValueError(f"data type {document['data_type']!r}")
        dimensions = len(document["shape"]) - len(stored(dtype).trailing)
        codecs, inner = document["codecs"], None
        if codecs[0]["name"] == "sharding_indexed":
            configuration = codecs[0]["configuration"]
            codecs, inner = configuration["codecs"], tuple(configuration["chunk_shape"][:dimensions])
        return cls(
            shape=tuple(document["shape"][:dimensions]),
            dtype=dtype,
            chunk_shape=tuple(document["chunk_grid"]["configuration"]["chunk_shape"][:dimensions]),
            inner_chunk_shape=inner,
            compression="zstd" if _ZSTD in codecs else None,
            attributes=attributes,
        )


def group_document() -> dict[str, Any]:
    """Return the ``zarr.json`` of a group below the root."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def groups(directories: Iterable[str]) -> list[str]:
    """Return the groups that arrays in these `directories` are in, sorted, the root itself not included."""
    parents: set[str] = set()
    for directory in directories:
        while (directory := directory.rpartition("/")[0]) and directory not in parents:
            parents.add(directory)
    return sorted(parents)


def root_document(arrays: Mapping[str, ArrayMeta], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``zarr.json`` of a step, to be sealed by `seal_root`: `summary` is its attribute ``ckpt``.

    `arrays` are keyed by directory; their metadata is inline ("consolidated"), so that a step opens with one read.
    """
    nodes = {directory: group_document() for directory in groups(arrays)}
    nodes |= {directory: meta.array_document() for directory, meta in arrays.items()}
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"ckpt": dict(summary)},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
    }


def new_context(threads: int) -> Any:
    """Return a tensorstore context: `threads` file operations and copies at once, no cache, no syncs."""
    import tensorstore as ts

    limit = {"limit": threads}
    return ts.Context({"file_io_concurrency": limit, "data_copy_concurrency": limit, "file_io_sync": False})


def open_array(root: str, directory: str, meta: ArrayMeta, context: Any) -> Any:
    """Return the array in `directory` below `root` (a local directory or a URL) as a tensorstore, without any access to
    it.

    A chunk that is missing is an error in reads, and one that is all zeros is written like any other.
    """
    import tensorstore as ts

    if "://" in root:
        kvstore: Any = f"{root.rstrip('/')}/{directory}/"
    else:
        kvstore = {"driver": "file", "path": os.path.join(root, directory) + "/"}
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": meta.array_document(),
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, context=context, open=True, assume_metadata=True).result()
