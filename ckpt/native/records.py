"""What the functions of `ckpt.native` are handed: arrays of these records. As in moves.c."""

from __future__ import annotations

import numpy as np

__all__ = ["CHECKSUM_BYTES", "RUN", "SEGMENT"]

CHECKSUM_BYTES = 4

RUN = np.dtype([(name, np.uint64) for name in ("to", "from", "bytes", "seal_at", "continues", "crc32c")])
"""A copy: the addresses, and how many bytes. Their checksum goes to the address `seal_at` as well, if that is not 0
(4 bytes, little-endian), and is in `crc32c` when it is done. A run that `continues` has the checksum of the run before
and its own bytes together. With 0 in `to` nothing but the checksum is made; with 0 in `from` it is that of so many
zeros, and nothing is touched."""

SEGMENT = np.dtype([(name, np.uint64) for name in ("at", "to", "bytes")])
"""What to read: so many bytes, from byte `at` of what is in the pieces of a file, to an address."""
