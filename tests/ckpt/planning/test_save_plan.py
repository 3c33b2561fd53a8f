"""A save plan: each element is written once, by a rank that holds it, evenly, and all ranks have the same plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import StateError
from ckpt.paths import Path
from ckpt.planning.boxes import Box, Placement, Sharding, local_boxes
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.exchange import check_agreement
from ckpt.planning.save_plan import SavePlan, make_save_plan
from tests.ckpt.planning.exchanging import exchange_all

_ALL = 1 << 40
_SMALL = GridOptions(pack_below_bytes=32, file_bytes=512, inner_bytes=64, smallest_split_bytes=64)


def _tensors(**specs: TensorSpec) -> dict[Path, TensorSpec]:
    return {(name,): spec for name, spec in specs.items()}


def _spec(*shape: int, sharding: Sharding | None = None, per_rank: bool = False) -> TensorSpec:
    return TensorSpec("float32", 4, shape, sharding, per_rank)


def _holds(spec: TensorSpec, rank: int, box: Box) -> bool:
    if spec.sharding is None:
        return True
    own = local_boxes(spec.shape, spec.sharding, spec.sharding.coordinates()[rank])
    return any(each.intersection(box) == box for each, _ in own)


def _check_cover(plan: SavePlan, descriptions: Sequence[StateDescription]) -> None:
    """Check that every element of every tensor is written once, by a rank that holds it."""
    written: dict[tuple[Path, int | None], torch.Tensor] = {}
    for rank, description in enumerate(descriptions):
        for path, spec in description.tensors.items():
            if path not in plan.aliases:
                written.setdefault((path, rank if spec.per_rank else None), torch.zeros(spec.shape, dtype=torch.int64))

    def write(path: Path, rank: int | None, owner: int, box: Box) -> None:
        assert rank in (None, owner)
        assert path in descriptions[owner].tensors
        if box.elements:
            assert _holds(descriptions[owner].tensors[path], owner, box)
        written[path, rank][box.slices((0,) * len(box.shape))] += 1

    for owner in range(plan.world_size):
        for _, array, number in plan.chunks_of(owner):
            counts = [-(-size // part) for size, part in zip(array.shape, array.grid.chunk_shape, strict=True)]
            index = [int(i) for i in torch.unravel_index(torch.tensor(number), counts)] if counts else []
            start = [i * part for i, part in zip(index, array.grid.chunk_shape, strict=True)]
            shape = [
                min(part, size - at) for part, size, at in zip(array.grid.chunk_shape, array.shape, start, strict=True)
            ]
            offset = tuple(a + b for a, b in zip(array.box.offset, start, strict=True))
            write(array.path, array.rank, owner, Box(offset, tuple(shape)))
    for entry in plan.packed:
        write(entry.path, entry.rank, entry.owner, entry.box)
    for name, count in written.items():
        assert (count == 1).all(), name


def _check_pack(plan: SavePlan) -> None:
    """Check that packed tensors are aligned, do not overlap, stay within inner chunks, and waste little space."""
    inner = plan.pack_grid and (plan.pack_grid.inner_chunk_shape or plan.pack_grid.chunk_shape)
    assert plan.pack_owners == tuple(sorted(plan.pack_owners))
    for owner in set(plan.pack_owners):
        end = filled = 0
        for entry in sorted((e for e in plan.packed if e.owner == owner), key=lambda e: (e.offset, e.nbytes)):
            assert entry.offset >= end
            assert entry.offset % 16 == 0
            end = entry.offset + entry.nbytes
            filled += max(entry.nbytes, 16)
            assert inner is not None
            assert entry.nbytes == 0 or entry.offset // inner[0] == (end - 1) // inner[0]
        assert end <= plan.pack_owners.count(owner) * plan.pack_bytes
        assert inner is None or end <= 1.5 * filled + inner[0]


def _bytes_of(plan: SavePlan) -> list[int]:
    loads = [0] * plan.world_size
    for owner in range(plan.world_size):
        for _, array, _ in plan.chunks_of(owner):
            loads[owner] += math.prod(array.grid.chunk_shape) * array.itemsize
    for entry in plan.packed:
        loads[entry.owner] += entry.nbytes
    return loads


@st.composite
def _meshes(draw: st.DrawFn, ranks: Sequence[int], dims: int) -> Sharding | None:
    ways = draw(st.sampled_from([d for d in range(1, len(ranks) + 1) if len(ranks) % d == 0]))
    dim = st.none() | st.integers(0, dims - 1) if dims else st.none()
    placements = tuple(Placement(draw(dim), draw(st.integers(1, 2))) for _ in range(2))
    return draw(st.sampled_from([None, Sharding((ways, len(ranks) // ways), tuple(ranks), placements)]))


@given(st.data())
@settings(deadline=None)
def test_every_element_is_written_once_by_a_rank_that_holds_it(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 6))
    stages = data.draw(st.sampled_from([1] if world_size % 2 else [1, 2]))
    per_stage = world_size // stages
    descriptions: list[StateDescription] = []
    shared = {("shared",): _spec(data.draw(st.integers(0, 40)), 3)}
    for stage in range(stages):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        tensors = dict(shared)
        for number in range(data.draw(st.integers(1, 3))):
            shape = tuple(data.draw(st.lists(st.integers(0, 30), max_size=2)))
            tensors["stage", stage, number] = _spec(*shape, sharding=data.draw(_meshes(ranks, len(shape))))
        for rank in ranks:
            own = {("own",): _spec(rank * 7, per_rank=True)} if data.draw(st.booleans()) else {}
            from_lowest = data.draw(st.frozensets(st.sampled_from(sorted(tensors, key=repr))))
            descriptions.append(StateDescription(tensors | own, from_lowest=from_lowest))
    check_agreement(descriptions)
    options = replace(_SMALL, pack_below_bytes=data.draw(st.sampled_from([0, 32, 1 << 14, _ALL])))
    plan = make_save_plan(descriptions, options)
    _check_cover(plan, descriptions)
    _check_pack(plan)
    again = make_save_plan(exchange_all(descriptions)[0][0], options)
    assert again == plan
    assert again.digest == plan.digest


def test_what_comes_from_the_lowest_rank_is_not_divided() -> None:
    """The lowest rank writes each box even if only one rank asks for it; other tensors are still divided evenly."""
    halves = Sharding((2, 2), (0, 1, 2, 3), (Placement(None), Placement(0)))
    tensors = _tensors(**{f"w{n}": _spec(64, 8) for n in range(8)})
    tensors |= _tensors(buffer=_spec(64, 8), small=_spec(3), halved=_spec(64, 8, sharding=halves))
    special = frozenset({("buffer",), ("small",), ("halved",)})
    later = {("later",): _spec(40, 8)}
    first = StateDescription(tensors)
    second = StateDescription({**tensors, **later}, from_lowest=special | {("later",)})
    plan = make_save_plan([first, second, second, second], _SMALL)
    owners: dict[Path, set[int]] = {}
    for rank in range(4):
        for _, array, _ in plan.chunks_of(rank):
            owners.setdefault(array.path, set()).add(rank)
    for entry in plan.packed:
        owners.setdefault(entry.path, set()).add(entry.owner)
    assert {path: owners[path] for path in (*special, ("later",))} == {
        ("buffer",): {0},
        ("small",): {0},
        ("halved",): {0, 1},
        ("later",): {1},
    }
    loads = _bytes_of(plan)
    assert max(loads) < 1.2 * min(loads)


def _language_model(layers: int, width: int, vocabulary: int) -> dict[Path, TensorSpec]:
    tensors = {("embed",): _spec(vocabulary, width), ("norm",): _spec(width), ("step",): _spec()}
    for layer in range(layers):
        for name, shape in {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
            "norm1": (width,),
            "norm2": (width,),
            "bias": (4 * width,),
        }.items():
            tensors["layers", layer, name] = _spec(*shape)
    return tensors


@pytest.mark.parametrize(("layers", "width", "vocabulary"), [(12, 768, 50257), (2, 256, 1000), (40, 2048, 32000)])
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("options", [GridOptions(), GridOptions(_ALL)], ids=["arrays", "packed"])
def test_identical_ranks_write_equal_shares(
    layers: int, width: int, vocabulary: int, world_size: int, options: GridOptions
) -> None:
    description = StateDescription(_language_model(layers, width, vocabulary))
    plan = make_save_plan([description] * world_size, options)
    loads = _bytes_of(plan)
    fair = sum(math.prod(spec.shape) * 4 for spec in description.tensors.values()) / world_size
    assert max(loads) <= 1.05 * fair
    assert min(loads) >= 0.95 * fair


def test_a_packed_checkpoint_has_few_files_of_the_size_that_was_asked_for() -> None:
    description = StateDescription(_language_model(12, 768, 50257))
    total = sum(math.prod(spec.shape) * 4 for spec in description.tensors.values())
    plan = make_save_plan([description] * 2, GridOptions(_ALL, file_bytes=32 << 20))
    assert not plan.arrays
    assert plan.pack_bytes <= 32 << 20
    assert len(plan.pack_owners) <= 2 * total / (32 << 20)
    assert len(plan.pack_owners) * plan.pack_bytes <= 1.05 * total
    _check_pack(plan)
    _check_cover(plan, [description] * 2)


def test_replicas_of_shards_share_the_work() -> None:
    """Hybrid sharding: two replicas of four shards."""
    mesh = Sharding((2, 4), tuple(range(8)), (Placement(), Placement(0)))
    tensors = {path: replace(spec, sharding=mesh) for path, spec in _language_model(4, 512, 8000).items() if spec.shape}
    descriptions = [StateDescription(tensors)] * 8
    plan = make_save_plan(descriptions, GridOptions())
    loads = _bytes_of(plan)
    assert max(loads) <= 1.1 * min(loads)
    _check_cover(plan, descriptions)


def test_replicas_may_have_a_mesh_each() -> None:
    """Tensor parallelism inside data parallelism: every replica knows only its own mesh."""
    meshes = [Sharding((2,), ranks, (Placement(0),)) for ranks in ((0, 1), (2, 3))]
    kinds = [StateDescription(_tensors(w=_spec(100, 20, sharding=mesh), b=_spec(7))) for mesh in meshes]
    descriptions = [kinds[0], kinds[0], kinds[1], kinds[1]]
    plan = make_save_plan(descriptions, _SMALL)
    assert [array.path for array in plan.arrays] == [("w",)]
    _check_cover(plan, descriptions)
    assert max(_bytes_of(plan)) <= 1.15 * min(_bytes_of(plan))


def test_tied_tensors_of_which_some_ranks_have_empty_shards() -> None:
    """A rank with an empty shard cannot tell that two names are one tensor."""
    mesh = Sharding((3,), (0, 1, 2), (Placement(0),))
    spec = _spec(4, 30, sharding=mesh)
    tied = StateDescription(_tensors(a=spec), aliases={("b",): ("a",)})
    empty = StateDescription(_tensors(a=spec, b=spec))
    plan = make_save_plan([tied, tied, empty], _SMALL)
    assert plan.aliases == {("b",): ("a",)}
    assert {array.path for array in plan.arrays} == {("a",)}
    _check_cover(plan, [tied, tied, empty])


def test_what_is_tied_on_one_rank_only_is_stored_for_the_others() -> None:
    tied = StateDescription(_tensors(a=_spec(9)), aliases={("b",): ("a",)})
    apart = StateDescription(_tensors(a=_spec(9), b=_spec(9)))
    plan = make_save_plan([tied, apart], _SMALL)
    assert plan.aliases == {}
    _check_cover(plan, [tied, apart])


def test_a_rank_missing_from_a_mesh_is_an_error() -> None:
    mesh = Sharding((2,), (0, 1), (Placement(0),))
    has = StateDescription(_tensors(w=_spec(6, 5, sharding=mesh)))
    with pytest.raises(StateError, match="w: the ranks that have this DTensor hold 15 of its 30 elements"):
        make_save_plan([has, StateDescription()], _SMALL)


def test_values_are_written_by_one_rank_or_by_each() -> None:
    first = StateDescription(values={("lr",): False, ("seed",): True})
    second = StateDescription(values={("lr",): False, ("seed",): True, ("late",): False})
    plan = make_save_plan([first, second, second], _SMALL)
    assert plan.value_owners == {("lr",): 0, ("late",): 1}
    assert plan.per_rank_values == {("seed",): (0, 1, 2)}


def test_the_digest_tells_plans_apart() -> None:
    base = StateDescription(_tensors(a=_spec(100)), {("n",): False})
    others = [
        StateDescription(_tensors(a=_spec(101)), {("n",): False}),
        StateDescription(_tensors(b=_spec(100)), {("n",): False}),
        StateDescription(_tensors(a=_spec(100)), {("m",): False}),
        StateDescription(_tensors(a=replace(_spec(100), dtype="int32")), {("n",): False}),
        StateDescription(_tensors(a=_spec(100)), {("n",): False}, {("t",): ("a",)}),
    ]
    digests = [make_save_plan([each, each], _SMALL).digest for each in (base, *others)]
    digests.append(make_save_plan([base], _SMALL).digest)
    digests.append(make_save_plan([base, base], replace(_SMALL, pack_below_bytes=1000)).digest)
    assert len(set(digests)) == len(digests)
