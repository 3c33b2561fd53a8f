"""All ranks learn every rank's description, and each distinct part of them is sent once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import StateError
from ckpt.paths import Path
from ckpt.planning.boxes import Placement, Sharding
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.values.containers import Container
from tests.ckpt.planning.exchanging import exchange_all


def _tensors(**specs: TensorSpec) -> dict[Path, TensorSpec]:
    return {(name,): spec for name, spec in specs.items()}


def _spec(*shape: int, sharding: Sharding | None = None) -> TensorSpec:
    return TensorSpec("float32", 4, shape, sharding)


def test_equal_descriptions_cost_one_collective() -> None:
    same = [StateDescription(_tensors(a=_spec(4))) for _ in range(3)]
    results, rounds = exchange_all(same)
    assert results == [same] * 3
    assert [len(payload) for payload in rounds[0]] == [32] * 3
    assert len(rounds) == 1


def test_equal_ones_and_equal_specs_become_one_object() -> None:
    mesh = Sharding((2,), (0, 2), (Placement(0, 2),))
    kinds = [
        StateDescription(_tensors(a=_spec(4, sharding=mesh), c=_spec(4, sharding=mesh)), {("n", 3): True}),
        StateDescription(_tensors(b=_spec(4)), aliases={("c",): ("b",)}, from_lowest=frozenset({("b",)})),
    ]
    descriptions = [kinds[0], kinds[1], kinds[0]]
    results, _ = exchange_all(descriptions)
    assert results == [descriptions] * 3
    for own in results:
        assert own[0] is own[2]
        assert own[0].tensors["a",] is own[0].tensors["c",]


def _stage(stage: int, mesh: Sharding) -> StateDescription:
    names = [f"layers.{stage}.{number}.weight" for number in range(500)]
    return StateDescription({(name,): _spec(64, 64, sharding=mesh) for name in names})


def test_the_entries_of_a_pipeline_stage_are_sent_once_for_all_its_replicas() -> None:
    meshes = [Sharding((2,), (2 * n, 2 * n + 1), (Placement(0),)) for n in range(16)]
    descriptions = [_stage(rank // 8, meshes[rank // 2]) for rank in range(32)]
    results, rounds = exchange_all(descriptions)
    assert all(result == descriptions for result in results)
    assert [rank for rank in range(32) if len(rounds[1][rank] + rounds[2][rank]) > 1000] == [0, 8, 16, 24]


def test_what_ranks_have_in_common_with_rank_0_is_not_sent_again() -> None:
    mesh = Sharding((32,), tuple(range(32)), (Placement(0),))
    common = _stage(0, mesh).tensors
    descriptions = []
    for rank in range(32):
        tensors = dict(common)
        del tensors[f"layers.0.{7 * rank}.weight",]
        descriptions.append(StateDescription({**tensors, (f"experts.{rank}",): _spec(8)}, {("step",): False}))
    results, rounds = exchange_all(descriptions)
    assert all(result == descriptions for result in results)
    whole, *others = (sum(map(len, payloads)) for payloads in zip(*rounds, strict=True))
    assert whole > 1000
    assert max(others) < 250


def test_contradictions_are_the_same_error_on_all_ranks() -> None:
    descriptions = [StateDescription(_tensors(**{f"t{n:02d}": _spec(4 + rank) for n in range(30)})) for rank in (0, 1)]
    with pytest.raises(StateError) as caught:
        exchange_all(descriptions)
    text = str(caught.value)
    assert "ranks disagree about 30 tensor(s)" in text
    assert "t00: float32[4] replicated on rank 0, float32[5] replicated on rank 1" in text
    assert text.count("replicated on rank 0") == 20
    assert "and 10 more" in text


_KEYS = st.integers(-2, 2) | st.text(st.characters(exclude_categories=["Cs"]), max_size=2)
_PATHS = st.lists(_KEYS, min_size=1, max_size=2).map(tuple)
_MESHES = [Sharding((1, 2), ranks, (Placement(), Placement(1, 3))) for ranks in ((1, 0), (2, 3))]

_CONTAINERS = [Container("list"), Container("deque", maxlen=3), Container("namedtuple", "m.Pair", ("a", "b"))]


@st.composite
def _descriptions(draw: st.DrawFn) -> StateDescription:
    spec = draw(st.sampled_from([_spec(4), _spec(9)]))
    specs = st.builds(replace, st.just(spec), sharding=st.sampled_from([None, *_MESHES]), per_rank=st.just(True))
    tensors = draw(st.dictionaries(_PATHS, specs, max_size=4))
    return StateDescription(
        tensors,
        draw(st.dictionaries(_PATHS, st.booleans(), max_size=3)),
        draw(st.dictionaries(_PATHS, _PATHS, max_size=2)),
        draw(st.dictionaries(_PATHS, st.tuples(st.sampled_from(_CONTAINERS), st.booleans()), max_size=2)),
        frozenset(path for path in tensors if draw(st.booleans())),
    )


@given(st.lists(_descriptions(), min_size=1, max_size=4))
def test_any_descriptions(descriptions: list[StateDescription]) -> None:
    results, _ = exchange_all(descriptions)
    assert results == [descriptions] * len(descriptions)
    orders = [[list(each.tensors) for each in result] for result in results]
    assert orders == [orders[0]] * len(orders)
