"""The plan of a save: which rank writes which chunk.

Every rank computes the same plan for the whole job, from the descriptions of all ranks and without communication.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, Sharding, local_boxes
from ckpt.planning.chunk_grid import Grid, GridOptions, common_grid, refine
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.packing import LoadBalancer, PackedTensor, PackItem, make_pack

__all__ = ["ArrayPlan", "SavePlan", "make_save_plan"]

_BALANCE = 20  # the least number of chunks in a rank's share, so that ranks finish within 1/20 of each other


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array to write: a tensor, one `box` of it where there is no common grid, or the tensor of one `rank`.

    `owners` are the ranks that write its chunks, in C order of the grid.
    """

    path: Path
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    grid: Grid
    owners: tuple[int, ...]
    box: Box
    tensor_shape: tuple[int, ...]
    box_number: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save, the same on all ranks. `packed`, `pack_owners` and `pack_grid` are those of a `Pack`."""

    world_size: int
    arrays: tuple[ArrayPlan, ...]
    packed: tuple[PackedTensor, ...]
    pack_owners: tuple[int, ...]
    pack_grid: Grid | None
    value_owners: dict[Path, int]
    per_rank_values: dict[Path, tuple[int, ...]]
    aliases: dict[Path, Path]

    def chunks_of(self, rank: int) -> Iterator[tuple[int, ArrayPlan, int]]:
        """Yield the chunks that `rank` writes: array number, array, chunk number."""
        known: dict[int, list[int]] = {}  # many arrays share the tuple of their owners
        for number, array in enumerate(self.arrays):
            chunks = known.get(id(array.owners))
            if chunks is None:
                chunks = known[id(array.owners)] = [n for n, owner in enumerate(array.owners) if owner == rank]
            for chunk in chunks:
                yield number, array, chunk

    @property
    def pack_bytes(self) -> int:
        """The size of each chunk of the pack."""
        return self.pack_grid.chunk_shape[0] if self.pack_grid is not None else 0

    @cached_property
    def digest(self) -> str:
        """A digest of the whole plan."""
        digest = hashlib.blake2b(digest_size=16)
        known: dict[int, bytes] = {}  # many arrays share the tuple of their owners
        for array in self.arrays:
            owners = known.get(id(array.owners))
            if owners is None:
                owners = known[id(array.owners)] = np.asarray(array.owners, "<u4").tobytes()
            about = (array.path, array.dtype, array.itemsize, array.shape, array.grid, len(array.owners), array.box)
            digest.update(repr((*about, array.tensor_shape, array.box_number, array.rank)).encode())
            digest.update(owners)
        rest = (self.world_size, self.packed, self.pack_owners, self.pack_grid)
        digest.update(repr((*rest, self.value_owners, self.per_rank_values, self.aliases)).encode())
        return digest.hexdigest()


def make_save_plan(descriptions: Sequence[StateDescription], options: GridOptions) -> SavePlan:
    """Divide every tensor into chunks and assign each to one of the ranks that hold it, evenly by bytes.

    Each box of a tensor that is `from_lowest` on any rank is assigned to the lowest rank that holds it. `descriptions`
    are by rank, and equal ones are one object. Deterministic. Raises StateError if the ranks' boxes of a tensor overlap
    partly or leave a gap.
    """
    world_size = len(descriptions)
    tensors = _holders(descriptions)
    boxes_of = _Boxes()
    aliases = _aliases(descriptions, tensors, boxes_of)
    from_lowest = frozenset().union(*{each.from_lowest for each in descriptions})
    units = [
        (path, spec, boxes_of.all_of(path, spec, holders, only_lowest=path in from_lowest))
        for (path, spec), holders in tensors.items()
        if path not in aliases
    ]
    share = sum(spec.itemsize * math.prod(spec.shape) for _, spec, _ in units) / max(world_size, 1)
    target = options.file_bytes
    if world_size > 1:
        target = min(target, max(options.smallest_split_bytes, int(share / _BALANCE)))
    loads = [0] * world_size
    divider = _Divider(target, options)
    drafts: list[_Draft] = []
    small: list[PackItem] = []
    for path, spec, boxes in units:
        if math.prod(spec.shape) * spec.itemsize <= options.pack_below_bytes:
            small += [PackItem(path, spec, box, holders) for box, holders in boxes.items()]
        else:
            drafts += divider.divide(path, spec, boxes)
    arrays = _assign(drafts, loads)
    pack = make_pack(small, LoadBalancer(loads), target, options)
    values, per_rank_values = _value_owners(descriptions)
    return SavePlan(world_size, arrays, pack.entries, pack.owners, pack.grid, values, per_rank_values, aliases)


_Holders = dict[Sharding | None, tuple[int, ...]]


def _holders(descriptions: Sequence[StateDescription]) -> dict[tuple[Path, TensorSpec], _Holders]:
    """Return the ranks that have each tensor, by its sharding over them; the specs in the keys have no sharding.

    A tensor may have several shardings, each over its own mesh, as replicas of a tensor-parallel model do. Tensors that
    are per rank have one entry for each shape.
    """
    groups: dict[int, tuple[StateDescription, list[int]]] = {}
    for rank, description in enumerate(descriptions):
        groups.setdefault(id(description), (description, []))[1].append(rank)
    holders: dict[tuple[Path, TensorSpec], _Holders] = {}
    for description, ranks in groups.values():
        group = tuple(ranks)  # one object for all tensors
        for path, spec in description.tensors.items():
            bare = spec if spec.sharding is None else replace(spec, sharding=None)
            by_sharding = holders.setdefault((path, bare), {})
            known = by_sharding.get(spec.sharding)
            by_sharding[spec.sharding] = group if known is None else tuple(sorted((*known, *group)))
    return holders


def _aliases(
    descriptions: Sequence[StateDescription], tensors: dict[tuple[Path, TensorSpec], _Holders], boxes_of: _Boxes
) -> dict[Path, Path]:
    """Return the names that are another tensor on all ranks that hold elements of it.

    A rank with an empty shard cannot tell whether two names are one tensor. If a name is an alias on one rank and a
    tensor with elements on another, the tensor is saved.
    """
    aliases: dict[Path, Path] = {}
    for description in descriptions:
        aliases.update(description.aliases)
    if aliases:
        for (path, spec), holders in tensors.items():
            if path in aliases and boxes_of.distinct(spec, holders):
                del aliases[path]
    return aliases


class _Boxes:
    """Finds the boxes of tensors, once for all tensors with the same shape and sharding.

    Results are cached by the identity of the arguments, which must live as long as this object.
    """

    def __init__(self) -> None:
        self._known: dict[
            tuple[object, ...], tuple[dict[Box, tuple[int, ...]], int]
        ] = {}  # with the number of their elements
        self._lowest: dict[int, dict[Box, tuple[int, ...]]] = {}

    def all_of(
        self, path: Path, spec: TensorSpec, holders: _Holders, *, only_lowest: bool
    ) -> dict[Box, tuple[int, ...]]:
        """Return the distinct boxes of a tensor with the ranks that hold each, or with the lowest of these ranks.

        A per-rank tensor is one box, held by all of its ranks.
        """
        if spec.per_rank:
            return {Box.whole(spec.shape): _all_ranks(holders)}
        boxes, covered = self._find(spec, holders)
        if covered != math.prod(spec.shape):
            raise StateError(
                f"{display(path)}: the ranks that have this DTensor hold {covered} of its {math.prod(spec.shape)} "
                "elements; every rank of its mesh must save it"
            )
        if not boxes:
            return {Box.whole(spec.shape): _all_ranks(holders)}
        if not only_lowest:
            return boxes
        if id(boxes) not in self._lowest:
            self._lowest[id(boxes)] = {box: ranks[:1] for box, ranks in boxes.items()}
        return self._lowest[id(boxes)]

    def distinct(self, spec: TensorSpec, holders: _Holders) -> dict[Box, tuple[int, ...]]:
        """Return the boxes with elements, in order."""
        return self._find(spec, holders)[0]

    def _find(self, spec: TensorSpec, holders: _Holders) -> tuple[dict[Box, tuple[int, ...]], int]:
        key = (spec.shape, *((id(sharding), id(ranks)) for sharding, ranks in holders.items()))
        if key not in self._known:
            boxes = _distinct_boxes(spec, holders)
            self._known[key] = boxes, sum(box.elements for box in boxes)
        return self._known[key]


def _all_ranks(holders: _Holders) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in holders.values() for rank in ranks}))


def _distinct_boxes(spec: TensorSpec, holders: _Holders) -> dict[Box, tuple[int, ...]]:
    boxes: dict[Box, set[int]] = {}
    for sharding, ranks in holders.items():
        if sharding is None:
            boxes.setdefault(Box.whole(spec.shape), set()).update(ranks)
            continue
        coordinates = sharding.coordinates()
        for rank in ranks:
            if rank in coordinates:
                for box, _ in local_boxes(spec.shape, sharding, coordinates[rank]):
                    boxes.setdefault(box, set()).add(rank)
    return {box: tuple(sorted(ranks)) for box, ranks in sorted(boxes.items())}


_Candidates = tuple[tuple[int, ...], ...]
_Draft = tuple[ArrayPlan, _Candidates]


class _Divider:
    """Divides tensors into arrays and chunks, once for all tensors with the same shape and boxes."""

    def __init__(self, target: int, options: GridOptions) -> None:
        self._target = target
        self._options = options
        self._known: dict[tuple[object, ...], list[tuple[int | None, Box, Grid, _Candidates]]] = {}

    def divide(self, path: Path, spec: TensorSpec, boxes: dict[Box, tuple[int, ...]]) -> list[_Draft]:
        """Return the arrays of a tensor with the possible owners of their chunks. Caches by the identity of `boxes`."""
        if spec.per_rank:
            shape, inner_bytes = spec.shape, self._options.inner_bytes
            grid = refine(shape, _at_least_one(shape), spec.itemsize, self._options.file_bytes, inner_bytes)
            whole = Box.whole(shape)
            return [
                (_array(path, spec, whole, grid, rank=rank), _candidates(whole, grid, {whole: (rank,)}))
                for rank in boxes[whole]
            ]
        key = (spec.shape, spec.itemsize, id(boxes))
        if key not in self._known:
            self._known[key] = list(self._arrays(spec, boxes))
        return [(_array(path, spec, box, grid, number), owners) for number, box, grid, owners in self._known[key]]

    def _arrays(
        self, spec: TensorSpec, boxes: dict[Box, tuple[int, ...]]
    ) -> Iterator[tuple[int | None, Box, Grid, _Candidates]]:
        target, inner_bytes = self._target, self._options.inner_bytes
        chunk = common_grid(spec.shape, list(boxes), spec.itemsize)
        if chunk is not None:
            whole, grid = Box.whole(spec.shape), refine(spec.shape, chunk, spec.itemsize, target, inner_bytes)
            yield None, whole, grid, _candidates(whole, grid, boxes)
            return
        for number, (box, holders) in enumerate(boxes.items()):
            grid = refine(box.shape, box.shape, spec.itemsize, target, inner_bytes)
            yield number, box, grid, _candidates(box, grid, {box: holders})


def _array(
    path: Path, spec: TensorSpec, box: Box, grid: Grid, number: int | None = None, rank: int | None = None
) -> ArrayPlan:
    return ArrayPlan(path, spec.dtype, spec.itemsize, box.shape, grid, (), box, spec.shape, number, rank)


def _candidates(box: Box, grid: Grid, boxes: dict[Box, tuple[int, ...]]) -> _Candidates:
    """Return the ranks that hold each chunk of an array, in C order of the grid."""
    counts = tuple(-(-size // part) for size, part in zip(box.shape, grid.chunk_shape, strict=True))
    if len(boxes) == 1:
        (holders,) = boxes.values()
        return (holders,) * math.prod(counts)
    candidates: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part, holders in boxes.items():  # boundaries lie on the grid, so each chunk is in exactly one box
        first = tuple(o // c for o, c in zip(part.offset, grid.chunk_shape, strict=True))
        last = tuple(-(-(o + n) // c) for o, n, c in zip(part.offset, part.shape, grid.chunk_shape, strict=True))
        for index in _indices(first, last):
            candidates[index] = holders
    return tuple(candidates[index] for index in _indices((0,) * len(counts), counts))


def _indices(first: tuple[int, ...], last: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not first:
        yield ()
        return
    for index in range(first[0], last[0]):
        for rest in _indices(first[1:], last[1:]):
            yield (index, *rest)


def _at_least_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(size, 1) for size in shape)


def _assign(drafts: list[_Draft], loads: list[int]) -> tuple[ArrayPlan, ...]:
    """Assign every chunk to the least loaded rank that holds it: those with only one first, then the largest."""
    fixed: dict[int, tuple[int, ...] | None] = {}  # by the candidates, which many arrays share
    work = []
    for number, (array, candidates) in enumerate(drafts):
        nbytes = math.prod(array.grid.chunk_shape) * array.itemsize
        if id(candidates) not in fixed:
            alone = all(len(holders) == 1 for holders in candidates)
            fixed[id(candidates)] = tuple(rank for (rank,) in candidates) if alone else None
        if fixed[id(candidates)] is None:
            work += [(len(holders) > 1, -nbytes, number, chunk, holders) for chunk, holders in enumerate(candidates)]
    _add_fixed(drafts, fixed, loads)
    balancer = LoadBalancer(loads)
    chosen: dict[int, list[int]] = {}
    for _, negative_bytes, number, chunk, holders in sorted(work):
        owners = chosen.setdefault(number, [0] * len(drafts[number][1]))
        owners[chunk] = balancer.assign(holders, -negative_bytes)
    return tuple(
        replace(array, owners=fixed[id(candidates)] or tuple(chosen.get(number, ())))
        for number, (array, candidates) in enumerate(drafts)
    )


def _add_fixed(drafts: list[_Draft], fixed: dict[int, tuple[int, ...] | None], loads: list[int]) -> None:
    """Add the bytes that only one rank can write to its load."""
    chunk_bytes: dict[int, int] = {}
    for array, candidates in drafts:
        nbytes = math.prod(array.grid.chunk_shape) * array.itemsize
        chunk_bytes[id(candidates)] = chunk_bytes.get(id(candidates), 0) + nbytes
    for which, nbytes in chunk_bytes.items():
        for rank in fixed[which] or ():
            loads[rank] += nbytes


def _value_owners(descriptions: Sequence[StateDescription]) -> tuple[dict[Path, int], dict[Path, tuple[int, ...]]]:
    owners: dict[Path, int] = {}
    per_rank: dict[Path, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for path, own in description.values.items():
            if own:
                per_rank.setdefault(path, []).append(rank)
            else:
                owners.setdefault(path, rank)
    return owners, {path: tuple(ranks) for path, ranks in per_rank.items()}
