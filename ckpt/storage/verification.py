"""Verifies the chunk files of a step on a local file system."""

from __future__ import annotations

import os

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.chunk_files import READ_BYTES, check_chunk_file
from ckpt.storage.files import storage_errors
from ckpt.storage.metadata import ArrayMeta
from ckpt.storage.regular_files import DamagedFileError, open_regular
from ckpt.storage.writers import WrittenChunk

__all__ = ["READ_BYTES", "check_size", "verify_chunk"]


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
