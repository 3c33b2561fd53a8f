"""CRC-32C (Castagnoli), the checksum of the format.

A CRC of anything that ends with its own CRC is a constant. A file that carries its checksums is therefore identified by
the checksum of these, not of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ckpt.native import CHECKSUM_BYTES, crc32c

__all__ = ["CHECKSUM_BYTES", "crc32c", "crc32c_of_checksums", "packed"]


def packed(checksum: int) -> bytes:
    """Return the form of a checksum in a file: little-endian."""
    return struct.pack("<I", checksum)


def crc32c_of_checksums(checksums: Iterable[int]) -> int:
    """Return one checksum that stands for what all of these, in this order, stand for."""
    return crc32c(b"".join(map(packed, checksums)))
