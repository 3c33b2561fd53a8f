"""Chunk grids have every boundary between boxes on them, and files of reasonable sizes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.planning.boxes import Box, Placement, Sharding, local_boxes
from ckpt.planning.chunk_grid import GridOptions, common_grid, refine

_MB = 1 << 20


def _boxes(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement]) -> list[Box]:
    sharding = Sharding(mesh, tuple(range(math.prod(mesh))), tuple(placements))
    boxes = {box for at in sharding.coordinates().values() for box, _ in local_boxes(shape, sharding, at)}
    return sorted(boxes)


def _on_grid(box: Box, chunk: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(
        offset % part == 0 and ((offset + size) % part == 0 or offset + size == whole)
        for offset, size, part, whole in zip(box.offset, box.shape, chunk, shape, strict=True)
    )


_SHAPES = st.lists(st.integers(0, 300), min_size=0, max_size=3).map(tuple)


@given(_SHAPES, st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple), st.data())
def test_every_boundary_lies_on_the_grid(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject) -> None:
    dims = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    boxes = _boxes(shape, mesh, [Placement(data.draw(dims), data.draw(st.integers(1, 3))) for _ in mesh])
    chunk = common_grid(shape, boxes, 4)
    if chunk is None:
        return
    assert all(part >= 1 for part in chunk)
    target = data.draw(st.integers(1, 5000))
    grid = refine(shape, chunk, 4, target, GridOptions(inner_bytes=data.draw(st.integers(1, 5000))))
    for box in boxes:
        assert _on_grid(box, chunk, shape)
        assert _on_grid(box, grid.chunk_shape, shape)
    inner = grid.inner_chunk_shape or grid.chunk_shape
    assert all(outer % part == 0 for outer, part in zip(grid.chunk_shape, inner, strict=True))


@pytest.mark.parametrize(
    ("shape", "mesh", "dims", "chunk"),
    [
        ((10,), (4,), [0], (3,)),  # as torch.chunk: 3, 3, 3, 1
        ((8, 6), (2, 2), [0, 1], (4, 3)),
        ((), (4,), [None], ()),
        ((5, 0), (2,), [0], (5, 1)),
        ((2,), (4,), [0], (1,)),
    ],
)
def test_an_even_division_is_its_own_grid(
    shape: tuple[int, ...], mesh: tuple[int, ...], dims: list[int | None], chunk: tuple[int, ...]
) -> None:
    assert common_grid(shape, _boxes(shape, mesh, [Placement(dim) for dim in dims]), 4) == chunk


def test_there_is_no_grid_where_it_would_have_a_chunk_for_each_row() -> None:
    boxes = [Box((0, 0), (333, 4)), Box((333, 0), (331, 4)), Box((664, 0), (336, 4))]
    assert common_grid((1000, 4), boxes, 4) is None
    big_rows = [Box(box.offset, (box.shape[0], 1 << 20)) for box in boxes]
    assert common_grid((1000, 1 << 20), big_rows, 4) == (1, 1 << 20)  # a row is a reasonable file


@pytest.mark.parametrize(
    "shape",
    [(50257, 768), (128256, 4096), (4096, 4096), (100_000_007,), (1, 1 << 26), (3, 5, 1 << 22), (1, 1, 1 << 27)],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_files_and_inner_chunks_have_about_the_wanted_size(shape: tuple[int, ...], ranks: int, sharded: bool) -> None:
    boxes = _boxes(shape, (ranks,), [Placement(0 if sharded else None)])
    chunk = common_grid(shape, boxes, 2)
    assert chunk is not None
    grid = refine(shape, chunk, 2, 64 * _MB, GridOptions())
    inner = grid.inner_chunk_shape or grid.chunk_shape
    largest_box = max(box.elements for box in boxes) * 2
    wanted_inner = min(4 * _MB, max(math.prod(shape) * 2 // 96, 96 << 10))
    for part, wanted in ((grid.chunk_shape, 64 * _MB), (inner, wanted_inner)):
        assert min(largest_box, wanted) / 10 <= math.prod(part) * 2 <= max(wanted, 1.2 * largest_box)
    if not sharded:
        assert math.prod(grid.chunk_shape) * 2 <= 64 * _MB
        assert math.prod(inner) * 2 <= wanted_inner


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple), st.integers(1, 100_000), st.integers(1, 100_000)
)
def test_only_leading_dimensions_are_cut(shape: tuple[int, ...], target: int, inner: int) -> None:
    grid = refine(shape, shape, 4, target, GridOptions(inner_bytes=inner))
    for part in (grid.chunk_shape, grid.inner_chunk_shape or grid.chunk_shape):
        for (size, own), (next_size, next_own) in pairwise(zip(shape, part, strict=True)):
            if own > 1:
                assert next_own >= next_size, "a chunk must be one run of memory"
            assert own >= 1 or size == 0


@pytest.mark.parametrize("prime", [12569, 100003, 1_000_003])
def test_a_shard_of_prime_size_is_not_cut_into_single_rows(prime: int) -> None:
    chunk = common_grid((2 * prime, 64), _boxes((2 * prime, 64), (2,), [Placement(0)]), 4)
    assert chunk == (prime, 64)
    grid = refine((2 * prime, 64), chunk, 4, 1 << 20, GridOptions(inner_bytes=64 << 10))
    assert math.prod(grid.chunk_shape) * 4 >= 64 << 10
