"""Reads boxes of uncompressed arrays from local files: each piece in one call, to where it belongs, and then checked.

Where a box needs all of a piece, and has it in one run of memory, the bytes go from the file straight to their place.
Otherwise the piece is read beside it and the part that is wanted is copied: there is one checksum for all of a piece.
"""

from __future__ import annotations

import os
from itertools import product
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.native import read_piece
from ckpt.storage.checksums import CHECKSUM_BYTES
from ckpt.storage.files import under
from ckpt.storage.metadata import INDEX_ENTRY_BYTES, ArrayMeta, FileLayout, Piece

__all__ = ["read_box"]

Array = np.ndarray[Any, np.dtype[Any]]
_ABSENT = 2**64 - 1  # offset and length of an inner chunk that lies outside the array


def read_box(root: str, directory: str, meta: ArrayMeta, offset: tuple[int, ...], destination: Array) -> bool:
    """Fill `destination` with the box at `offset`; see `ArrayReader.read_into`. Any thread.

    Returns whether every byte was there and as its checksum says; if not, the elements are undefined, and reading in
    another way will tell why.
    """
    shape = destination.shape[: len(offset)]
    chunks = (range(o // c, -(-(o + n) // c)) for o, n, c in zip(offset, shape, meta.chunk_shape, strict=True))
    try:
        return all(_read_chunk(under(root, directory), meta, index, offset, destination) for index in product(*chunks))
    except OSError:
        return False


def _read_chunk(
    folder: str, meta: ArrayMeta, index: tuple[int, ...], offset: tuple[int, ...], destination: Array
) -> bool:
    layout = meta.layout(index)
    fd = os.open(os.path.join(folder, meta.chunk_key(index)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != layout.file_bytes or not _is_index_as_expected(fd, layout):
            return False
        return all(_read_piece(fd, meta, layout, piece, offset, destination) for piece in layout.pieces)
    finally:
        os.close(fd)


def _is_index_as_expected(fd: int, layout: FileLayout) -> bool:
    """Whether the pieces of a shard are where this package puts them; true of a chunk that is no shard."""
    if not layout.index_entries:
        return True
    entries = np.empty((layout.index_entries, 2), "<u8")
    if not _read(fd, layout.index_offset, layout.index_entries * INDEX_ENTRY_BYTES, entries):
        return False
    expected = np.full_like(entries, _ABSENT)
    for piece in layout.pieces:
        expected[piece.position] = piece.offset, layout.piece_bytes + CHECKSUM_BYTES
    return bool((entries == expected).all())


def _read_piece(
    fd: int, meta: ArrayMeta, layout: FileLayout, piece: Piece, offset: tuple[int, ...], destination: Array
) -> bool:
    ends = (o + n for o, n in zip(offset, destination.shape, strict=False))
    first = tuple(map(max, piece.origin, offset))
    last = tuple(min(p + n, end) for p, n, end in zip(piece.origin, piece.shape, ends, strict=True))
    if any(low >= high for low, high in zip(first, last, strict=True)):
        return True
    part = _part(destination, first, last, offset)
    shape = tuple(high - low for low, high in zip(first, last, strict=True))
    if shape == piece.shape and shape[1:] == layout.full_shape[1:] and part.flags.c_contiguous:
        return _read(fd, piece.offset, layout.piece_bytes, part)
    beside = np.empty(layout.piece_bytes, np.uint8)
    if not _read(fd, piece.offset, layout.piece_bytes, beside):
        return False
    whole = beside.view(meta.stored.numpy_dtype).reshape((*layout.full_shape, *meta.stored.trailing))
    part[...] = _part(whole, first, last, piece.origin)
    return True


def _part(array: Array, first: tuple[int, ...], last: tuple[int, ...], origin: tuple[int, ...]) -> Array:
    """The elements from `first` to `last` of an array that begins at `origin`, and all of its trailing dimensions."""
    key: tuple[slice | EllipsisType, ...] = (
        *(slice(low - at, high - at) for low, high, at in zip(first, last, origin, strict=True)),
        ...,
    )
    return array[key]


def _read(fd: int, offset: int, piece_bytes: int, target: Array) -> bool:
    """Read a piece into `target`, which may be shorter by padding."""
    return read_piece(fd, offset, piece_bytes, target.__array_interface__["data"][0], target.nbytes)
