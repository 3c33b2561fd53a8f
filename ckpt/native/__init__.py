"""Copies, CRC-32C checksums, digests, frames of Blosc and checked reads, at the speed of memory.

`compiled` does the work, in C, if there was a C compiler when the package was installed; otherwise, or with
CKPT_PORTABLE=1 in the environment, `portable` does, slower. Addresses are not checked: the callers pass memory that
they keep alive. Any thread, any process.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt.native import compiled, portable
from ckpt.native.record_types import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    DIGEST_KEY_BYTES,
    HASH_BYTES,
    HELD,
    PAGE_BYTES,
    RUN,
    SEGMENT,
)

__all__ = [
    "BLOCK_BYTES",
    "CHECKSUM_BYTES",
    "DIGEST_KEY_BYTES",
    "HASH_BYTES",
    "HELD",
    "RUN",
    "SEGMENT",
    "blosc_frame",
    "can_look",
    "check_pieces",
    "choose",
    "copy_runs",
    "crc32c",
    "crc32c_joined",
    "describe_tensors",
    "digest",
    "look",
    "read_checked",
    "update_runs",
    "warn_if_portable",
]

_FRAME_HEAD_BYTES = 16
_WORDS = 3 + 2 * 2  # for a matrix
_NO_ROOM = -2
_compiled = None if os.environ.get("CKPT_PORTABLE") == "1" else compiled.load()
_engine: Any = portable if _compiled is None else _compiled


@functools.cache
def warn_if_portable() -> None:
    """Log once that the compiled functions are missing."""
    if _compiled is None:
        logging.getLogger("ckpt").warning(
            "the compiled part of ckpt is not installed: saves stall longer and restores take longer. Install "
            "a C compiler and then the package again (`pip install --force-reinstall --no-deps .`)"
        )


def choose(most: int) -> int:
    """Select the fastest implementation of checksums on this machine up to `most`, and return which it is.

    -1 is without compiled code, 0 is C for any processor; on x86-64, 1 uses 128 bits at a time and 2 uses 512. The
    fastest is the default: this is for tests. Not while other threads use this module.
    """
    global _engine
    if _compiled is None or most < 0:
        _engine = portable
        return -1
    _engine = _compiled
    return _compiled.choose(most)


def blosc_frame(
    compress: int,
    context: int,
    content: np.ndarray[Any, np.dtype[np.uint8]],
    itemsize: int,
    scratch: np.ndarray[Any, np.dtype[np.uint8]],
    frame: np.ndarray[Any, np.dtype[np.uint8]],
) -> int | None:
    """Write the frame of a content, and return its size; None without the compiled functions.

    The content is whole elements of 2, 4 or 8 bytes. `compress` is the address of ZSTD_compress2, `context` that of a
    context, which no other thread uses. `scratch` has at least as many bytes as the content, `frame` 16 more.
    """
    if _engine is portable:
        return None
    nbytes = content.nbytes
    if itemsize not in (2, 4, 8) or nbytes % itemsize:
        raise ValueError(f"{nbytes} bytes are not whole elements of 2, 4 or 8 bytes: {itemsize}")
    if scratch.nbytes < nbytes or frame.nbytes < nbytes + _FRAME_HEAD_BYTES:
        raise ValueError(f"no room for {nbytes} bytes in {scratch.nbytes}, or for a frame of them in {frame.nbytes}")
    return int(_engine.blosc_frame(compress, context, content, itemsize, scratch, frame))


def copy_runs(runs: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Make all copies of `runs`, a 1-d array of RUN, one after the other.

    The checksums are those of the copied bytes, even if the source changes meanwhile. Source and target of a run must
    not overlap. Large runs bypass the caches.
    """
    _check_runs(runs)
    _engine.copy_runs(runs)


def update_runs(runs: np.ndarray[Any, np.dtype[Any]], held: int, last: int, key: bytes, number: int) -> None:
    """Make the copies of `runs` as `copy_runs` does, but for those whose bytes are at their targets already.

    At the address `held` there is a record of HELD for each run, with what is known of the bytes at its target; it is
    updated. Those of the last call are at `last`, which may be the same: bytes with the same checksum then get a hash,
    under a secret `key` of `DIGEST_KEY_BYTES` random bytes. It tells in the next call, as surely as `digest`, that they
    are the same; then they are read, not copied. `number`, of the call, grows. Nothing else may write to the targets.

    Without the compiled functions all is copied, and nothing known.
    """
    _check_runs(runs)
    if len(key) != DIGEST_KEY_BYTES:
        raise ValueError(f"{len(key)} bytes are not a key")
    _engine.update_runs(runs, held, last, key, number)


def _check_runs(runs: np.ndarray[Any, np.dtype[Any]]) -> None:
    if runs.dtype != RUN or runs.ndim != 1 or not runs.flags.c_contiguous:
        raise ValueError("runs must be a contiguous 1-d array of RUN")
    if len(runs) and runs["continues"][0]:
        raise ValueError("the first run must not continue another")


def crc32c(data: bytes | bytearray | memoryview, initial: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, any contiguous buffer, without copying it.

    `initial` is the checksum of the bytes before, if `data` continues a stream.
    """
    return int(
        _engine.crc32c(data if isinstance(data, bytes) else np.asarray(data).reshape(-1).view(np.uint8), initial)
    )


def crc32c_joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of data with the checksum `first` followed by `second_bytes` bytes with `second`."""
    return int(_engine.crc32c_joined(first, second, second_bytes))


def describe_tensors(
    tensors: list[Any],
    getters: np.ndarray[Any, np.dtype[np.uint64]],
    strided: int,
    layout: np.ndarray[Any, np.dtype[np.uint64]],
    addresses: np.ndarray[Any, np.dtype[np.uint64]] | None,
) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return one array of the dtypes, devices, sizes and strides of tensors. Their `addresses` are written, if given.

    None if one of them is conjugated or negated, or has another layout than `strided`, and without the compiled
    functions. `getters` are the addresses of functions of libtorch, `layout` where the parts of a tensor are: see
    tensors.c. Keeps the interpreter's lock.
    """
    if _engine is portable:
        return None
    room = np.empty(_WORDS * len(tensors), np.int64)
    words = _NO_ROOM
    while words == _NO_ROOM:
        words = _engine.describe_tensors(tensors, getters, strided, layout, addresses, room)
        if words == _NO_ROOM:
            room = np.empty(4 * len(room), np.int64)
    return None if words < 0 else room[:words]


def digest(data: memoryview, key: bytes) -> bytes:
    """Return a digest of `data`, whole pages, under a secret `key` of `DIGEST_KEY_BYTES` random bytes.

    Data of one size with the same digest are the same: with others the digest agrees for one key in 2**128, whoever has
    chosen them without the key. For one process: other implementations make other digests.
    """
    if len(key) != DIGEST_KEY_BYTES or data.nbytes % PAGE_BYTES:
        raise ValueError(f"{data.nbytes} bytes are not whole pages, or {len(key)} bytes are not a key")
    made: bytes = _engine.digest(np.frombuffer(data, np.uint8), key)
    return made


def can_look() -> bool:
    """Return whether `look` can be called: with the compiled functions, and objects as those of CPython are."""
    return _engine is not portable and object.__basicsize__ == 2 * np.dtype(np.intp).itemsize


def look(state: Any, arguments: Mapping[str, Any]) -> int:
    """Look at the containers of a state. The arguments are the fields of `struct look` in look.c, up to `length`.

    Returns 0 if all of the state could be seen, and has the structure that is given. Raises what the functions raise
    that are among the arguments. Keeps the interpreter's lock.
    """
    return int(_engine.look(state, arguments))


def read_checked(fd: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Read `segments`, a 1-d array of SEGMENT, from a file of blocks with a checksum after each.

    Segments are in the order of the file and do not overlap, also if all between the first and the last row of one is
    counted to it; series of blocks do not overlap either. Each block that they touch is read once, as a whole, and
    blocks near each other with one call of the system. Returns whether all these blocks are complete and match their
    checksums. If not, some of the memory may have been written. OSError if the file cannot be read.
    """
    _check_segments(segments)
    return bool(_engine.read_checked(fd, segments))


def check_pieces(data: bytes | memoryview, start: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Take `segments` out of `data`, bytes of a file of which the first is at `start`; otherwise as `read_checked`."""
    _check_segments(segments)
    return bool(_engine.check_pieces(np.frombuffer(data, np.uint8), start, segments))


def _check_segments(segments: np.ndarray[Any, np.dtype[Any]]) -> None:
    if segments.dtype != SEGMENT or segments.ndim != 1 or not segments.flags.c_contiguous:
        raise ValueError("segments must be a contiguous 1-d array of SEGMENT")
    if not segments["block_bytes"].all():
        raise ValueError("the blocks of a segment must have bytes")
    if not in_order(segments):
        raise ValueError("segments must be in order and not overlap")


def in_order(segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Return whether segments are in the order of the file and do not overlap."""
    segments = segments[(segments["bytes"] > 0) & (segments["rows"] > 0)]
    if ((segments["rows"] > 1) & (segments["at_step"] < segments["bytes"])).any():
        return False
    first, last = segments[1:], segments[:-1]
    ends = last["at"] + (last["rows"] - 1) * last["at_step"] + last["bytes"]
    same = (first["base"] == last["base"]) & (first["block_bytes"] == last["block_bytes"])
    block_ends = last["base"] + ((ends - 1) // last["block_bytes"] + 1) * (last["block_bytes"] + CHECKSUM_BYTES)
    return bool(np.where(same, ends <= first["at"], block_ends <= first["base"]).all())
