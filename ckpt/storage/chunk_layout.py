"""The layout of an encoded chunk: inner chunks, each followed by its checksum, and the index of a shard.

    plain     | elements | crc |
    sharded   | inner 0 | crc | inner 1 | crc | ... | index | crc |

The elements of an inner chunk are in C order. The index has the offset and the length of each inner chunk, 64 bits
each. Checksums are CRC-32C, 32 bits. All numbers are little-endian. Chunks at the edge of an array have the full size
too, padded with zeros; only inner chunks that lie entirely outside the array are left out.

A plain chunk is handled as one inner chunk that is as large as the chunk.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ckpt.native import CHECKSUM_BYTES, crc32c

PAGE_BYTES = 4096
"""The alignment and padding of encoded chunks in memory: what O_DIRECT needs, and the page size of shared memory."""

INDEX_ENTRY_BYTES = 16
"""An offset and a length."""

_LEFT_OUT = (2**64 - 1, 2**64 - 1)  # the index entry of an inner chunk that is left out


def in_pages(nbytes: int) -> int:
    """Return a size, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class InnerChunk:
    """An inner chunk of a shard, or all of a plain chunk.

    It holds the box of `shape` at `origin` in the array, padding excluded. Its bytes start at `offset` in the file and
    have the strides of a full inner chunk. `position` is its place in the shard's index.
    """

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    position: int


@dataclass(frozen=True)
class ChunkLayout:
    """Where everything is in one encoded chunk. `full_shape` is the shape of an inner chunk including its padding."""

    inner_chunks: tuple[InnerChunk, ...]
    full_shape: tuple[int, ...]
    inner_chunk_bytes: int
    index_entries: int
    index_offset: int
    encoded_bytes: int

    @functools.cached_property
    def index(self) -> bytes:
        """The bytes at `index_offset`: the index of a shard with its checksum; empty for a plain chunk."""
        if not self.index_entries:
            return b""
        entries = [_LEFT_OUT] * self.index_entries
        for inner in self.inner_chunks:
            entries[inner.position] = (inner.offset, self.inner_chunk_bytes + CHECKSUM_BYTES)
        index = b"".join(struct.pack("<QQ", *entry) for entry in entries)
        return index + checksum_to_bytes(crc32c(index))


@functools.lru_cache(maxsize=1 << 14)  # all layers of a model have tensors of the same shapes
def chunk_layout(
    array: tuple[int, ...],
    chunk: tuple[int, ...],
    inner_chunk: tuple[int, ...] | None,
    itemsize: int,
    index: tuple[int, ...],
) -> ChunkLayout:
    """Return the layout of the chunk at `index` of an array; the first three arguments are shapes in elements."""
    full = inner_chunk or chunk
    counts = tuple(size // part for size, part in zip(chunk, full, strict=True))
    inner_bytes = math.prod(full) * itemsize
    pitch = inner_bytes + CHECKSUM_BYTES
    inner_chunks: list[InnerChunk] = []
    for position, inner in enumerate(product(*map(range, counts))):
        origin = tuple(i * c + j * s for i, c, j, s in zip(index, chunk, inner, full, strict=True))
        if all(start < end for start, end in zip(origin, array, strict=True)):
            shape = tuple(min(s, n - o) for s, n, o in zip(full, array, origin, strict=True))
            inner_chunks.append(InnerChunk(origin, shape, len(inner_chunks) * pitch, position))
    index_entries = 0 if inner_chunk is None else math.prod(counts)
    index_offset = len(inner_chunks) * pitch
    index_bytes = 0 if inner_chunk is None else index_entries * INDEX_ENTRY_BYTES + CHECKSUM_BYTES
    return ChunkLayout(tuple(inner_chunks), full, inner_bytes, index_entries, index_offset, index_offset + index_bytes)


def indices(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a grid, in C order, without making a list of each range as `itertools.product` does."""
    if not ranges:
        yield ()
    elif all(ranges):
        for first in indices(ranges[:-1]):
            for last in ranges[-1]:
                yield (*first, last)


def checksum_to_bytes(checksum: int) -> bytes:
    """Return a checksum as it is stored in a file."""
    return struct.pack("<I", checksum)
