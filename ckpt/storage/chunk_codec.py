"""The image of a chunk file in memory: where its elements go, and what is filled in before it is written.

Staging copies the elements to `piece_array`, in the trainer; `seal` adds all that is not elements, in the writer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.native import CHECKSUM_BYTES, crc32c
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import FileLayout, Piece, crc32c_of_checksums, packed
from ckpt.storage.files import storage_errors
from ckpt.storage.regular_files import DamagedFileError, open_regular

__all__ = [
    "READ_BYTES",
    "WrittenChunk",
    "check_chunk_file",
    "check_size",
    "checksums_behind",
    "piece_array",
    "seal",
    "verify_chunk",
]


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


_BLOCK_BYTES = 4 << 20

READ_BYTES = _BLOCK_BYTES + CHECKSUM_BYTES
"""No more is read at once, but for the index of a shard of very many inner chunks."""

Read = Callable[[int, int], bytes | memoryview]
"""Returns so many bytes (second argument) from an offset in the file (first), or fewer at its end. They are used before
the next call."""


def check_chunk_file(meta: ArrayMeta, index: tuple[int, ...], file_bytes: int, read: Read) -> int:
    """Check every byte of a chunk's file and return the checksum of its pieces' checksums, as its writer did.

    Reads in blocks. `DamagedFileError` if anything is not as it was written.
    """
    misfit = meta.misfit(index, file_bytes)
    if misfit is not None:
        raise DamagedFileError(misfit)
    file = _File(file_bytes, read)
    if not meta.sharded:
        return crc32c_of_checksums([file.check(0, file_bytes)])
    index_offset = file_bytes - meta.index_bytes
    file.check(index_offset, meta.index_bytes)
    entries = list(struct.iter_unpack("<QQ", file.read(index_offset, meta.index_bytes - CHECKSUM_BYTES)))
    used = [entries[piece.position] for piece in meta.layout(index).pieces]
    if sum(size for _, size in used) > index_offset:  # so that no byte is read twice
        raise DamagedFileError("has an index in which inner chunks overlap")
    return crc32c_of_checksums([file.check(*entry) for entry in used])


@dataclass(frozen=True)
class _File:
    size: int
    read_some: Read

    def check(self, offset: int, size: int) -> int:
        """Return the checksum of the range, without the last bytes, which are that checksum."""
        where = f"the {size} bytes at offset {offset}"
        if offset < 0 or size < CHECKSUM_BYTES or offset + size > self.size:
            raise DamagedFileError(f"ends at {self.size}, but should have {size} bytes at offset {offset}")
        checksum, end = 0, offset + size - CHECKSUM_BYTES
        while end - offset > _BLOCK_BYTES:
            checksum = crc32c(self.read(offset, _BLOCK_BYTES), checksum)
            offset += _BLOCK_BYTES
        rest = self.read(offset, end - offset + CHECKSUM_BYTES)  # with the checksum, in one read
        checksum = crc32c(rest[: end - offset], checksum)
        if checksum != int.from_bytes(rest[end - offset :], "little"):
            raise DamagedFileError(f"has a wrong checksum in {where}")
        return checksum

    def read(self, offset: int, size: int) -> bytes | memoryview:
        data = self.read_some(offset, size)
        if len(data) != size:
            raise DamagedFileError(f"ends at offset {offset + len(data)}")
        return data


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk's file, relative to the save: its size, and the checksum of the checksums of its pieces, in C order."""

    file: str
    file_bytes: int
    crc32c: int


def verify_chunk(
    root: str,
    directory: str,
    meta: ArrayMeta,
    index: tuple[int, ...],
    tensor: str,
    buffer: memoryview | None = None,
) -> WrittenChunk:
    """Check that the chunk of the array in `directory` below `root` is there and carries the checksums of its bytes.

    Returns what its writer returned, if the file is the same: compare this with what was recorded. Reads all of the
    file, in blocks, into `buffer` (of `READ_BYTES`) if there is one: new memory for each block costs as much as its
    checksum. `CheckpointCorruptError` names tensor, chunk, file and offset; `StorageError` if the file system
    refuses.
    """
    file = f"{directory}/{meta.chunk_key(index)}"
    path = os.path.join(root, file)
    try:
        with storage_errors("read", path):
            fd = open_regular(root, file)
            try:
                file_bytes = os.fstat(fd).st_size
                checksum = check_chunk_file(meta, index, file_bytes, lambda at, size: _read(fd, at, size, buffer))
            finally:
                os.close(fd)
    except DamagedFileError as damage:
        raise _corrupt(path, index, tensor, damage) from None
    return WrittenChunk(file, file_bytes, checksum)


def check_size(root: str, directory: str, meta: ArrayMeta, index: tuple[int, ...], tensor: str) -> int:
    """Check that the chunk is there as a regular file, of a size it can have, and return that. Raises as `verify_chunk`
    does."""
    path = os.path.join(root, directory, meta.chunk_key(index))
    try:
        with storage_errors("read", path):
            fd = open_regular(root, f"{directory}/{meta.chunk_key(index)}")
            file_bytes = os.fstat(fd).st_size
            os.close(fd)
        misfit = meta.misfit(index, file_bytes)
        if misfit is not None:
            raise DamagedFileError(misfit)
    except DamagedFileError as damage:
        raise _corrupt(path, index, tensor, damage) from None
    return file_bytes


def _corrupt(path: str, index: tuple[int, ...], tensor: str, damage: DamagedFileError) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"tensor {tensor}, chunk {index}: {path} {damage}; restore from another step or copy")


def _read(fd: int, offset: int, size: int, buffer: memoryview | None) -> bytes | memoryview:
    if buffer is None or size > len(buffer):
        return os.pread(fd, size, offset)
    target = buffer[:size]
    return target[: os.preadv(fd, [target], offset)]
