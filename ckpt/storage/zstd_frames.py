"""Compressed nodes of the database of a step: frames of zstd, by `numcodecs`. Any thread and process.

What is to be decompressed is checked first: it is one frame, says how many bytes it holds, and ends where the data end.
So no more memory is needed than for the content, whatever the bytes are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt.storage.regular_files import DamagedFileError

__all__ = ["compressed", "decompressed"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"\x28\xb5\x2f\xfd"
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_DICTIONARY_BYTES = (0, 1, 2, 4)
_BLOCK_HEADER_BYTES = 3
_RLE = 1  # a type of blocks: one byte, repeated
_CHECKSUM_BYTES = 4
_LEVEL = 1


def compressed(data: bytes) -> bytes:
    """Return a frame with this content."""
    from numcodecs import zstd  # here: it takes a while, and small databases are not compressed

    frame: bytes = zstd.compress(data, _LEVEL)
    return frame


def decompressed(frame: bytes | memoryview, nbytes: int) -> Array:
    """Return the content of a frame as bytes. DamagedFileError unless these are `nbytes` bytes."""
    from numcodecs import zstd

    _check(frame, nbytes)
    content: Array = np.empty(nbytes, np.uint8)
    try:
        zstd.decompress(frame, content)
    except (RuntimeError, ValueError) as error:
        raise DamagedFileError(f"cannot be decompressed: {error}") from error
    return content


def _check(frame: bytes | memoryview, nbytes: int) -> None:
    """Raise DamagedFileError unless `frame` is one frame of zstd, which says that it holds `nbytes` bytes.

    The format is in RFC 8878, sections 3.1.1.1 (the header) and 3.1.1.2 (the blocks).
    """
    header = bytes(frame[:18])
    if len(header) < 6 or header[:4] != _MAGIC:
        raise DamagedFileError("cannot be decompressed: it has no frame of zstd")
    flags = header[4]
    is_single = flags >> 5 & 1
    size_bytes = _CONTENT_SIZE_BYTES[flags >> 6] or is_single
    start = 5 + (1 - is_single) + _DICTIONARY_BYTES[flags & 3]
    size = int.from_bytes(header[start : start + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    if not size_bytes or size != nbytes:
        raise DamagedFileError(f"cannot be decompressed: its frame does not hold {nbytes} bytes")
    end, is_last = start + size_bytes, False
    while not is_last and end + _BLOCK_HEADER_BYTES <= len(frame):
        block = int.from_bytes(bytes(frame[end : end + _BLOCK_HEADER_BYTES]), "little")
        is_last = bool(block & 1)
        end += _BLOCK_HEADER_BYTES + (1 if block >> 1 & 3 == _RLE else block >> 3)
    end += _CHECKSUM_BYTES * (flags >> 2 & 1)
    if not is_last or end != len(frame):
        raise DamagedFileError("cannot be decompressed: its frame does not end where the chunk does")
