"""The check of encoded chunks: `check_chunk` checks one wherever its bytes are, `verify_chunk` one in a step."""

from __future__ import annotations

import os

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.native import CHECKSUM_BYTES, RUN, copy_runs, crc32c
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import checksum_to_bytes
from ckpt.storage.compressed_reads import Read, inner_chunk_places
from ckpt.storage.files import storage_errors
from ckpt.storage.pack_index import ChunkPlace
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_source import StepSource, step_source

_BLOCK_BYTES = 4 << 20

READ_BYTES = _BLOCK_BYTES + CHECKSUM_BYTES
"""At most this much is read at once, except for the index of a shard with very many inner chunks."""


def check_chunk(meta: ArrayMeta, index: tuple[int, ...], nbytes: int, read: Read) -> bytes:
    """Check every byte of an encoded chunk of `nbytes` bytes.

    Returns the checksums of its inner chunks, in the order of their offsets, as they are stored. Reads at most
    `READ_BYTES` at once. Raises DamagedFileError if anything is not as it was written, but does not decompress.
    """
    problem = meta.size_problem(index, nbytes)
    if problem is not None:
        raise DamagedFileError(problem)
    if not meta.sharded:
        return _check_one(read, 0, nbytes)
    if meta.compression is not None:
        places = inner_chunk_places(meta, index, nbytes, read)
        return b"".join(_check_one(read, start, size) for _, start, size in sorted(places, key=lambda place: place[1]))
    index_offset = nbytes - meta.index_bytes
    # The index comes first: then the file has as many inner chunks as are listed below.
    _check_one(read, index_offset, meta.index_bytes)
    layout = meta.layout(index)
    if bytes(_exactly(read, index_offset, meta.index_bytes)) != layout.index:
        raise DamagedFileError("has another index of inner chunks than this package writes")
    pitch = layout.inner_chunk_bytes + CHECKSUM_BYTES
    if pitch > READ_BYTES:
        return b"".join(_check_one(read, inner.offset, pitch) for inner in layout.inner_chunks)
    count, most = len(layout.inner_chunks), READ_BYTES // pitch
    return b"".join(_check_equal(read, first, min(most, count - first), pitch) for first in range(0, count, most))


def _check_equal(read: Read, first: int, count: int, pitch: int) -> bytes:
    """Check `count` inner chunks from number `first` on, each of `pitch` bytes with its checksum."""
    data = np.frombuffer(_exactly(read, first * pitch, count * pitch), np.uint8)
    runs = np.zeros(count, RUN)
    runs["from"] = data.__array_interface__["data"][0] + np.arange(count, dtype=np.uint64) * pitch
    runs["bytes"] = pitch - CHECKSUM_BYTES
    copy_runs(runs)
    stored = np.ascontiguousarray(data.reshape(count, pitch)[:, -CHECKSUM_BYTES:])
    wrong = np.flatnonzero(runs["crc32c"] != stored.view("<u4").reshape(-1))
    if len(wrong):
        raise _wrong((first + int(wrong[0])) * pitch, pitch)
    return stored.tobytes()


def _check_one(read: Read, offset: int, size: int) -> bytes:
    """Return the checksum that is at the end of a range of bytes, after comparing it with that of the others."""
    checksum, at, end = 0, offset, offset + size - CHECKSUM_BYTES
    if size < CHECKSUM_BYTES:
        raise DamagedFileError(f"has {size} bytes at offset {offset} of the chunk")
    while end - at > _BLOCK_BYTES:
        checksum = crc32c(_exactly(read, at, _BLOCK_BYTES), checksum)
        at += _BLOCK_BYTES
    rest = _exactly(read, at, end - at + CHECKSUM_BYTES)  # with the checksum, in one read
    stored = checksum_to_bytes(crc32c(rest[: end - at], checksum))
    if stored != rest[end - at :]:
        raise _wrong(offset, size)
    return stored


def _wrong(offset: int, size: int) -> DamagedFileError:
    return DamagedFileError(f"has a wrong checksum in the {size} bytes at offset {offset} of the chunk")


def _exactly(read: Read, offset: int, size: int) -> bytes | memoryview:
    data = read(offset, size)
    if len(data) != size:
        raise DamagedFileError(f"ends at offset {offset + len(data)} of the chunk")
    return data


def verify_chunk(
    step: str | StepSource, place: ChunkPlace, meta: ArrayMeta, index: tuple[int, ...], tensor: str
) -> bytes:
    """Check that a chunk of a published step is in its place and that its checksums match its bytes.

    Returns what `check_chunk` returns. Reads in blocks. Raises CheckpointCorruptError, naming tensor, chunk, file and
    offset; StorageError if the file cannot be read.
    """
    source = step_source(step)
    try:
        with storage_errors("read", os.path.join(source.path, place.file)):
            file = source.open(place.file)
            try:
                if place.offset + place.nbytes > file.size:
                    raise DamagedFileError(f"ends at offset {file.size}")
                return check_chunk(meta, index, place.nbytes, lambda at, size: file.read(place.offset + at, size))
            finally:
                file.close()
    except DamagedFileError as damage:
        raise corrupt(source.path, place, index, tensor, damage) from None


def corrupt(
    step: str, place: ChunkPlace, index: tuple[int, ...], tensor: str, damage: DamagedFileError
) -> CheckpointCorruptError:
    """Return the error for a damaged chunk."""
    where = f"{os.path.join(step, place.file)} {damage}"
    at = f"the chunk is at offset {place.offset}; restore from another step or copy"
    return CheckpointCorruptError(f"tensor {tensor}, chunk {index}: {where} ({at})")
