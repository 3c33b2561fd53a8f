"""The boxes of a sharded tensor are those of torch.chunk and DTensor."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.planning.boxes import Box, Placement, Sharding, local_boxes, tile_exactly

_SHAPES = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)
_MESHES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def _sharding(mesh: tuple[int, ...], placements: list[Placement]) -> Sharding:
    return Sharding(mesh, tuple(range(math.prod(mesh))), tuple(placements))


def _held(tensor: torch.Tensor, sharding: Sharding, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Return the local tensor, assembled from its boxes."""
    boxes = local_boxes(tuple(tensor.shape), sharding, coordinate)
    ends = [[at[dim] + box.shape[dim] for box, at in boxes] for dim in range(tensor.dim())]
    local = torch.full([max(dim, default=0) for dim in ends], -1, dtype=tensor.dtype)
    for box, at in boxes:
        local[Box(at, box.shape).slices((0,) * len(at))] = tensor[box.slices((0,) * tensor.dim())]
    return local


@given(st.integers(0, 60), st.integers(1, 9))
def test_one_dimension_is_cut_as_torch_chunk_cuts(size: int, ways: int) -> None:
    tensor = torch.arange(size)
    chunks = [chunk.tolist() for chunk in tensor.chunk(ways)]
    chunks += [[]] * (ways - len(chunks))
    sharding = _sharding((ways,), [Placement(0)])
    assert [_held(tensor, sharding, (position,)).tolist() for position in range(ways)] == chunks


@given(_SHAPES, _MESHES, st.data())
def test_boxes_are_those_of_dtensor(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    sharding = _sharding(mesh, [Placement(dim) for dim in dims])
    theirs = [Replicate() if dim is None else Shard(dim) for dim in dims]
    for coordinate in sharding.coordinates().values():
        boxes = local_boxes(shape, sharding, coordinate)
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), theirs)
        if 0 in size:
            assert boxes == []
        else:
            assert boxes == [(Box(tuple(offset), tuple(size)), (0,) * len(shape))]


def _strided(tensor: torch.Tensor, dim: int, ways: int, factor: int) -> list[torch.Tensor]:
    """Return the shards that DTensor makes."""
    parts, _ = _StridedShard(dim, split_factor=factor)._split_tensor(tensor, ways, with_padding=False)
    return list(parts)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_strided_shards_are_those_of_dtensor(size: int, ways: int, factor: int) -> None:
    tensor = torch.arange(size)
    sharding = _sharding((ways,), [Placement(0, factor)])
    ours = [_held(tensor, sharding, (position,)).tolist() for position in range(ways)]
    assert ours == [part.tolist() for part in _strided(tensor, 0, ways, factor)]


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_a_strided_shard_divided_again(size: int, dp: int, tp: int) -> None:
    """FSDP2 over tensor parallelism: the data-parallel dimension comes first and is strided."""
    tensor = torch.arange(size)
    sharding = _sharding((dp, tp), [Placement(0, tp), Placement(0)])
    for (first, second), part in (
        ((i, j), part)
        for i, row in enumerate(_strided(tensor, 0, dp, tp))
        for j, part in enumerate([*row.chunk(tp), *[row[:0]] * tp][:tp])
    ):
        assert _held(tensor, sharding, (first, second)).tolist() == part.tolist()


@given(_SHAPES, _MESHES, st.data())
def test_the_boxes_of_all_ranks_are_the_whole_tensor_once(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    dims = st.none() | st.integers(0, len(shape) - 1)
    placements = [Placement(data.draw(dims), data.draw(st.integers(1, 3))) for _ in mesh]
    sharding = _sharding(mesh, placements)
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in sharding.coordinates().values():
        for box, _ in local_boxes(shape, sharding, coordinate):
            assert 0 not in box.shape
            count[box.slices((0,) * len(shape))] += 1
    copies = math.prod(ways for ways, placement in zip(mesh, placements, strict=True) if placement.dim is None)
    assert (count == copies).all()


@given(st.data())
def test_intersections(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 3))
    boxes = [
        Box(
            tuple(data.draw(st.integers(0, 4)) for _ in range(dims)),
            tuple(data.draw(st.integers(0, 4)) for _ in range(dims)),
        )
        for _ in range(2)
    ]

    def elements(box: Box) -> set[tuple[int, ...]]:
        return set(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))

    common = boxes[0].intersection(boxes[1])
    assert (elements(common) if common else set()) == elements(boxes[0]) & elements(boxes[1])
    assert common == boxes[1].intersection(boxes[0])


@pytest.mark.parametrize("ranks", [(4, 5, 6, 7), (7, 1, 3, 0)])
def test_coordinates_are_in_c_order_of_the_mesh(ranks: tuple[int, ...]) -> None:
    coordinates = Sharding((2, 2), ranks, (Placement(), Placement())).coordinates()
    assert [coordinates[rank] for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def _cut(box: Box, cuts: list[tuple[int, int]]) -> list[Box]:
    """A strategy for cuts of a box: which part to split, and where, over all of its dimensions."""
    parts = [box]
    for which, where in cuts:
        part = parts.pop(which % len(parts))
        dim = where % max(1, len(part.shape))
        if not part.shape or part.shape[dim] < 2:
            parts.append(part)
            continue
        size = 1 + where % (part.shape[dim] - 1)
        for start, length in ((0, size), (size, part.shape[dim] - size)):
            offset = (*part.offset[:dim], part.offset[dim] + start, *part.offset[dim + 1 :])
            parts.append(Box(offset, (*part.shape[:dim], length, *part.shape[dim + 1 :])))
    return parts


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    cuts=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8),
    change=st.none() | st.tuples(st.integers(0, 50), st.integers(-2, 2), st.integers(0, 2), st.integers(0, 50)),
)
def test_boxes_tile_a_tensor_exactly(
    shape: tuple[int, ...], cuts: list[tuple[int, int]], change: tuple[int, int, int, int] | None
) -> None:
    """The result is the same as by counting elements."""
    boxes = _cut(Box.whole(shape), cuts)
    if change is not None and shape:
        which, by, how, dim = change
        box, dim = boxes.pop(which % len(boxes)), dim % len(shape)
        if how == 0:
            box = Box((*box.offset[:dim], box.offset[dim] + by, *box.offset[dim + 1 :]), box.shape)
        boxes += [box] * (how == 0) + [box, box] * (how == 1)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(product(*map(range, shape)), 0)
    for box in boxes:
        for index in product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))):
            counts[index] = counts.get(index, 0) + (1 if index in counts else 2)
    assert tile_exactly(shape, boxes) == all(count == 1 for count in counts.values())
