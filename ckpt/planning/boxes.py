"""Boxes: axis-aligned parts of a tensor, and which boxes the ranks of a device mesh hold of a sharded one.

The rules of sharding are those of PyTorch's ``DTensor``: a dimension is divided like ``torch.chunk`` (ceiling division,
the last parts may be smaller or empty), mesh dimension by mesh dimension from left to right. A *strided* shard with
split factor *f* first divides the dimension into *f* sections and takes the rank's chunk of each; that is how FSDP2
describes a dimension that tensor parallelism had divided before.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import product

__all__ = ["Box", "Placement", "Sharding", "local_boxes", "make_up", "position_of"]

_PRIME = (1 << 61) - 1


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``offset <= index < offset + shape`` of a tensor, dimension by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        """How many elements the box has."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The elements that are in both; None when there are none. Two 0-d boxes meet in their one element."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for end, start in zip(ends, offset, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Index this box in an array whose first element is at `origin`."""
        return tuple(slice(o - a, o - a + n) for o, a, n in zip(self.offset, origin, self.shape, strict=True))


def make_up(shape: tuple[int, ...], boxes: Collection[Box]) -> bool:
    """Whether every element of a tensor of `shape` is in exactly one of `boxes`, and no other element is.

    Takes time in proportion to the number of boxes. Give every coordinate of every dimension a random number r. The
    product over the dimensions of r(end) - r(start) is a sum with one term for each corner of a box. Where boxes are
    put together exactly, all terms but those of the whole cancel. Otherwise the sums differ as polynomials of the
    random numbers, which modulo a prime of 61 bits are equal by chance at most once in 2**54 times (Schwartz and
    Zippel). The sizes of the boxes must not be negative.
    """
    generator = random.SystemRandom()
    weights = [defaultdict[int, int](lambda: generator.randrange(_PRIME)) for _ in shape]

    def volume(box: Box) -> int:
        result = 1
        for weight, start, size in zip(weights, box.offset, box.shape, strict=True):
            result = result * (weight[start + size] - weight[start]) % _PRIME
        return result

    return sum(map(volume, boxes)) % _PRIME == volume(Box.whole(shape))


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh dimension does to a tensor: nothing (`dim` None: replicated), or divide dimension `dim`."""

    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """A tensor over a mesh: `ranks` are the global ranks of the mesh in C order, one placement for each mesh
    dimension."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh_shape, self.ranks, self.placements)))

    def __hash__(self) -> int:
        return self._hash  # made once: thousands of tensors share a mesh of thousands of ranks

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The mesh coordinate of a rank; None if it is not in the mesh."""
        try:
            return position_of(self.ranks.index(rank), self.mesh_shape)
        except ValueError:
            return None

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Map each rank of the mesh to its mesh coordinate."""
        return dict(zip(self.ranks, product(*map(range, self.mesh_shape)), strict=True))


def position_of(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of element `number`, counted in C order, of an array of this shape."""
    position = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        position.append(index)
    return tuple(reversed(position))


def local_boxes(
    shape: tuple[int, ...], sharding: Sharding, coordinate: tuple[int, ...]
) -> list[tuple[Box, tuple[int, ...]]]:
    """The boxes of a tensor that the rank at `coordinate` holds, each with its offset in the rank's local tensor.

    Nearly always one; strided shards of dimensions that do not divide evenly may be several; none when the shard is
    empty.
    """
    runs_by_dim = [_runs(size, dim, sharding, coordinate) for dim, size in enumerate(shape)]
    boxes = []
    for choice in product(*runs_by_dim):
        offset = tuple(start for start, _, _ in choice)
        boxes.append((Box(offset, tuple(n for _, n, _ in choice)), tuple(local for _, _, local in choice)))
    return boxes


def _runs(size: int, dim: int, sharding: Sharding, coordinate: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The runs (start, length, local start) of dimension `dim` that are at `coordinate`."""
    runs = [(0, size)] if size else []
    for placement, ways, position in zip(sharding.placements, sharding.mesh_shape, coordinate, strict=True):
        if placement.dim == dim:
            runs = _chunk(runs, ways, position, placement.split_factor)
    result, local = [], 0
    for start, length in runs:
        result.append((start, length, local))
        local += length
    return result


def _chunk(runs: list[tuple[int, int]], ways: int, position: int, sections: int) -> list[tuple[int, int]]:
    """The part at `position` of `ways` of the concatenated runs; with several `sections`, of each section in turn."""
    total = sum(length for _, length in runs)
    section = -(-total // sections)
    picked: list[tuple[int, int]] = []
    for first in range(0, total, section or 1):
        last = min(total, first + section)
        chunk = -(-(last - first) // ways)
        picked += _window(runs, min(last, first + position * chunk), min(last, first + (position + 1) * chunk))
    return _joined(picked)


def _window(runs: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Elements number `first` up to `last` of the concatenated runs, as runs."""
    result, seen = [], 0
    for start, length in runs:
        low, high = max(first - seen, 0), min(last - seen, length)
        if low < high:
            result.append((start + low, high - low))
        seen += length
    return result


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
