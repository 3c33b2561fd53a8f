"""The functions of `ckpt.native` in Python: numpy copies, and google_crc32c (which comes with zarr) for checksums.

The results are the same, byte for byte. Each run and each block costs some microseconds more, and a copy and its
checksum are two passes over the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np

from ckpt.native.records import CHECKSUM_BYTES

__all__ = ["copy_runs", "crc32c", "crc32c_joined", "read_checked"]

_STRIDE = 256 << 10  # bytes that stay in a core's cache between the copy and the checksum
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


def read_checked(fd: int, block_bytes: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Read `segments` of a file of checksummed blocks, as `ckpt.native.read_checked`."""
    for number, parts in _by_block(block_bytes, segments):
        block = _read_block(fd, number, block_bytes)
        if block is None:
            return False
        for start, to, nbytes in parts:
            np.copyto(_at(to, nbytes), block[start : start + nbytes])
    return True


def _by_block(
    block_bytes: int, segments: np.ndarray[Any, np.dtype[Any]]
) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Yield each block to read, once: its number, and (start in the block, target address, bytes) of its parts."""
    current = -1
    parts: list[tuple[int, int, int]] = []
    for at, to, nbytes in segments.tolist():
        done = 0
        while done < nbytes:
            number, start = divmod(at + done, block_bytes)
            count = min(nbytes - done, block_bytes - start)
            if number != current and parts:
                yield current, parts
                parts = []
            current = number
            parts.append((start, to + done, count))
            done += count
    if parts:
        yield current, parts


def _read_block(fd: int, number: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return a block; None if it is incomplete or does not match its checksum."""
    size = block_bytes + CHECKSUM_BYTES
    data = np.empty(size, np.uint8)
    done = 0
    while done < size:
        count = os.preadv(fd, [data[done:].data], number * size + done)
        if count == 0:
            return None
        done += count
    expected = int.from_bytes(data[block_bytes:].tobytes(), "little")
    return data[:block_bytes] if crc32c(data[:block_bytes], 0) == expected else None
