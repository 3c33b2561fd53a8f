"""Decode boxes of compressed chunks: check the checksum of an inner chunk, decompress it, copy what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES, crc32c
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import InnerChunk
from ckpt.storage.compression import decompress, decompressed
from ckpt.storage.regular_files import DamagedFileError

Array = np.ndarray[Any, np.dtype[Any]]

Read = Callable[[int, int], bytes | memoryview]
"""``read(offset, size)`` returns bytes of a chunk, fewer at its end. They are used before the next call."""

_LEFT_OUT = np.uint64(2**64 - 1)  # the offset and the size of an inner chunk outside of the array


def read_compressed(
    meta: ArrayMeta, index: tuple[int, ...], nbytes: int, read: Read, offset: tuple[int, ...], destination: Array
) -> None:
    """Fill `destination` with what the chunk at `index`, of `nbytes` bytes, has of the box at `offset`.

    Raises DamagedFileError if bytes are missing, do not match their checksum or cannot be decompressed.
    """
    problem = meta.size_problem(index, nbytes)
    if problem is not None:
        raise DamagedFileError(problem)
    shape = destination.shape[: len(offset)]
    for inner, start, size in inner_chunk_places(meta, index, nbytes, read):
        first = tuple(map(max, inner.origin, offset))
        ends = zip(inner.origin, inner.shape, offset, shape, strict=True)
        last = tuple(min(a + n, b + m) for a, n, b, m in ends)
        if any(low >= high for low, high in zip(first, last, strict=True)):
            continue
        data = memoryview(read(start, size))  # slices of bytes are copies
        if len(data) != size or crc32c(data[:-CHECKSUM_BYTES]) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
            raise DamagedFileError(f"has a wrong checksum in the {size} bytes at offset {start} of the chunk")
        frame, part = data[:-CHECKSUM_BYTES], _part(destination, first, last, offset)
        if part.nbytes == meta.inner_chunk_bytes and part.flags.c_contiguous:  # all of it is wanted: no copy
            decompress(frame, part.reshape(-1).view(np.uint8))
            continue
        whole = decompressed(frame, meta.inner_chunk_bytes).view(meta.stored.numpy_dtype)
        whole = whole.reshape((*(meta.inner_chunk_shape or meta.chunk_shape), *meta.stored.trailing))
        part[...] = _part(whole, first, last, inner.origin)


def inner_chunk_places(
    meta: ArrayMeta, index: tuple[int, ...], nbytes: int, read: Read
) -> list[tuple[InnerChunk, int, int]]:
    """Return the inner chunks of a compressed chunk, each with the byte where it starts and its size with checksum.

    Raises DamagedFileError if the index of the shard is damaged, or they overlap.
    """
    layout = meta.layout(index)
    if not meta.sharded:
        return [(layout.inner_chunks[0], 0, nbytes)]
    index_offset = nbytes - meta.index_bytes
    data = bytes(read(index_offset, meta.index_bytes))
    if len(data) != meta.index_bytes or crc32c(data[:-CHECKSUM_BYTES]) != int.from_bytes(
        data[-CHECKSUM_BYTES:], "little"
    ):
        where = f"the {meta.index_bytes} bytes at offset {index_offset} of the chunk"
        raise DamagedFileError(f"has a wrong checksum in {where}, its index")
    table = np.frombuffer(data, "<u8", layout.index_entries * 2).reshape(-1, 2)
    if int((table != _LEFT_OUT).any(axis=1).sum()) != len(layout.inner_chunks):
        raise DamagedFileError("has an index with more or fewer inner chunks than the shape of its array gives")
    entries = table.tolist()
    places = [(inner, *entries[inner.position]) for inner in layout.inner_chunks]
    end = 0
    for _, start, size in sorted(places, key=lambda place: place[1]):
        if start < end or size < CHECKSUM_BYTES or start + size > index_offset:
            raise DamagedFileError("has an index with inner chunks that overlap or lie outside of the chunk")
        end = start + size
    return places


def _part(array: Array, first: tuple[int, ...], last: tuple[int, ...], origin: tuple[int, ...]) -> Array:
    """Return the elements from `first` to `last` of an array that begins at `origin`, with all trailing dimensions."""
    key: tuple[slice | EllipsisType, ...] = (
        *(slice(low - at, high - at) for low, high, at in zip(first, last, origin, strict=True)),
        ...,
    )
    return array[key]
