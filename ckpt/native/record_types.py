"""The records that `ckpt.native` takes arrays of, as in moves.c."""

from __future__ import annotations

import numpy as np

CHECKSUM_BYTES = 4
DIGEST_BYTES = 32
PAGE_BYTES = 4096

BLOCK_BYTES = 2 * PAGE_BYTES
"""The bytes over which a digest makes one hash, as in digest.c."""

DIGEST_KEY_BYTES = BLOCK_BYTES + 16

HASH_BYTES = 32
"""The bytes of the hash of a block."""

RUN = np.dtype([(name, np.uint64) for name in ("to", "from", "bytes", "checksum_at", "continues", "crc32c")])
"""A copy: addresses, and the number of bytes.

Afterwards `crc32c` holds the checksum of the bytes. If `checksum_at` is not 0 the checksum is also written to that
address (4 bytes, little-endian). The checksum of a run that `continues` covers the run before, too. With 0 in `to`
only the checksum is computed; with 0 in `from` it is the checksum of zeros, and no memory is accessed."""

HELD = np.dtype([(name, np.uint64) for name in ("state", "content", "crc32c", "hashes", "is_same")])
"""A record of the bytes at the target of a run, kept from one call of `update_runs` to the next; zero at first.

`state` is 0 if nothing is known of them. The same `content` of the same run means the same bytes. `hashes` is the
address of room for `HASH_BYTES` for each block that the run begins; the other fields are for `update_runs` only."""

SEGMENT = np.dtype(
    [(name, np.uint64) for name in ("base", "block_bytes", "at", "to", "bytes", "rows", "at_step", "to_step")]
)
"""A read of `rows` rows of `bytes` bytes each from a file.

At byte `base` of the file a series of blocks begins, each of `block_bytes` bytes followed by their checksum. Row r goes
to the address ``to + r * to_step``, from byte ``at + r * at_step`` of the blocks, not counting checksums. `to_step` may
be negative, modulo 2**64."""
