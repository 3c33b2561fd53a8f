"""The plan of a save: which rank writes which chunk, and where in its pack.

Every rank computes the same plan for the whole job, from the descriptions of all ranks and without communication. What
only one rank holds is written by it. What several hold is divided into chunks, which the least loaded of them writes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckpt.errors import StateError
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box, BoxFinder, OwnBoxes, Sharding, tile_exactly, unravel_index
from ckpt.planning.chunk_grid import Grid, GridOptions, common_grid, refine
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.pack_layout import ArrayDraft, Owners, lay_out
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.compression import Compression
from ckpt.storage.documents import encode_document
from ckpt.storage.pack_index import PackIndex, StoredArray
from ckpt.values.containers import Container

_BALANCE = 20  # the least number of chunks in a rank's share, so that ranks finish within 1/20 of each other

_SLACK = 100  # a difference of 1/100 of a rank's share is no reason to give a small tensor to another rank


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk that a rank writes: that at `index` of the grid of `array`, the number `copy` in C order.

    It is to be at byte `offset` of file number `file` of the rank's pack.
    """

    array: StoredArray
    index: tuple[int, ...]
    copy: int
    file: int
    offset: int


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save, the same on all ranks: every array with its place, and who writes which value.

    `containers` are those of the state that are not plain dicts, by path and rank; None for those of all ranks.
    `apart` are the numbers of the arrays that several ranks hold, if these are in files of their own.
    """

    world_size: int
    index: PackIndex
    value_owners: dict[Path, int]
    per_rank_values: dict[Path, tuple[int, ...]]
    aliases: dict[Path, Path]
    containers: dict[tuple[Path, int | None], Container]
    apart: frozenset[int] = frozenset()

    def chunks_of(self, rank: int) -> Iterator[PlannedChunk]:
        """Yield the chunks that `rank` writes, in the order of its pack."""
        arrays: dict[int, list[StoredArray]] = {}
        for array in self.index.arrays:
            if array.region is not None:
                arrays.setdefault(array.region, []).append(array)
        lanes = []
        for number, region in enumerate(self.index.regions):
            for copy in np.flatnonzero(region.ranks == rank).tolist():
                lanes.append((int(region.files[copy]), int(region.starts[copy]), number, copy))
        for file, start, number, copy in sorted(lanes):
            for array in arrays[number]:
                index = unravel_index(copy, array.meta.grid_shape)
                yield PlannedChunk(array, index, copy, file, start + array.offset)

    @cached_property
    def index_bytes(self) -> bytes:
        """The index of the step, as it is stored."""
        return encode_document(self.index.to_document())

    @cached_property
    def digest(self) -> str:
        """A digest of the whole plan."""
        digest = hashlib.blake2b(self.index_bytes, digest_size=16)
        rest = (self.world_size, self.value_owners, self.per_rank_values, self.aliases, self.containers)
        digest.update(repr(rest).encode())
        return digest.hexdigest()


def make_save_plan(
    descriptions: Sequence[StateDescription], options: GridOptions, compression: Compression | None = None
) -> SavePlan:
    """Divide every tensor into chunks and assign each to one of the ranks that hold it, evenly by bytes.

    Each box of a tensor that is `from_lowest` on any rank is assigned to the lowest rank that holds it. `descriptions`
    are by rank, and equal ones are one object. `compression` is that of all chunks. Deterministic.
    Raises StateError if the ranks' boxes of a tensor overlap partly or leave a gap.
    """
    world_size = len(descriptions)
    tensors = _holders(descriptions)
    boxes_of = _Boxes()
    aliases = _aliases(descriptions, tensors, boxes_of)
    from_lowest = frozenset().union(*{each.from_lowest for each in descriptions})
    units = [
        (
            path,
            spec,
            boxes_of.all_of(path, spec, holders, only_lowest=path in from_lowest),
            options.common_apart and boxes_of.are_common(spec, holders),
        )
        for (path, spec), holders in tensors.items()
        if path not in aliases
    ]
    share = sum(spec.itemsize * math.prod(spec.shape) for _, spec, _, _ in units) / max(world_size, 1)
    divider = _Divider(share, options)
    drafts, apart = [], []
    for path, spec, boxes, is_apart in units:
        own_drafts = list(divider.divide(path, spec, boxes))
        drafts += own_drafts
        apart += [is_apart] * len(own_drafts)
    owners = _assign(drafts, world_size, min(options.smallest_split_bytes, int(share / _SLACK)))
    arrays = [
        _array_draft(draft, own, compression, is_apart)
        for draft, own, is_apart in zip(drafts, owners, apart, strict=True)
    ]
    values, per_rank_values = _value_owners(descriptions)
    index = lay_out(arrays, world_size, options.file_bytes, small_apart=options.small_apart)
    containers = _containers(descriptions)
    numbers = frozenset(number for number, is_apart in enumerate(apart) if is_apart)
    return SavePlan(world_size, index, values, per_rank_values, aliases, containers, numbers)


_Holders = dict[Sharding | OwnBoxes | None, tuple[int, ...]]


def _holders(descriptions: Sequence[StateDescription]) -> dict[tuple[Path, TensorSpec], _Holders]:
    """Return the ranks that have each tensor, by its sharding over them; the specs in the keys have no sharding.

    A tensor may have several shardings, each over its own mesh, as replicas of a tensor-parallel model do. Tensors that
    are per rank have one entry for each shape.
    """
    groups: dict[int, tuple[StateDescription, list[int]]] = {}
    for rank, description in enumerate(descriptions):
        groups.setdefault(id(description), (description, []))[1].append(rank)
    bare: dict[int, TensorSpec] = {}  # by the identity of the spec with its sharding, which many tensors share
    found: dict[tuple[Path, TensorSpec], dict[Sharding | OwnBoxes | None, list[int]]] = {}
    for description, ranks in groups.values():
        for path, spec in description.tensors.items():
            known = bare.get(id(spec))
            if known is None:
                known = bare[id(spec)] = spec if spec.sharding is None else replace(spec, sharding=None)
            found.setdefault((path, known), {}).setdefault(spec.sharding, []).extend(ranks)
    same: dict[object, Any] = {}  # equal ones become one object
    holders: dict[tuple[Path, TensorSpec], _Holders] = {}
    for key, by_sharding in found.items():
        holders[key] = {}
        for sharding, ranks in by_sharding.items():
            own = tuple(sorted(ranks))
            holders[key][same.setdefault(sharding, sharding)] = same.setdefault(own, own)
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
        if any(isinstance(sharding, OwnBoxes) for sharding in holders) and not tile_exactly(spec.shape, boxes):
            raise StateError(
                f"{display(path)}: the boxes that ranks have of this tensor overlap, reach beyond it or leave a gap: "
                f"they have {covered} elements, the tensor has {math.prod(spec.shape)} in the shape {list(spec.shape)}"
            )
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

    def are_common(self, spec: TensorSpec, holders: _Holders) -> bool:
        """Return whether several ranks hold a box of a tensor that is not per rank."""
        return not spec.per_rank and any(len(ranks) > 1 for ranks in self.distinct(spec, holders).values())

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
        if isinstance(sharding, OwnBoxes):
            for box in sharding.boxes:
                boxes.setdefault(box, set()).update(ranks)
            continue
        coordinates = sharding.coordinates()
        find = BoxFinder(spec.shape, sharding)
        for rank in ranks:
            if rank in coordinates:
                for box, _ in find(coordinates[rank]):
                    boxes.setdefault(box, set()).add(rank)
    return {box: tuple(sorted(ranks)) for box, ranks in sorted(boxes.items())}


_Candidates = tuple[tuple[int, ...], ...]
"""The ranks that hold each chunk of an array, in C order of its grid; one object for arrays that are divided alike."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """An array whose chunks have no owners yet: a tensor, one `box` of it, or the tensor of one `rank`."""

    path: Path
    spec: TensorSpec
    box: Box
    grid: Grid
    candidates: _Candidates
    rank: int | None = None

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.grid.chunk_shape) * self.spec.itemsize


def _array_draft(draft: _Draft, owners: Owners, compression: Compression | None, apart: bool) -> ArrayDraft:
    about: dict[str, object] = {"name": list(draft.path)}
    if draft.rank is not None:
        about["rank"] = draft.rank
    if draft.box.shape != draft.spec.shape:
        about |= {"box_offset": list(draft.box.offset), "tensor_shape": list(draft.spec.shape)}
    grid = draft.grid
    meta = ArrayMeta(
        draft.box.shape, draft.spec.dtype, grid.chunk_shape, grid.inner_chunk_shape, compression, {"ckpt": about}
    )
    return ArrayDraft(draft.path, meta, owners, draft.box.offset, draft.spec.shape, draft.rank, apart)


class _Divider:
    """Divides tensors into arrays and chunks, once for all tensors with the same shape and boxes.

    `share` is what each rank writes, about. What several ranks hold is cut into chunks that can be shared out evenly.
    """

    def __init__(self, share: float, options: GridOptions) -> None:
        self._options = options
        self._shared_bytes = min(options.chunk_bytes, max(options.smallest_split_bytes, int(share / _BALANCE)))
        self._known: dict[tuple[object, ...], list[tuple[Box, Grid, _Candidates]]] = {}

    def divide(self, path: Path, spec: TensorSpec, boxes: dict[Box, tuple[int, ...]]) -> Iterator[_Draft]:
        """Yield the arrays of a tensor with the possible owners of their chunks. Caches by the identity of `boxes`."""
        if spec.per_rank:
            whole = Box.whole(spec.shape)
            grid = self._grid(spec, spec.shape, tuple(max(size, 1) for size in spec.shape), shared=False)
            for rank in boxes[whole]:
                yield _Draft(path, spec, whole, grid, _candidates(whole, grid, {whole: (rank,)}), rank)
            return
        key = (spec.shape, spec.itemsize, id(boxes))
        if key not in self._known:
            self._known[key] = list(self._arrays(spec, boxes))
        for box, grid, candidates in self._known[key]:
            yield _Draft(path, spec, box, grid, candidates)

    def _arrays(self, spec: TensorSpec, boxes: dict[Box, tuple[int, ...]]) -> Iterator[tuple[Box, Grid, _Candidates]]:
        shared = any(len(holders) > 1 for holders in boxes.values())
        chunk = common_grid(spec.shape, list(boxes), spec.itemsize)
        if chunk is not None:
            whole, grid = Box.whole(spec.shape), self._grid(spec, spec.shape, chunk, shared)
            yield whole, grid, _candidates(whole, grid, boxes)
            return
        for box, holders in boxes.items():
            grid = self._grid(spec, box.shape, box.shape, shared)
            yield box, grid, _candidates(box, grid, {box: holders})

    def _grid(self, spec: TensorSpec, shape: tuple[int, ...], chunk: tuple[int, ...], shared: bool) -> Grid:
        target = self._shared_bytes if shared else self._options.chunk_bytes
        return refine(shape, chunk, spec.itemsize, target, self._options)


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


@dataclass(frozen=True, slots=True)
class _Column:
    """Chunks that are assigned together: at most one of each box, so that all ranks that share a sharding do alike.

    `holders` has a row for each of the `chunks`, with the ranks that hold it.
    """

    chunks: tuple[int, ...]
    holders: np.ndarray[tuple[int, int], np.dtype[np.intp]]


def _assign(drafts: list[_Draft], world_size: int, slack: int) -> list[Owners]:
    """Return the ranks that write the chunks of each array.

    What only one rank holds is fixed; the rest is assigned by size, the largest first, to the first holder that has at
    most `slack` bytes more than the least loaded one. So small tensors do not scatter.
    """
    fixed: dict[int, Owners | None] = {}  # by the candidates, which many arrays share
    columns: dict[int, list[_Column]] = {}
    known: dict[Owners, Owners] = {}  # equal ones become one object
    fixed_bytes: dict[int, int] = {}
    free: list[tuple[int, int]] = []
    for number, draft in enumerate(drafts):
        which = id(draft.candidates)
        if which not in fixed:
            alone = all(len(holders) == 1 for holders in draft.candidates)
            own = tuple(rank for (rank,) in draft.candidates) if alone else None
            fixed[which] = own if own is None else known.setdefault(own, own)
            columns[which] = [] if alone else list(_columns(draft.candidates))
        if fixed[which] is None:
            free.append((-draft.chunk_bytes, number))
        else:
            fixed_bytes[which] = fixed_bytes.get(which, 0) + draft.chunk_bytes
    loads = np.zeros(world_size, np.int64)
    for which, nbytes in fixed_bytes.items():
        np.add.at(loads, np.array(fixed[which], np.intp), nbytes)
    owners: list[Owners] = [fixed[id(draft.candidates)] or () for draft in drafts]
    for negative_bytes, number in sorted(free):
        candidates = drafts[number].candidates
        chosen = np.zeros(len(candidates), np.intp)
        for column in columns[id(candidates)]:
            load = loads[column.holders].max(axis=0)
            ranks = column.holders[:, int(np.argmax(load <= load.min() + slack))]
            loads[ranks] -= negative_bytes
            chosen[list(column.chunks)] = ranks
        own = tuple(chosen.tolist())
        owners[number] = known.setdefault(own, own)
    return owners


def _columns(candidates: _Candidates) -> Iterator[_Column]:
    """Group the chunks of an array: the first of each box, the second of each, and so on."""
    seen: dict[tuple[int, ...], int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for number, holders in enumerate(candidates):
        position = seen[holders] = seen.get(holders, -1) + 1
        groups.setdefault((position, len(holders)), []).append(number)
    for group in groups.values():
        yield _Column(tuple(group), np.array([candidates[number] for number in group], np.intp))


def _containers(descriptions: Sequence[StateDescription]) -> dict[tuple[Path, int | None], Container]:
    """Return the containers by path and rank. If ranks disagree about one, that of the lowest is taken."""
    containers: dict[tuple[Path, int | None], Container] = {}
    for rank, description in enumerate(descriptions):
        for path, (container, own) in description.containers.items():
            containers.setdefault((path, rank if own else None), container)
    return containers


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
