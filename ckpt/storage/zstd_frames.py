"""Decompress chunks with tensorstore, which has compressed them too: what an install writes it can read.

What is to be decompressed is checked first: it is one frame, says how many bytes it holds, and ends where the data end.
So no more memory is needed than for the elements, whatever the bytes are. Any thread.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt.errors import StorageError
from ckpt.storage.regular_files import DamagedFileError

__all__ = ["check_frame", "compressed", "decompressed"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"\x28\xb5\x2f\xfd"
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_DICTIONARY_BYTES = (0, 1, 2, 4)
_BLOCK_HEADER_BYTES = 3
_RLE = 1  # a type of blocks: one byte, repeated
_CHECKSUM_BYTES = 4
_KEY = "c.0"


def check_frame(frame: bytes | memoryview, nbytes: int) -> None:
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


def decompressed(frame: bytes | memoryview, nbytes: int) -> Array:
    """Return the content of a frame as bytes. DamagedFileError unless these are `nbytes` bytes.

    StorageError in a process that was forked from one that had used tensorstore, unless numcodecs is installed.
    """
    check_frame(frame, nbytes)
    try:
        return _decompress()(frame, nbytes)
    except (RuntimeError, ValueError) as error:
        raise DamagedFileError(f"cannot be decompressed: {error}") from error


def compressed(data: bytes) -> bytes | None:
    """Return a frame with this content; None in a process that was forked from one that had used tensorstore."""
    if _first_user() != os.getpid():
        return None
    array, store = _engine(len(data), threading.get_ident())
    array.write(np.frombuffer(data, np.uint8)).result()
    frame: bytes = store.read(_KEY).result().value
    store.write(_KEY, None).result()
    return frame


def _decompress() -> Callable[[bytes | memoryview, int], Array]:
    # The threads of tensorstore do not exist in a forked process, which it would end when it is used there.
    return _with_tensorstore if _first_user() == os.getpid() else _with_numcodecs


@functools.cache
def _first_user() -> int:
    """Return the process that first used tensorstore here: this one, or the one that it was forked from."""
    return os.getpid()


def _with_tensorstore(frame: bytes | memoryview, nbytes: int) -> Array:
    array, store = _engine(nbytes, threading.get_ident())
    store.write(_KEY, bytes(frame)).result()
    try:
        content: Array = array.read().result()
    finally:
        store.write(_KEY, None).result()
    return content


@functools.lru_cache(maxsize=64)
def _engine(nbytes: int, thread: int) -> tuple[Any, Any]:
    """Return an array in memory, for one thread, of which the only chunk is a frame; and the store that has it."""
    import tensorstore as ts

    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [nbytes],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [nbytes]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}],
    }
    context = ts.Context({"data_copy_concurrency": {"limit": 1}})
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata, "create": True}
    spec["store_data_equal_to_fill_value"] = True
    array = ts.open(spec, context=context).result()
    return array, array.kvstore


def _with_numcodecs(frame: bytes | memoryview, nbytes: int) -> Array:
    try:
        from numcodecs import zstd
    except ImportError:
        raise StorageError(
            "this process was forked from one that had read compressed chunks, and tensorstore works in one of the two "
            "only: start it with the method spawn, or install the extra zarr (pip install 'ckpt-inprocess[zarr]')"
        ) from None
    content: Array = np.empty(nbytes, np.uint8)
    zstd.decompress(frame, content)
    return content
