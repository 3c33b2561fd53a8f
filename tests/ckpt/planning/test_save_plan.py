"""A save plan: each element is written once, by a rank that holds it, evenly, and all ranks have the same plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import StateError
from ckpt.paths import Path
from ckpt.planning.boxes import Box, OwnBoxes, Placement, Sharding, local_boxes
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.exchange import check_agreement
from ckpt.planning.save_plan import SavePlan, make_save_plan
from ckpt.storage.compression import Compression
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import ALIGNMENT
from tests.ckpt.planning.exchanging import exchange_all

_SMALL = GridOptions(file_bytes=2048, inner_bytes=64, smallest_split_bytes=64)


def _tensors(**specs: TensorSpec) -> dict[Path, TensorSpec]:
    return {(name,): spec for name, spec in specs.items()}


def _spec(*shape: int, sharding: Sharding | OwnBoxes | None = None, per_rank: bool = False) -> TensorSpec:
    return TensorSpec("float32", 4, shape, sharding, per_rank)


def _holds(spec: TensorSpec, rank: int, box: Box) -> bool:
    if spec.sharding is None:
        return True
    if isinstance(spec.sharding, OwnBoxes):
        return any(each.intersection(box) == box for each in spec.sharding.boxes)
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
        for chunk in plan.chunks_of(owner):
            first, last = chunk.array.meta.box_of(chunk.index)
            offset = tuple(a + b for a, b in zip(chunk.array.box_offset, first, strict=True))
            box = Box(offset, tuple(high - low for low, high in zip(first, last, strict=True)))
            write(chunk.array.path, chunk.array.rank, owner, box)
    for name, count in written.items():
        assert (count == 1).all(), name


def _check_packs(plan: SavePlan, file_bytes: int) -> None:
    """Check that chunks are aligned and do not overlap, that the index finds them, and that files have their size."""
    sizes: dict[tuple[int, int], int] = {}
    rooms: dict[tuple[int, int], int] = {}  # with the room of chunks at an edge, which may be shorter than others
    apart: dict[tuple[int, int], bool] = {}
    for owner in range(plan.world_size):
        for chunk in plan.chunks_of(owner):
            place = plan.index.place(chunk.array, chunk.index)
            assert place == (pack_file(owner, chunk.file), chunk.offset, chunk.array.meta.encoded_bytes(chunk.index))
            assert chunk.offset % ALIGNMENT == 0
            assert chunk.offset >= sizes.get((owner, chunk.file), 0)
            sizes[owner, chunk.file] = chunk.offset + place.nbytes
            rooms[owner, chunk.file] = chunk.offset + chunk.array.meta.largest_encoded_bytes
            apart[owner, chunk.file] = chunk.array.number in plan.apart
    assert plan.index.files() == sizes
    for (owner, file), room in rooms.items():
        is_last = apart.get((owner, file + 1)) != apart[owner, file]
        assert room >= file_bytes - ALIGNMENT or is_last


def _check_apart(plan: SavePlan, descriptions: Sequence[StateDescription], options: GridOptions) -> None:
    """Check that a file has nothing of one rank alone beside what several ranks hold, if that was asked for."""
    common: dict[tuple[int, int], set[bool]] = {}
    for owner in range(plan.world_size):
        for chunk in plan.chunks_of(owner):
            common.setdefault((owner, chunk.file), set()).add(chunk.array.number in plan.apart)
            if not options.common_apart or chunk.array.number in plan.apart or chunk.array.rank is not None:
                continue
            first, last = chunk.array.meta.box_of(chunk.index)
            offset = tuple(a + b for a, b in zip(chunk.array.box_offset, first, strict=True))
            box = Box(offset, tuple(high - low for low, high in zip(first, last, strict=True)))
            specs = [description.tensors.get(chunk.array.path) for description in descriptions]
            holders = sum(spec is not None and _holds(spec, rank, box) for rank, spec in enumerate(specs))
            assert holders == 1 or not box.elements
    assert all(len(kinds) == 1 for kinds in common.values())
    assert options.common_apart or not plan.apart


def _bytes_of(plan: SavePlan) -> list[int]:
    return [
        sum(chunk.array.meta.encoded_bytes(chunk.index) for chunk in plan.chunks_of(owner))
        for owner in range(plan.world_size)
    ]


def _owners(plan: SavePlan) -> dict[Path, set[int]]:
    owners: dict[Path, set[int]] = {}
    for rank in range(plan.world_size):
        for chunk in plan.chunks_of(rank):
            owners.setdefault(chunk.array.path, set()).add(rank)
    return owners


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
    file_bytes = data.draw(st.sampled_from([64, 512, 2048, 1 << 20]))
    options = replace(_SMALL, file_bytes=file_bytes, common_apart=data.draw(st.booleans()))
    plan = make_save_plan(descriptions, options)
    _check_cover(plan, descriptions)
    _check_packs(plan, options.file_bytes)
    _check_apart(plan, descriptions, options)
    again = make_save_plan(exchange_all(descriptions)[0][0], options)
    assert again.index_bytes == plan.index_bytes
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
    owners = _owners(plan)
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
def test_identical_ranks_write_equal_shares(layers: int, width: int, vocabulary: int, world_size: int) -> None:
    description = StateDescription(_language_model(layers, width, vocabulary))
    plan = make_save_plan([description] * world_size, GridOptions())
    loads = _bytes_of(plan)
    fair = sum(math.prod(spec.shape) * 4 for spec in description.tensors.values()) / world_size
    assert max(loads) <= 1.06 * fair
    assert min(loads) >= 0.94 * fair


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_have_few_files_of_the_size_that_was_asked_for(world_size: int) -> None:
    description = StateDescription(_language_model(12, 768, 50257))
    file_bytes = 8 << 20
    plan = make_save_plan([description] * world_size, GridOptions(file_bytes=file_bytes))
    for rank, nbytes in enumerate(_bytes_of(plan)):
        sizes = [size for (owner, _), size in plan.index.files().items() if owner == rank]
        assert len(sizes) <= 1 + nbytes / file_bytes
        assert max(sizes) <= 1.5 * file_bytes
    _check_packs(plan, file_bytes)
    _check_cover(plan, [description] * world_size)


def test_thousands_of_ranks_have_one_index_of_the_size_of_one() -> None:
    """Evenly sharded tensors: the index does not grow with ranks, and each rank finds its own without the others'."""
    few, many = (_sharded_over(ranks) for ranks in (16, 1024))
    assert len(many.index_bytes) < 1.3 * len(few.index_bytes)
    assert len(many.index.regions) <= 4
    for rank in (0, 511, 1023):
        assert sum(chunk.array.path[0] == "layers" for chunk in many.chunks_of(rank)) == 64 * 7


def _sharded_over(ranks: int) -> SavePlan:
    mesh = Sharding((ranks,), tuple(range(ranks)), (Placement(0),))
    model = {path: spec for path, spec in _language_model(64, 1024, 32768).items() if spec.shape}
    description = StateDescription({path: replace(spec, sharding=mesh) for path, spec in model.items()})
    return make_save_plan([description] * ranks, GridOptions())


def test_small_tensors_that_all_ranks_have_do_not_scatter() -> None:
    """720 steps of an optimizer, beside shards of 4,096 ranks: few packs have them, and the index lists few."""
    mesh = Sharding((4096,), tuple(range(4096)), (Placement(0),))
    tensors = {("step", number): _spec() for number in range(720)} | _tensors(w=_spec(1 << 20, 256, sharding=mesh))
    plan = make_save_plan([StateDescription(tensors)] * 4096, GridOptions())
    assert len(plan.index.regions) <= 3


def test_what_ranks_hold_alone_is_not_apart() -> None:
    shards = Sharding((4,), (0, 1, 2, 3), (Placement(0),))
    tensors = _tensors(w=_spec(64, sharding=shards), own=_spec(3, per_rank=True), scalar=_spec(), norm=_spec(30))
    options = replace(_SMALL, common_apart=True)
    plan = make_save_plan([StateDescription(tensors, from_lowest=frozenset({("scalar",)}))] * 4, options)
    assert {plan.index.arrays[number].path for number in plan.apart} == {("scalar",), ("norm",)}
    files = {rank: {chunk.file for chunk in plan.chunks_of(rank)} for rank in range(4)}
    assert all(0 in numbers and numbers <= {0, 1} for numbers in files.values())
    assert 1 in files[0], "the scalar"


@pytest.mark.parametrize("world_size", [1, 4])
def test_small_tensors_are_apart(world_size: int) -> None:
    """Of fine-tuning: files have frozen weights or what is trained, however the weights are sharded."""
    mesh = Sharding((world_size,), tuple(range(world_size)), (Placement(0),))
    layers = {f"layer{n}": _spec(512, 512, sharding=mesh) for n in range(8)}
    adapters = {f"adapter{n}": _spec(512, 4, sharding=mesh) for n in range(8)} | {"norm": _spec(512), "step": _spec()}
    tensors = _tensors(**dict(sorted((layers | adapters).items(), key=lambda item: item[0][-1])))
    options = GridOptions(file_bytes=1 << 20, small_apart=True)
    plan = make_save_plan([StateDescription(tensors)] * world_size, options)
    _check_cover(plan, [StateDescription(tensors)] * world_size)

    def are_apart(plan: SavePlan) -> bool:
        names: dict[tuple[int, int], set[str]] = {}
        for rank in range(world_size):
            for chunk in plan.chunks_of(rank):
                names.setdefault((rank, chunk.file), set()).add(str(chunk.array.path[0]))
        return all(of_file <= layers.keys() or of_file <= adapters.keys() for of_file in names.values())

    assert are_apart(plan)
    assert not are_apart(make_save_plan([StateDescription(tensors)] * world_size, replace(options, small_apart=False)))


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
    assert sorted(array.path for array in plan.index.arrays) == [("b",), ("w",)]
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
    assert {array.path for array in plan.index.arrays} == {("a",)}
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


def _own(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> StateDescription:
    return StateDescription(_tensors(w=_spec(6, 5, sharding=OwnBoxes(tuple(Box(*box) for box in boxes)))))


def test_boxes_of_no_mesh_may_divide_a_tensor_in_any_way() -> None:
    descriptions = [
        _own(((0, 0), (2, 5)), ((2, 0), (4, 1))),
        _own(((2, 1), (4, 4))),
        _own(((2, 1), (4, 4))),  # a replica
        _own(),
    ]
    (exchanged, *others), _ = exchange_all(descriptions)
    assert exchanged == descriptions
    assert all(other == exchanged for other in others)
    plan = make_save_plan(exchanged, _SMALL)
    _check_cover(plan, descriptions)
    assert {rank for rank in range(4) if list(plan.chunks_of(rank))} <= {0, 1, 2}


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (3, 5))],
        [((0, 0), (3, 5)), ((2, 0), (3, 5))],  # as many elements as the tensor has
        [((0, 0), (6, 5)), ((5, 0), (2, 5))],
    ],
)
def test_boxes_of_no_mesh_that_do_not_tile_a_tensor_are_an_error(boxes: list[Any]) -> None:
    with pytest.raises(StateError, match=r"w: the boxes that ranks have of this tensor overlap.*30 in the shape"):
        make_save_plan([_own(box) for box in boxes], _SMALL)


def test_a_tensor_in_boxes_and_replicated_is_a_contradiction() -> None:
    with pytest.raises(StateError, match=r"w: float32\[6, 5\] in boxes on rank 0, .* replicated on rank 1"):
        exchange_all([_own(((0, 0), (6, 5))), StateDescription(_tensors(w=_spec(6, 5)))])


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
    digests.append(make_save_plan([base, base], replace(_SMALL, inner_bytes=32)).digest)
    digests.append(make_save_plan([base, base], _SMALL, Compression()).digest)
    assert len(set(digests)) == len(digests)
