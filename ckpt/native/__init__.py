"""Moves bytes at the speed of memory, with their CRC-32C made on the way.

The code is C (crc32c.c, moves.c), compiled when the package is installed, and called without the interpreter's lock.
Nothing here checks an address: the callers hand over memory that they keep alive. Any thread, any process.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
import threading
from typing import Any

import numpy as np

__all__ = ["CHECKSUM_BYTES", "RUN", "SEGMENT", "choose", "copy_runs", "crc32c", "crc32c_joined", "read_pieces"]

CHECKSUM_BYTES = 4

RUN = np.dtype([(name, np.uint64) for name in ("to", "from", "bytes", "seal_at", "continues", "crc32c")])
"""A copy: the addresses, and how many bytes. Their checksum goes to the address `seal_at` as well, if that is not 0
(4 bytes, little-endian), and is in `crc32c` when it is done. A run that `continues` has the checksum of the run before
and its own bytes together. With 0 in `to` nothing but the checksum is made; with 0 in `from` it is that of so many
zeros, and nothing is touched."""

SEGMENT = np.dtype([(name, np.uint64) for name in ("at", "to", "bytes")])
"""What to read: so many bytes, from byte `at` of what is in the pieces of a file, to an address."""


_OLD = "was compiled from another version of its source; install the package again (`pip install .`)"


def _load() -> ctypes.CDLL:
    path = os.path.join(os.path.dirname(__file__), f"_library{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"{error}: the compiled part of ckpt is missing; install the package again (`pip install .` in its "
            "source, with a C compiler)"
        ) from error
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    for name, result, *arguments in (
        ("ckpt_copy_runs", None, pointer, size),
        ("ckpt_crc32c", ctypes.c_uint32, ctypes.c_uint32, pointer, size),
        ("ckpt_crc32c_choose", ctypes.c_int, ctypes.c_int),
        ("ckpt_crc32c_joined", ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, size),
        ("ckpt_read_pieces", ctypes.c_int, ctypes.c_int, size, pointer, size, pointer, size),
        ("ckpt_record_bytes", size),
    ):
        function = getattr(library, str(name), None)
        if function is None:
            raise ImportError(f"{path} {_OLD}")
        function.restype, function.argtypes = result, arguments
    if library.ckpt_record_bytes() != RUN.itemsize << 8 | SEGMENT.itemsize:
        raise ImportError(f"{path} {_OLD}")
    return library


_library = _load()
_BLOCK_BYTES = 256 << 10  # stays in a core's cache


class _Block(threading.local):
    """What the pieces that this thread reads go through."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * _BLOCK_BYTES)()


_block = _Block()


def choose(most: int) -> int:
    """Use the best way that the processor has to make checksums, but none above `most`; returns which it is.

    0 works on any processor; on x86-64, 1 uses 128 bits at a time and 2 uses 512. It is the best from the start: this
    is for tests. Not while other threads use this module.
    """
    return int(_library.ckpt_crc32c_choose(most))


def copy_runs(runs: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Do all copies of `runs`, a 1-d array of RUN, one after the other.

    The checksums are of the bytes that were stored, whatever becomes of the source meanwhile. The memory of a run must
    not overlap. Large runs go past the caches.
    """
    if runs.dtype != RUN or runs.ndim != 1 or not runs.flags.c_contiguous:
        raise ValueError("runs must be a contiguous 1-d array of RUN")
    if len(runs) and runs["continues"][0]:
        raise ValueError("the first run must not continue another")
    _library.ckpt_copy_runs(runs.__array_interface__["data"][0], len(runs))


def crc32c(data: bytes | bytearray | memoryview, initial: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, any contiguous buffer, continuing a stream that has the checksum
    `initial`. No copy."""
    if isinstance(data, bytes):
        return int(_library.ckpt_crc32c(initial, data, len(data)))
    view = np.asarray(data).view(np.uint8)
    return int(_library.ckpt_crc32c(initial, view.__array_interface__["data"][0], view.nbytes))


def crc32c_joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of what has the checksum `first`, followed by so many bytes that have `second`."""
    return int(_library.ckpt_crc32c_joined(first, second, second_bytes))


def read_pieces(fd: int, piece_bytes: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Read `segments`, a 1-d array of SEGMENT, of a file that begins with pieces of `piece_bytes` bytes, each with its
    checksum behind it. They are in order and do not overlap. Each piece that they touch is read once, as a whole.

    Returns whether these are all there, and as their checksums say. If not, some of the memory may have been written.
    OSError if the file cannot be read.
    """
    if segments.dtype != SEGMENT or segments.ndim != 1 or not segments.flags.c_contiguous or piece_bytes < 1:
        raise ValueError("segments must be a contiguous 1-d array of SEGMENT, and pieces have bytes")
    if len(segments) > 1 and (segments["at"][:-1] + segments["bytes"][:-1] > segments["at"][1:]).any():
        raise ValueError("segments must be in order and not overlap")
    address = segments.__array_interface__["data"][0]
    error = int(_library.ckpt_read_pieces(fd, piece_bytes, address, len(segments), _block.memory, _BLOCK_BYTES))
    if error > 0:
        raise OSError(error, os.strerror(error))
    return error == 0
