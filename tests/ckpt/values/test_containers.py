"""A state is made again of its leaves and its containers, without a template."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import PerRank
from ckpt.loading.consistency import read_index
from ckpt.loading.index import CheckpointIndex
from ckpt.planning.state_dict import FlatState, flatten
from ckpt.values.containers import Container, rebuild
from tests.support import run_ranks


class Pair(NamedTuple):
    first: Any
    second: Any


class Known(NamedTuple):
    left: Any
    right: Any


ckpt.register_encoder(Known)


def _leaves(flat: FlatState) -> dict[Any, Any]:
    leaves: dict[Any, Any] = {path: leaf.local for path, leaf in flat.tensors.items()}
    leaves |= {path: leaf.value for path, leaf in flat.values.items()}
    return leaves | {path: leaves[target] for path, target in flat.aliases.items()}


def _rebuilt(state: Any) -> Any:
    flat = flatten(state)
    documents = {path: json.loads(json.dumps(each.to_document())) for path, (each, _) in flat.containers.items()}
    return rebuild(_leaves(flat), {path: Container.from_document(each) for path, each in documents.items()})


def _form(node: Any) -> Any:
    """A form that tells apart types and keys, but not the order of keys."""
    if isinstance(node, torch.Tensor):
        return "tensor", node.data_ptr(), tuple(node.shape)
    items: Any = node
    if isinstance(node, Namespace):
        items = vars(node)
    if isinstance(items, dict):
        return type(node), sorted(((type(key).__name__, key, _form(item)) for key, item in items.items()), key=repr)
    if isinstance(node, list | tuple | deque):
        return type(node), getattr(node, "maxlen", None), [_form(item) for item in node]
    return type(node), node


_LEAVES = st.builds(lambda: torch.ones(2)) | st.integers() | st.text(max_size=3) | st.none()
_KEYS = st.text("abc/", max_size=3) | st.integers(-3, 12)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    attributes = st.dictionaries(st.sampled_from(["self", "a", "b"]), inner)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        lists.map(lambda items: deque(items, 12)),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(_KEYS, inner, max_size=3).map(lambda items: Counter(items)),
        attributes.map(lambda items: _with_attributes(items)),
        st.builds(Known, inner, inner),
    )


def _with_attributes(items: dict[str, Any]) -> Namespace:
    namespace = Namespace()
    vars(namespace).update(items)
    return namespace


@given(st.dictionaries(_KEYS, st.recursive(_LEAVES, _nested, max_leaves=8), max_size=4))
def test_any_state(state: dict[Any, Any]) -> None:
    assert _form(_rebuilt(state)) == _form(state)


def test_what_has_no_class_of_its_own() -> None:
    one = torch.ones(1)
    state = {
        "pair": Pair(one, [one, 2]),
        "default": defaultdict(int, {3: one}),
        "view": MappingProxyType({"a": one}),
        "size": torch.Size([2, 3]),
        "empty": [OrderedDict(), {}, (), one],
    }
    rebuilt = _rebuilt(state)
    expected = {
        **state,
        "pair": {"first": one, "second": [one, 2]},
        "default": {3: one},
        "view": {"a": one},
    }
    assert _form(rebuilt) == _form(expected)


def test_a_state_that_is_a_list() -> None:
    state = [torch.ones(1), {"a": 1}]
    assert _form(_rebuilt(state)) == _form(state)


def test_the_state_dict_of_an_optimizer_is_a_plain_dict_with_the_names_of_its_classes() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    flat = flatten({"o": optimizer, "s": torch.optim.lr_scheduler.StepLR(optimizer, 3)})
    documents = {path: container.to_document() for path, (container, _) in flat.containers.items()}
    assert documents == {("o",): {"kind": "optimizer", "fields": ["AdamW", "Adam"]}}
    rebuilt = _rebuilt({"o": optimizer})
    assert _form(rebuilt["o"]) == _form(optimizer.state_dict())


def test_plain_dicts_are_not_recorded() -> None:
    assert flatten({"a": {1: torch.ones(1), "1": {}}, "values": [1, (2, 3)]}).containers == {}


@pytest.mark.parametrize(
    ("leaves", "containers", "says"),
    [
        ({("a",): 1, ("a", "b"): 2}, {}, "a/b: it is below another leaf"),
        ({("a", "b"): 2, ("a",): {}}, {}, "a: it is a leaf, and there are leaves below it"),
        ({("a", 10**18): 1}, {("a",): Container("list")}, "a: a sequence of 1 items has no item 0"),
        ({("a", "0"): 1}, {("a",): Container("tuple")}, "a: a sequence of 1 items has no item 0"),
        ({("a", 0): 1}, {("a",): Container("Namespace")}, "a: 0 is not the name of an attribute"),
        ({("a", 0): 1}, {("a",): Container("namedtuple", "m.Pair", ("x", "y"))}, "a: a m.Pair has 2 fields"),
        ({("a",): 5}, {("a",): Container("list")}, "a: it is a leaf, and recorded as a list"),
        ({("a",) * 102: 5}, {}, "nested deeper than any state"),
    ],
)
def test_leaves_that_no_state_has(leaves: dict[Any, Any], containers: dict[Any, Container], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rebuild(leaves, containers)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"kind": "dict"},
        {"kind": ["list"]},
        {"kind": "list", "maxlen": -1},
        {"kind": "deque", "maxlen": True},
        {"kind": "namedtuple", "type": "a.B"},
        {"kind": "namedtuple", "type": 1, "fields": []},
        {"kind": "namedtuple", "type": "a.B", "fields": "ab"},
        {"kind": "list", "fields": ["a"]},
        {"kind": "list", "more": 1},
    ],
)
def test_documents_that_are_no_container(document: Any) -> None:
    with pytest.raises(ValueError, match="is not a container"):
        Container.from_document(document)


def _from_storage(index: CheckpointIndex, rank: int) -> Any:
    """Return the state of a rank with the shapes of its tensors in place of these."""
    leaves: dict[Any, Any] = {path: tensor.shape for path, tensor in index.tensors.items()}
    leaves |= {path: own[rank].shape for path, own in index.per_rank_tensors.items() if rank in own}
    leaves |= index.values | {path: own[rank] for path, own in index.per_rank_values.items() if rank in own}
    leaves |= {path: leaves[target] for path, target in index.aliases.items()}
    own_containers = {path: own[rank] for path, own in index.per_rank_containers.items() if rank in own}
    return rebuild(leaves, index.containers | own_containers)


def test_containers_in_a_step(tmp_path: Path) -> None:
    def main(rank: int, world_size: int) -> Any:
        shared = torch.ones(3)
        own: Any = (torch.ones(1), 5) if rank else [torch.ones(2)]
        state = {
            "model": OrderedDict(w=shared, tied=[shared, {}]),
            "own": PerRank(own),
            f"stage{rank}": [torch.ones(4)],
        }
        with ckpt.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state, 1)

    run_ranks(main, 2)
    index = read_index(str(tmp_path / "step_00000001"))
    for rank, own in enumerate(([(2,)], ((1,), 5))):
        rebuilt = _from_storage(index, rank)
        stages = {"stage0": [(4,)], "stage1": [(4,)]}
        assert rebuilt == {"model": {"w": (3,), "tied": [(3,), {}]}, "own": own, **stages}
        assert type(rebuilt["model"]) is OrderedDict
