"""Read boxes of uncompressed arrays from local files into memory, many inner chunks in one call, and check them.

Elements that are contiguous in the file and in the destination are read straight into place. Otherwise a whole inner
chunk, which has one checksum, is read into a temporary buffer and the wanted part is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES, SEGMENT, read_checked
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import FileLayout, InnerChunk, indices
from ckpt.storage.regular_files import DamagedFileError, open_regular

__all__ = ["read_box", "read_runs"]

Array = np.ndarray[Any, np.dtype[Any]]


def read_box(root: str, directory: str, meta: ArrayMeta, offset: tuple[int, ...], destination: Array) -> bool:
    """Fill `destination` with the box at `offset`; see `ArrayReader.read_into`. Any thread.

    Returns whether every byte was read and matches its checksum. If not, the elements are undefined; `verify_chunk`
    finds out why.
    """
    shape = destination.shape[: len(offset)]
    chunks = [range(o // c, -(-(o + n) // c)) for o, n, c in zip(offset, shape, meta.chunk_shape, strict=True)]
    try:
        return all(_read_chunk(root, directory, meta, index, offset, destination) for index in indices(chunks))
    except (OSError, DamagedFileError):
        return False


def read_runs(root: str, directory: str, meta: ArrayMeta, runs: Sequence[tuple[int, Array]]) -> bool:
    """Fill contiguous arrays with bytes of a 1-d array of bytes, each from its offset on.

    The runs are in order, and none crosses the boundary of a chunk. Returns as `read_box`.
    """
    (chunk_bytes,) = meta.chunk_shape
    try:
        for chunk, group in groupby(runs, key=lambda run: run[0] // chunk_bytes):
            segments = [(offset - chunk * chunk_bytes, _address(array), array.nbytes) for offset, array in group]
            with _opened(root, directory, meta, (chunk,)) as (fd, layout):
                if not read_checked(fd, layout.inner_chunk_bytes, np.array(segments, SEGMENT)):
                    return False
    except (OSError, DamagedFileError):
        return False
    return True


@contextmanager
def _opened(root: str, directory: str, meta: ArrayMeta, index: tuple[int, ...]) -> Iterator[tuple[int, FileLayout]]:
    """Open a chunk file. DamagedFileError unless its size and its index are those that this package writes.

    The size is checked first: the layout lists as many inner chunks as the metadata say, which may be damaged.
    """
    fd = open_regular(root, f"{directory}/{meta.chunk_key(index)}")
    try:
        if os.fstat(fd).st_size != meta.file_bytes(index):
            raise DamagedFileError("has another size")
        layout = meta.layout(index)
        if os.pread(fd, len(layout.index), layout.index_offset) != layout.index:
            raise DamagedFileError("has another index")
        yield fd, layout
    finally:
        os.close(fd)


def _read_chunk(
    root: str, directory: str, meta: ArrayMeta, index: tuple[int, ...], offset: tuple[int, ...], destination: Array
) -> bool:
    with _opened(root, directory, meta, index) as (fd, layout):
        origin, _ = meta.box_of(index)
        overlap = _overlap(origin, meta.chunk_shape, offset, destination)
        if overlap is None:
            return True
        part = _part(destination, *overlap, offset)
        first = meta.first_byte(index, *overlap)
        if first is not None and part.flags.c_contiguous:
            return _read(fd, layout, first, part)
        return all(_read_inner_chunk(fd, meta, layout, inner, offset, destination) for inner in layout.inner_chunks)


def _read_inner_chunk(
    fd: int, meta: ArrayMeta, layout: FileLayout, inner: InnerChunk, offset: tuple[int, ...], destination: Array
) -> bool:
    overlap = _overlap(inner.origin, inner.shape, offset, destination)
    if overlap is None:
        return True
    part = _part(destination, *overlap, offset)
    number = inner.offset // (layout.inner_chunk_bytes + CHECKSUM_BYTES)
    if part.nbytes == layout.inner_chunk_bytes and part.flags.c_contiguous:
        return _read(fd, layout, number * layout.inner_chunk_bytes, part)
    whole_bytes = np.empty(layout.inner_chunk_bytes, np.uint8)
    if not _read(fd, layout, number * layout.inner_chunk_bytes, whole_bytes):
        return False
    whole = whole_bytes.view(meta.stored.numpy_dtype).reshape((*layout.full_shape, *meta.stored.trailing))
    part[...] = _part(whole, *overlap, inner.origin)
    return True


def _overlap(
    origin: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...], destination: Array
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the first and the last index (excluded) of the overlap of two boxes; None if they do not overlap."""
    ends = (o + n for o, n in zip(offset, destination.shape, strict=False))
    first = tuple(map(max, origin, offset))
    last = tuple(min(o + n, end) for o, n, end in zip(origin, shape, ends, strict=True))
    return None if any(low >= high for low, high in zip(first, last, strict=True)) else (first, last)


def _part(array: Array, first: tuple[int, ...], last: tuple[int, ...], origin: tuple[int, ...]) -> Array:
    """Return the elements from `first` to `last` of an array that begins at `origin`, with all trailing dimensions."""
    key: tuple[slice | EllipsisType, ...] = (
        *(slice(low - at, high - at) for low, high, at in zip(first, last, origin, strict=True)),
        ...,
    )
    return array[key]


def _read(fd: int, layout: FileLayout, first: int, target: Array) -> bool:
    """Fill `target` with the bytes of the inner chunks from byte `first` on, checksums not counted."""
    segment = np.array([(first, _address(target), target.nbytes)], SEGMENT)
    return read_checked(fd, layout.inner_chunk_bytes, segment)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
