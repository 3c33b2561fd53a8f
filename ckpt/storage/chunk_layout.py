"""The geometry of a chunk file, and its checksums."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ckpt.native import CHECKSUM_BYTES, crc32c

__all__ = ["PAGE_BYTES", "FileLayout", "Piece", "crc32c_of_checksums", "indices", "packed"]


def packed(checksum: int) -> bytes:
    """Return the form of a checksum in a file: little-endian."""
    return struct.pack("<I", checksum)


def crc32c_of_checksums(checksums: Iterable[int]) -> int:
    """Return one checksum that stands for what all of these, in this order, stand for."""
    return crc32c(b"".join(map(packed, checksums)))


PAGE_BYTES = 4096
"""Chunk images in memory are aligned and padded to this: what O_DIRECT asks for, and the page size of shared memory."""

INDEX_ENTRY_BYTES = 16
_MISSING = (2**64 - 1, 2**64 - 1)  # the index entry of an inner chunk that is left out


@dataclass(frozen=True)
class Piece:
    """A contiguous run of elements in a chunk file: an inner chunk, or the whole of a chunk that has none.

    It holds the box at `origin` (in the array) of `shape`, without what is padding; its bytes start at `offset` in the
    file and have the strides of a full piece. `position` is its place in the shard's index.
    """

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    position: int


@dataclass(frozen=True)
class FileLayout:
    """Where everything is in the image of one chunk file. `full_shape` is that of a piece with its padding."""

    pieces: tuple[Piece, ...]
    full_shape: tuple[int, ...]
    piece_bytes: int
    index_entries: int
    index_offset: int
    file_bytes: int

    @property
    def image_bytes(self) -> int:
        """The size of the file's image in memory: whole pages."""
        return -(-self.file_bytes // PAGE_BYTES) * PAGE_BYTES

    @functools.cached_property
    def index(self) -> bytes:
        """What is at `index_offset`: where each inner chunk is, and a checksum; nothing where there are none."""
        if not self.index_entries:
            return b""
        entries = [_MISSING] * self.index_entries
        for piece in self.pieces:
            entries[piece.position] = (piece.offset, self.piece_bytes + CHECKSUM_BYTES)
        index = b"".join(struct.pack("<QQ", *entry) for entry in entries)
        return index + packed(crc32c(index))


def indices(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a grid, in C order; `itertools.product` would make a list of each range first."""
    if not ranges:
        yield ()
    elif all(ranges):
        for first in indices(ranges[:-1]):
            for last in ranges[-1]:
                yield (*first, last)


@functools.lru_cache(maxsize=1 << 14)  # the tensors of all layers of a model are alike
def file_layout(
    array: tuple[int, ...],
    chunk: tuple[int, ...],
    inner_chunk: tuple[int, ...] | None,
    itemsize: int,
    index: tuple[int, ...],
) -> FileLayout:
    full = inner_chunk or chunk
    counts = tuple(size // part for size, part in zip(chunk, full, strict=True))
    piece_bytes = math.prod(full) * itemsize
    pieces: list[Piece] = []
    for position, inner in enumerate(product(*map(range, counts))):
        origin = tuple(i * c + j * s for i, c, j, s in zip(index, chunk, inner, full, strict=True))
        if all(start < end for start, end in zip(origin, array, strict=True)):
            shape = tuple(min(s, n - o) for s, n, o in zip(full, array, origin, strict=True))
            pieces.append(Piece(origin, shape, len(pieces) * (piece_bytes + CHECKSUM_BYTES), position))
    index_entries = 0 if inner_chunk is None else math.prod(counts)
    index_offset = len(pieces) * (piece_bytes + CHECKSUM_BYTES)
    index_bytes = 0 if inner_chunk is None else index_entries * INDEX_ENTRY_BYTES + CHECKSUM_BYTES
    return FileLayout(tuple(pieces), full, piece_bytes, index_entries, index_offset, index_offset + index_bytes)
