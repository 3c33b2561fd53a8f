"""Checks the file of a chunk against the checksums it carries, wherever its bytes are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.storage.checksums import CHECKSUM_BYTES, crc32c, crc32c_of_checksums
from ckpt.storage.metadata import INDEX_ENTRY_BYTES, ArrayMeta

__all__ = ["READ_BYTES", "DamagedFileError", "check_chunk_file"]

_BLOCK_BYTES = 4 << 20

READ_BYTES = _BLOCK_BYTES + CHECKSUM_BYTES
"""No more is read at once, but for the index of a shard of very many inner chunks."""

Read = Callable[[int, int], bytes | memoryview]
"""Returns so many bytes (second argument) from an offset in the file (first), or fewer at its end. They are used before
the next call."""


class DamagedFileError(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its path."""


def check_chunk_file(meta: ArrayMeta, index: tuple[int, ...], file_bytes: int, read: Read) -> int:
    """Check every byte of a chunk's file and return the checksum of its pieces' checksums, as its writer did.

    Reads in blocks. `DamagedFileError` if anything is not as it was written.
    """
    layout = meta.layout(index)
    if meta.compression is None and file_bytes != layout.file_bytes:
        raise DamagedFileError(f"has {file_bytes} bytes instead of {layout.file_bytes}")
    file = _File(file_bytes, read)
    if not meta.sharded:
        return crc32c_of_checksums([file.check(0, file_bytes)])
    index_bytes = layout.index_entries * INDEX_ENTRY_BYTES + CHECKSUM_BYTES
    index_offset = file_bytes - index_bytes
    file.check(index_offset, index_bytes)
    entries = list(struct.iter_unpack("<QQ", file.read(index_offset, index_bytes - CHECKSUM_BYTES)))
    return crc32c_of_checksums([file.check(*entries[piece.position]) for piece in layout.pieces])


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
