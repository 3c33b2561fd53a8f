"""The image of a chunk file in memory: where its elements go, and what is filled in before it is written.

Staging copies the elements to `piece_array`, in the trainer; `seal` adds all that is not elements, in the writer.
"""

from __future__ import annotations

from collections.abc import Collection
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.storage.checksums import CHECKSUM_BYTES, crc32c, crc32c_of_checksums, packed
from ckpt.storage.metadata import ArrayMeta, FileLayout, Piece

__all__ = ["checksums_behind", "piece_array", "seal"]


def piece_array(meta: ArrayMeta, layout: FileLayout, piece: Piece, image: memoryview) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the elements of `piece`, without padding, as a view of `image`.

    Its shape is ``piece.shape`` (and the trailing dimension of a raw dtype), its dtype the stored one. It need not be
    aligned to the size of an element.
    """
    shape = (*layout.full_shape, *meta.stored.trailing)
    full: np.ndarray[Any, np.dtype[Any]] = np.ndarray(shape, meta.stored.numpy_dtype, image, piece.offset)
    inside: tuple[slice | EllipsisType, ...] = (*(slice(size) for size in piece.shape), ...)
    return full[inside]  # with an ellipsis it is a view also if there is no dimension


def seal(meta: ArrayMeta, layout: FileLayout, image: memoryview, sealed: Collection[int] = ()) -> int:
    """Fill in padding, checksums and index, so that `image` begins with the chunk's file.

    Pieces whose offsets are in `sealed` have zeros in their padding and their checksum behind them already; they are
    not read. Every other byte is read once. Returns the checksum of the pieces' checksums, which identifies the
    content. `image` is writable and has at least ``layout.file_bytes`` bytes.
    """
    if meta.sharded:
        image[layout.index_offset : layout.file_bytes] = layout.index
    if len(sealed) == len(layout.pieces):
        return crc32c(checksums_behind(layout, image).tobytes())
    checksums: list[int] = []
    for piece in layout.pieces:
        end = piece.offset + layout.piece_bytes
        if piece.offset in sealed:
            checksums.append(int.from_bytes(image[end : end + CHECKSUM_BYTES], "little"))
            continue
        _clear_padding(meta, layout, piece, image)
        checksums.append(crc32c(image[piece.offset : end]))
        image[end : end + CHECKSUM_BYTES] = packed(checksums[-1])
    return crc32c_of_checksums(checksums)


def checksums_behind(layout: FileLayout, image: memoryview) -> np.ndarray[Any, np.dtype[Any]]:
    """The checksum behind each piece, in their order: a view of `image`."""
    pitch = layout.piece_bytes + CHECKSUM_BYTES
    return np.ndarray((len(layout.pieces),), "<u4", image, layout.piece_bytes, (pitch,))


def _clear_padding(meta: ArrayMeta, layout: FileLayout, piece: Piece, image: memoryview) -> None:
    if piece.shape == layout.full_shape:
        return
    raw = np.ndarray((*layout.full_shape, meta.stored.itemsize), np.uint8, image, piece.offset)
    inside: tuple[slice, ...] = ()
    for size in piece.shape:
        raw[(*inside, slice(size, None))] = 0
        inside += (slice(size),)
