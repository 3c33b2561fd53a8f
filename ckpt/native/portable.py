"""The functions of `ckpt.native` without compiled code of ours: numpy copies, and google_crc32c makes the checksums.

google_crc32c comes with zarr. The results are the same, byte for byte; each run and each piece costs some microseconds
more, and a copy and its checksum are two passes over the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np

from ckpt.native.records import CHECKSUM_BYTES

__all__ = ["copy_runs", "crc32c", "crc32c_joined", "read_pieces"]

_STRIDE = 256 << 10  # bytes that stay in a core's cache between the copy and the checksum
_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits in reversed order
_ONE = 1 << 31  # the polynomial 1, in this order


class _Memory:
    """So many bytes at an address, for numpy. Its owner keeps them alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(_Memory(address, nbytes))


def crc32c(data: bytes | np.ndarray[Any, np.dtype[np.uint8]], initial: int) -> int:
    """Return the CRC-32C of `data`, continuing a stream that has the checksum `initial`."""
    crc = initial
    for start in range(0, len(data), _STRIDE):
        crc = google_crc32c.extend(crc, data[start : start + _STRIDE])
    return int(crc)


def crc32c_joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of what has the checksum `first`, followed by so many bytes that have `second`.

    Bytes that follow multiply the polynomial of a checksum by x to the power of their bits, modulo that of CRC-32C; the
    power is made by squaring.
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
    """Do all copies of `runs`, as `ckpt.native.copy_runs`."""
    crc = 0
    sums = np.zeros(len(runs), np.uint64)
    for number, (to, source, nbytes, seal_at, continues, _) in enumerate(runs.tolist()):
        crc = crc if continues else 0
        if not source:
            crc = ~crc32c_joined(~crc & 0xFFFFFFFF, 0, nbytes) & 0xFFFFFFFF
        else:
            crc = _copy(to, source, nbytes, crc)
        if seal_at:
            _at(seal_at, CHECKSUM_BYTES)[:] = np.frombuffer(crc.to_bytes(CHECKSUM_BYTES, "little"), np.uint8)
        sums[number] = crc
    runs["crc32c"] = sums


def _copy(to: int, source: int, nbytes: int, crc: int) -> int:
    """Copy, if there is a place to copy to, and return the checksum of what was stored."""
    for start in range(0, nbytes, _STRIDE):
        count = min(_STRIDE, nbytes - start)
        block = _at(source + start, count)
        if to:
            stored = _at(to + start, count)
            np.copyto(stored, block)
            block = stored
        crc = google_crc32c.extend(crc, block)
    return int(crc)


def read_pieces(fd: int, piece_bytes: int, segments: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Read `segments` of a file of pieces with checksums, as `ckpt.native.read_pieces`."""
    for number, parts in _by_piece(piece_bytes, segments):
        piece = _read_piece(fd, number, piece_bytes)
        if piece is None:
            return False
        for start, to, nbytes in parts:
            np.copyto(_at(to, nbytes), piece[start : start + nbytes])
    return True


def _by_piece(
    piece_bytes: int, segments: np.ndarray[Any, np.dtype[Any]]
) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Yield each piece that is touched once: its number, and (where in it, to which address, how many bytes)."""
    current = -1
    parts: list[tuple[int, int, int]] = []
    for at, to, nbytes in segments.tolist():
        done = 0
        while done < nbytes:
            number, start = divmod(at + done, piece_bytes)
            count = min(nbytes - done, piece_bytes - start)
            if number != current and parts:
                yield current, parts
                parts = []
            current = number
            parts.append((start, to + done, count))
            done += count
    if parts:
        yield current, parts


def _read_piece(fd: int, number: int, piece_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return a piece; None if it is not all there, or its checksum is another one."""
    size = piece_bytes + CHECKSUM_BYTES
    block = np.empty(size, np.uint8)
    done = 0
    while done < size:
        count = os.preadv(fd, [block[done:].data], number * size + done)
        if count == 0:
            return None
        done += count
    expected = int.from_bytes(block[piece_bytes:].tobytes(), "little")
    return block[:piece_bytes] if crc32c(block[:piece_bytes], 0) == expected else None
