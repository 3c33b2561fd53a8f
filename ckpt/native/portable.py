"""The functions of `ckpt.native` in Python: numpy copies, and google_crc32c (which comes with zarr) for checksums.

The results are the same, byte for byte, but for digests. Each run and each block costs some microseconds more, and a
copy and its checksum are two passes over the memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from ckpt.native.record_types import CHECKSUM_BYTES, DIGEST_BYTES

Array = np.ndarray[Any, np.dtype[Any]]
_Read = Callable[[int, int], np.ndarray[Any, np.dtype[np.uint8]] | None]

_STRIDE = 256 << 10  # bytes that stay in a core's cache between the copy and the checksum
_NEAR_BYTES = 4096  # blocks that are so near each other are read with one call
_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits in reversed order
_ONE = 1 << 31  # the polynomial 1, in this order


class _Memory:
    """Memory at an address, as numpy's array interface. The caller keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(_Memory(address, nbytes))


def crc32c(data: bytes | np.ndarray[Any, np.dtype[np.uint8]], initial: int) -> int:
    """Return the CRC-32C of `data`, which continues a stream with the checksum `initial`."""
    crc = initial
    for start in range(0, len(data), _STRIDE):
        crc = google_crc32c.extend(crc, data[start : start + _STRIDE])
    return int(crc)


def crc32c_joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of data with the checksum `first` followed by `second_bytes` bytes with `second`.

    Each following bit multiplies the first polynomial by x, modulo that of CRC-32C; the power of x is computed by
    squaring.
    """
    power, factor, count = _ONE, _ONE >> 8, second_bytes
    while count:
        if count & 1:
            power = _product(power, factor)
        factor = _product(factor, factor)
        count >>= 1
    return _product(first, power) ^ second


def _product(a: int, b: int) -> int:
    """Return a * b modulo the polynomial of CRC-32C."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


def copy_runs(runs: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Make all copies of `runs`, as `ckpt.native.copy_runs`."""
    crc = 0
    sums = np.zeros(len(runs), np.uint64)
    for number, (to, source, nbytes, checksum_at, continues, _) in enumerate(runs.tolist()):
        crc = crc if continues else 0
        if not source:
            crc = ~crc32c_joined(~crc & 0xFFFFFFFF, 0, nbytes) & 0xFFFFFFFF
        else:
            crc = _copy(to, source, nbytes, crc)
        if checksum_at:
            _at(checksum_at, CHECKSUM_BYTES)[:] = np.frombuffer(crc.to_bytes(CHECKSUM_BYTES, "little"), np.uint8)
        sums[number] = crc
    runs["crc32c"] = sums


def _copy(to: int, source: int, nbytes: int, crc: int) -> int:
    """Copy, unless `to` is 0, and return the checksum of the copied bytes, continuing `crc`."""
    for start in range(0, nbytes, _STRIDE):
        count = min(_STRIDE, nbytes - start)
        block = _at(source + start, count)
        if to:
            stored = _at(to + start, count)
            np.copyto(stored, block)
            block = stored
        crc = google_crc32c.extend(crc, block)
    return int(crc)


def update_runs(runs: Array, _held: int, _last: int, _key: bytes, _number: int) -> None:
    """Make all copies, as `ckpt.native.update_runs`; nothing gets known of them."""
    copy_runs(runs)


def digest(data: np.ndarray[Any, np.dtype[np.uint8]], key: bytes) -> bytes:
    """Return a digest of `data`, as `ckpt.native.digest`: another one, of the same use."""
    return hashlib.blake2b(data.data, digest_size=DIGEST_BYTES, key=key[: hashlib.blake2b.MAX_KEY_SIZE]).digest()


def read_checked(fd: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Read `segments` of a file of checksummed blocks, as `ckpt.native.read_checked`."""
    return _checked(segments, lambda offset, nbytes: _read(fd, offset, nbytes))


def check_pieces(data: np.ndarray[Any, np.dtype[np.uint8]], start: int, segments: Array) -> bool:
    """Take `segments` out of bytes of a file, as `ckpt.native.check_pieces`."""

    def read(offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        part = data[offset - start :][:nbytes]
        return part if start <= offset and len(part) == nbytes else None

    return _checked(segments, read)


def _checked(segments: Array, read: _Read) -> bool:
    for blocks in _near_blocks(_by_block(segments)):
        first, last = blocks[0], blocks[-1]
        data = read(first.start, last.end - first.start)
        if data is None:
            return False
        for block in blocks:
            end = block.end - CHECKSUM_BYTES - first.start
            content = data[block.start - first.start : end]
            if crc32c(content, 0) != int.from_bytes(data[end : end + CHECKSUM_BYTES].tobytes(), "little"):
                return False
            for start, to, nbytes in block.parts:
                np.copyto(_at(to, nbytes), content[start : start + nbytes])
    return True


@dataclass(frozen=True, slots=True)
class _Block:
    """A block to read, with its checksum, and the (start in it, target address, bytes) of its parts."""

    start: int
    end: int
    parts: list[tuple[int, int, int]]


def _by_block(segments: np.ndarray[Any, np.dtype[Any]]) -> Iterator[_Block]:
    """Yield each block to read, once."""
    current = _Block(-1, -1, [])
    for base, block_bytes, first, to, nbytes, rows, at_step, to_step in segments.tolist():
        for row in range(rows):
            at, target, done = first + row * at_step, (to + row * to_step) % (1 << 64), 0
            while done < nbytes:
                number, start = divmod(at + done, block_bytes)
                count = min(nbytes - done, block_bytes - start)
                begin = base + number * (block_bytes + CHECKSUM_BYTES)
                if begin != current.start:
                    if current.parts:
                        yield current
                    current = _Block(begin, begin + block_bytes + CHECKSUM_BYTES, [])
                current.parts.append((start, target + done, count))
                done += count
    if current.parts:
        yield current


def _near_blocks(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Group blocks that one call reads."""
    group: list[_Block] = []
    for block in blocks:
        if group and (block.start > group[-1].end + _NEAR_BYTES or block.end > group[0].start + _STRIDE):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def _read(fd: int, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return bytes of a file; None if it ends before."""
    data = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        count = os.preadv(fd, [data[done:].data], offset + done)
        if count == 0:
            return None
        done += count
    return data
