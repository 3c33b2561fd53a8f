"""Checks the file of a chunk against the checksums it carries, wherever its bytes are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.storage.checksums import CHECKSUM_BYTES, crc32c, crc32c_of_checksums
from ckpt.storage.metadata import ArrayMeta
from ckpt.storage.regular_files import DamagedFileError

__all__ = ["READ_BYTES", "check_chunk_file"]

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
