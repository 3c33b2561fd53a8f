"""Boxes: axis-aligned parts of a tensor, and the boxes of a sharded tensor that each rank of a device mesh holds.

The rules of sharding are those of PyTorch's ``DTensor``: a dimension is divided like ``torch.chunk`` (ceiling division,
the last parts may be smaller or empty), mesh dimension by mesh dimension from left to right. A *strided* shard with
split factor *f* first divides the dimension into *f* sections and takes the rank's chunk of each; FSDP2 describes a
dimension that tensor parallelism has divided before in this way.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import product

_PRIME = (1 << 61) - 1


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``offset <= index < offset + shape`` of a tensor, dimension by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the elements that are in both boxes; None if there are none. 0-d boxes share their one element."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for end, start in zip(ends, offset, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of this box in an array whose first element is at `origin`."""
        return tuple(slice(o - a, o - a + n) for o, a, n in zip(self.offset, origin, self.shape, strict=True))


def tile_exactly(shape: tuple[int, ...], boxes: Collection[Box]) -> bool:
    """Return whether each element of a tensor of `shape` is in exactly one of `boxes`, and these have no others.

    Takes time in proportion to the number of boxes. Assign a random number r to every coordinate of every dimension.
    The product of r(end) - r(start) over the dimensions is a sum with one term for each corner of a box. Where the
    boxes tile the tensor, all terms cancel but those of the whole. Otherwise the sums differ as polynomials of the
    random numbers; modulo a prime of 61 bits they are equal with a probability of at most 2**-54 (Schwartz-Zippel
    lemma). The sizes of the boxes must not be negative.
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
    """The effect of one mesh dimension: the tensor is replicated (`dim` None) or divided along dimension `dim`."""

    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of a tensor over a mesh: its global `ranks` in C order, and a placement for each mesh dimension."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh_shape, self.ranks, self.placements)))

    def __hash__(self) -> int:
        return self._hash  # computed once: thousands of tensors share a mesh of thousands of ranks

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the mesh coordinate of a rank; None if it is not in the mesh."""
        try:
            return unravel_index(self.ranks.index(rank), self.mesh_shape)
        except ValueError:
            return None

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Return the mesh coordinate of each rank of the mesh."""
        return dict(zip(self.ranks, product(*map(range, self.mesh_shape)), strict=True))


@dataclass(frozen=True, slots=True)
class OwnBoxes:
    """The sharding of a tensor that is not divided over a mesh: the boxes of it that a rank holds.

    Each rank describes its own. The boxes of all ranks must be equal or disjoint, and cover the tensor.
    """

    boxes: tuple[Box, ...]


def unravel_index(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of element `number`, in C order, of an array of this shape."""
    position = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        position.append(index)
    return tuple(reversed(position))


def local_boxes(
    shape: tuple[int, ...], sharding: Sharding, coordinate: tuple[int, ...]
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of a tensor that the rank at `coordinate` holds, with their offsets in its local tensor.

    Nearly always one; several for some strided shards of dimensions that do not divide evenly; none for an empty shard.
    """
    return BoxFinder(shape, sharding)(coordinate)


class BoxFinder:
    """Finds the boxes of one tensor as `local_boxes` does, for many ranks of its mesh."""

    def __init__(self, shape: tuple[int, ...], sharding: Sharding) -> None:
        self._shape = shape
        self._steps = [
            [
                (ways, mesh_dim, placement.split_factor)
                for mesh_dim, (placement, ways) in enumerate(zip(sharding.placements, sharding.mesh_shape, strict=True))
                if placement.dim == dim
            ]
            for dim in range(len(shape))
        ]
        self._known: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}

    def __call__(self, coordinate: tuple[int, ...]) -> list[tuple[Box, tuple[int, ...]]]:
        """Return the boxes of the rank at `coordinate`."""
        boxes = []
        for choice in product(*(self._runs(dim, coordinate) for dim in range(len(self._shape)))):
            offset = tuple([start for start, _, _ in choice])
            boxes.append((Box(offset, tuple([n for _, n, _ in choice])), tuple([local for _, _, local in choice])))
        return boxes

    def _runs(self, dim: int, coordinate: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Return the runs (start, length, local start) of dimension `dim` at `coordinate`."""
        steps = self._steps[dim]
        key = dim, *(coordinate[mesh_dim] for _, mesh_dim, _ in steps)
        known = self._known.get(key)
        if known is not None:
            return known
        size = self._shape[dim]
        runs = [(0, size)] if size else []
        for ways, mesh_dim, sections in steps:
            runs = _chunk(runs, ways, coordinate[mesh_dim], sections)
        result, local = [], 0
        for start, length in runs:
            result.append((start, length, local))
            local += length
        self._known[key] = result
        return result


def _chunk(runs: list[tuple[int, int]], ways: int, position: int, sections: int) -> list[tuple[int, int]]:
    """Return part `position` of `ways` of the concatenated runs; with several `sections`, of each section."""
    total = sum(length for _, length in runs)
    section = -(-total // sections)
    picked: list[tuple[int, int]] = []
    for first in range(0, total, section or 1):
        last = min(total, first + section)
        chunk = -(-(last - first) // ways)
        picked += _window(runs, min(last, first + position * chunk), min(last, first + (position + 1) * chunk))
    return _joined(picked)


def _window(runs: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return elements `first` up to `last` of the concatenated runs, as runs."""
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
