"""Encode chunks in memory and check chunk files.

Staging copies the elements to `inner_chunk_array`, in the trainer. `add_checksums` fills in the rest (padding,
checksums, index), in the writer. `check_chunk_file` checks a file wherever its bytes are, `verify_chunk` one in a local
step.
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
from ckpt.storage.chunk_layout import FileLayout, InnerChunk, checksum_to_bytes, crc32c_of_checksums
from ckpt.storage.files import storage_errors
from ckpt.storage.regular_files import DamagedFileError, open_regular

__all__ = [
    "READ_BYTES",
    "WrittenChunk",
    "add_checksums",
    "check_chunk_file",
    "check_size",
    "inner_chunk_array",
    "stored_checksums",
    "verify_chunk",
]


_BLOCK_BYTES = 4 << 20

READ_BYTES = _BLOCK_BYTES + CHECKSUM_BYTES
"""At most this much is read at once, except for the index of a shard with very many inner chunks."""

Read = Callable[[int, int], bytes | memoryview]
"""``read(offset, size)`` returns bytes of a file, fewer at its end. They are used before the next call."""


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk file, relative to the save; `crc32c` is the checksum of the checksums of its inner chunks, in C order."""

    file: str
    file_bytes: int
    crc32c: int


def inner_chunk_array(
    meta: ArrayMeta, layout: FileLayout, inner: InnerChunk, encoded: memoryview
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the elements of `inner`, without padding, as a view of `encoded`.

    Its shape is ``inner.shape`` (and the trailing dimension of a raw dtype), its dtype the stored one. It need not be
    aligned to the size of an element.
    """
    shape = (*layout.full_shape, *meta.stored.trailing)
    full: np.ndarray[Any, np.dtype[Any]] = np.ndarray(shape, meta.stored.numpy_dtype, encoded, inner.offset)
    inside: tuple[slice | EllipsisType, ...] = (*(slice(size) for size in inner.shape), ...)
    return full[inside]  # the ellipsis makes it a view also where there are no dimensions


def add_checksums(meta: ArrayMeta, layout: FileLayout, encoded: memoryview, checksummed: Collection[int] = ()) -> int:
    """Fill in padding, checksums and index; the first ``layout.file_bytes`` bytes of `encoded` are then the chunk file.

    Inner chunks whose offsets are in `checksummed` already have zeros in their padding and are followed by their
    checksum; they are not read. Every other byte is read once. Returns the checksum of the inner chunks' checksums,
    which identifies the content. `encoded` is writable.
    """
    if meta.sharded:
        encoded[layout.index_offset : layout.file_bytes] = layout.index
    if len(checksummed) == len(layout.inner_chunks):
        return crc32c(stored_checksums(layout, encoded).tobytes())
    checksums: list[int] = []
    for inner in layout.inner_chunks:
        end = inner.offset + layout.inner_chunk_bytes
        if inner.offset in checksummed:
            checksums.append(int.from_bytes(encoded[end : end + CHECKSUM_BYTES], "little"))
            continue
        _clear_padding(meta, layout, inner, encoded)
        checksums.append(crc32c(encoded[inner.offset : end]))
        encoded[end : end + CHECKSUM_BYTES] = checksum_to_bytes(checksums[-1])
    return crc32c_of_checksums(checksums)


def stored_checksums(layout: FileLayout, encoded: memoryview) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the checksums that follow the inner chunks, in order, as a view of `encoded`."""
    pitch = layout.inner_chunk_bytes + CHECKSUM_BYTES
    return np.ndarray((len(layout.inner_chunks),), "<u4", encoded, layout.inner_chunk_bytes, (pitch,))


def _clear_padding(meta: ArrayMeta, layout: FileLayout, inner: InnerChunk, encoded: memoryview) -> None:
    if inner.shape == layout.full_shape:
        return
    raw = np.ndarray((*layout.full_shape, meta.stored.itemsize), np.uint8, encoded, inner.offset)
    inside: tuple[slice, ...] = ()
    for size in inner.shape:
        raw[(*inside, slice(size, None))] = 0
        inside += (slice(size),)


def check_chunk_file(meta: ArrayMeta, index: tuple[int, ...], file_bytes: int, read: Read) -> int:
    """Check every byte of a chunk file and return the checksum of its inner chunks' checksums, as its writer did.

    Reads in blocks. Raises `DamagedFileError` if anything is not as it was written.
    """
    problem = meta.size_problem(index, file_bytes)
    if problem is not None:
        raise DamagedFileError(problem)
    file = _File(file_bytes, read)
    if not meta.sharded:
        return crc32c_of_checksums([file.check(0, file_bytes)])
    index_offset = file_bytes - meta.index_bytes
    file.check(index_offset, meta.index_bytes)
    entries = list(struct.iter_unpack("<QQ", file.read(index_offset, meta.index_bytes - CHECKSUM_BYTES)))
    used = [entries[inner.position] for inner in meta.layout(index).inner_chunks]
    if sum(size for _, size in used) > index_offset:  # so that no byte is read twice
        raise DamagedFileError("has an index in which inner chunks overlap")
    return crc32c_of_checksums([file.check(*entry) for entry in used])


@dataclass(frozen=True)
class _File:
    size: int
    read_some: Read

    def check(self, offset: int, size: int) -> int:
        """Return the checksum of a range that ends with its own checksum, which is compared and not included."""
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


def verify_chunk(
    root: str,
    directory: str,
    meta: ArrayMeta,
    index: tuple[int, ...],
    tensor: str,
    buffer: memoryview | None = None,
) -> WrittenChunk:
    """Check that a chunk of the array in `directory` below `root` exists and that its checksums match its bytes.

    Returns what its writer returned, if the file is the same: compare this with what was recorded. Reads the whole
    file, in blocks, into `buffer` (of `READ_BYTES`) if given: allocating memory for each block takes as long as its
    checksum. Raises `CheckpointCorruptError`, naming tensor, chunk, file and offset; `StorageError` if the file
    cannot be read.
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
    """Return the size of a chunk file. Raises as `verify_chunk` if that is impossible, or it is no regular file."""
    path = os.path.join(root, directory, meta.chunk_key(index))
    try:
        with storage_errors("read", path):
            fd = open_regular(root, f"{directory}/{meta.chunk_key(index)}")
            file_bytes = os.fstat(fd).st_size
            os.close(fd)
        problem = meta.size_problem(index, file_bytes)
        if problem is not None:
            raise DamagedFileError(problem)
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
