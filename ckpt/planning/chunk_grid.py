"""Chunk grids: how a tensor is divided into chunks such that exactly one rank writes each chunk.

Every boundary between the boxes of two ranks must lie on the regular grid. If the tensor is divided evenly, the chunks
are the boxes. Otherwise the greatest common divisor of all boundaries may give chunks of reasonable size; if it does
not, each box becomes an array of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.planning.boxes import Box

_INNER_CHUNKS = 96  # then a rank that reads a third of a tensor reads at most 1/16 more
_INNER_CHUNKS_OF_SHARE = 20  # of each rank; then one of fewer ranks reads at most 1/10 more, however many there were
_INNER_CHUNKS_OF_CHUNK = 8
_CHUNKS_IN_FILE = 4  # so that files are not much larger than wanted
_TOO_SMALL = 8  # times smaller than wanted


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Sizes, in bytes, that determine the files of a checkpoint.

    A rank begins a new file when one has `file_bytes`. Chunks are divided into inner chunks of about `inner_bytes` at
    most, and `least_inner_bytes` at least, so that a restore to another sharding reads little more than it needs. What
    several ranks hold is divided between them, into parts of at least `smallest_split_bytes`. With `common_apart` that
    is in files of its own, with `small_apart` what is small beside the rest.
    """

    file_bytes: int = 64 << 20
    inner_bytes: int = 4 << 20
    least_inner_bytes: int = 16 << 10
    smallest_split_bytes: int = 64 << 10
    common_apart: bool = False
    small_apart: bool = False

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk, about, at most."""
        return max(1, self.file_bytes // _CHUNKS_IN_FILE)


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of chunks; with `inner_chunk_shape`, which divides `chunk_shape`, each is a shard of inner chunks."""

    chunk_shape: tuple[int, ...]
    inner_chunk_shape: tuple[int, ...] | None = None


def common_grid(shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int) -> tuple[int, ...] | None:
    """Return the largest chunk shape with every boundary of `boxes` on its grid; None if that makes too many chunks."""
    chunk = tuple(
        _common_size(size, {box.offset[dim] for box in boxes} | {box.offset[dim] + box.shape[dim] for box in boxes})
        for dim, size in enumerate(shape)
    )
    chunks = math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))
    small = math.prod(chunk) * itemsize < 1 << 20
    return None if small and chunks > 4 * len(boxes) else chunk


def _common_size(size: int, boundaries: Iterable[int]) -> int:
    return math.gcd(*(b for b in boundaries if 0 < b < size)) or max(size, 1)


def refine(
    shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, target_bytes: int, options: GridOptions
) -> Grid:
    """Divide the chunks of a grid into some of about `target_bytes`, as even as possible, and these into inner chunks.

    Only leading dimensions are divided, so that every inner chunk is contiguous in a C-ordered tensor. Inner chunks
    have about `options.inner_bytes`, and less in tensors that are not large (see `_INNER_CHUNKS`).
    """
    bounded = [part < size for part, size in zip(chunk, shape, strict=True)]
    outer = list(_cut(chunk, bounded, itemsize, target_bytes))
    chunk_bytes = math.prod(outer) * itemsize
    of_tensor, of_share = math.prod(shape) // _INNER_CHUNKS, math.prod(chunk) // _INNER_CHUNKS_OF_SHARE
    wanted = min(of_tensor * itemsize, of_share * itemsize, chunk_bytes // _INNER_CHUNKS_OF_CHUNK)
    most = min(target_bytes, options.inner_bytes)
    inner = _cut(tuple(outer), bounded, itemsize, min(most, max(wanted, options.least_inner_bytes)))
    for dim, is_bounded in enumerate(bounded):
        if not is_bounded:
            outer[dim] = -(-outer[dim] // inner[dim]) * inner[dim]
    too_much = math.prod(outer) * itemsize - target_bytes
    if chunk_bytes <= target_bytes and too_much > 0:  # rounding up to inner chunks made it too large
        return refine(shape, chunk, itemsize, target_bytes - too_much, options)
    return Grid(tuple(outer), inner if tuple(outer) != inner else None)


def _cut(chunk: tuple[int, ...], bounded: Sequence[bool], itemsize: int, target_bytes: int) -> tuple[int, ...]:
    """Return the shape of a part of a chunk of about `target_bytes` at most, or one element.

    A bounded dimension is divided evenly, so the part may be larger if its size has few divisors.
    """
    part = list(chunk)
    for dim, size in enumerate(chunk):
        row = math.prod(chunk[dim + 1 :]) * itemsize
        if size * row <= target_bytes:
            break
        wanted = max(1, target_bytes // row)
        part[dim] = _divisor(size, wanted) if bounded[dim] else -(-size // -(-size // wanted))
        if row <= target_bytes:
            break
    return tuple(part)


def _divisor(size: int, wanted: int) -> int:
    """Return a divisor of `size` near `wanted`: the next one below, unless that is much too small."""
    if wanted >= size:
        return size
    low = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    divisors = [*low, *(size // d for d in reversed(low))]
    below = max(d for d in divisors if d <= wanted)
    return below if below * _TOO_SMALL > wanted else min(d for d in divisors if d >= wanted)
