"""States whose leaves are those of the save before: recognised if nothing has changed, and never after a change.

Every answer is compared with that of `flatten`, which remembers nothing.
"""

import contextlib
import gc
import subprocess
import sys
import weakref
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Checkpointer
from ckpt.errors import StateError
from ckpt.native import choose
from ckpt.planning.flat_state import FlatState
from ckpt.planning.known_state import KnownStates
from ckpt.planning.state_dict import flatten
from ckpt.planning.tensor_records import TensorRecords
from ckpt.saving.stage import Stager
from tests.ckpt.planning.flattening import is_known, known_states, seen

_COUNT = 70  # more than are named again
State = dict[str, Any]

pytestmark = pytest.mark.skipif(
    TensorRecords.of([torch.zeros(1)]) is None, reason="the compiled functions are not installed"
)


def _tensors(count: int = _COUNT) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((3, 4), float(number)) for number in range(count)}


class _Model(torch.nn.Module):
    """A module with what a state dict has or leaves out: no bias, a buffer that is not saved, one module twice."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 4, bias=number % 2 == 0) for number in range(layers))
        self.norm = torch.nn.BatchNorm1d(4)
        self.again = self.layers[3]
        self.missing = None
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("none", None)
        self.alone = torch.nn.Parameter(torch.ones(2, 3))


class _Application:
    """An object that makes its state dict anew for each call, with new tensors over the same memory."""

    def __init__(self) -> None:
        self.tensors = _tensors()
        self.calls = 0

    def state_dict(self) -> State:
        self.calls += 1
        return {"tensors": {name: tensor.detach() for name, tensor in self.tensors.items()}, "more": {"step": 1}}

    def load_state_dict(self, state_dict: State) -> None:
        raise NotImplementedError


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _training() -> State:
    model = _Model()
    return {
        "model": model,
        "optimizer": _optimizer(model),
        "application": _Application(),
        "average": OrderedDict((name, tensor.clone()) for name, tensor in model.state_dict().items()),
        "threes": {number: {key: torch.zeros(2) for key in "abc"} for number in range(8)},
        "list": [torch.ones(2), (torch.zeros(3), [torch.ones(1)])],
        "rng": ckpt.RngState(),
        "own": ckpt.PerRank({"w": torch.ones(3), "position": 4}),
        "array": np.arange(3.0),
        "empty": {},
        "nothing": torch.zeros(0, 3),
        "step": 7,
        "text": {"b": [1, 2], "a": ("x", None, 1.5)},
    }


_STATES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"model": _tensors()},
    "dicts of three": lambda: {"s": {number: {key: torch.zeros(2) for key in "abc"} for number in range(_COUNT)}},
    "module": lambda: {"model": _Model(_COUNT)},
    "module of other classes": lambda: {
        "model": torch.nn.Sequential(
            torch.nn.TransformerEncoderLayer(8, 2, 8), *map(torch.nn.Linear, [2] * 40, [3] * 40)
        )
    },
    "application": lambda: {"application": _Application()},
    "training": _training,
    "transposed": lambda: {"model": {name: tensor.T for name, tensor in _tensors().items()}},
    "tied": lambda: {"model": (tensors := _tensors()), "average": dict(tensors)},
}


@pytest.mark.parametrize("name", _STATES)
def test_a_state_is_recognised_while_only_its_elements_change(name: str) -> None:
    state = _STATES[name]()
    states = known_states(state)
    for leaf in flatten(state).tensors.values():
        if leaf.local.is_floating_point():
            leaf.local.add_(1)
    assert is_known(states, state)


@pytest.mark.parametrize("name", _STATES)
def test_equal_descriptions_are_one_object(name: str) -> None:
    """A plan is kept for a description; comparing two objects would take as long as making them."""
    state, states = _STATES[name](), KnownStates()
    first = states.flatten(state).describe()
    assert states.flatten(state).describe() is first
    other = KnownStates()
    other.flatten(state)
    state["more"] = torch.zeros(3)
    other.flatten(state)
    del state["more"]
    assert states.flatten(state).describe() is first


def _swap_data(state: State) -> None:
    parameter = state["model"].alone
    parameter.data = parameter.data * 2


def _swap_data_for_other_dtype(state: State) -> None:
    state["threes"][3]["a"].data = state["threes"][3]["a"].data.view(torch.int32)


def _share_memory(state: State) -> None:
    """Make one parameter another name of another one."""
    state["model"].layers[1].weight.data = state["model"].layers[5].weight.data


def _part_tied_modules(state: State) -> None:
    state["model"].again.weight = torch.nn.Parameter(state["model"].again.weight.detach().clone())
    state["model"].again = torch.nn.Linear(3, 4)


def _free_and_refill(state: State) -> None:
    """Replace a tensor by one at the same address, of another shape."""
    three = state["threes"][5]
    address = three["a"].data_ptr()
    shape = (2, 1)
    kept = []
    del three["a"]
    for _ in range(100):
        kept.append(torch.full(shape, 9.0))
        if kept[-1].data_ptr() == address:
            break
    three["a"] = kept[-1]
    three["b"], three["c"] = three.pop("b"), three.pop("c")


def _load(state: State) -> None:
    state["optimizer"].load_state_dict({**state["optimizer"].state_dict()})


def _hook(state: State) -> None:
    more = torch.ones(2)
    state["model"].norm.register_state_dict_post_hook(
        lambda module, destination, prefix, metadata: destination.update({f"{prefix}more": more})
    )


def _pre_hook(state: State) -> None:
    model, other = state["model"], torch.zeros(2, 3)
    model.register_state_dict_pre_hook(lambda module, prefix, keep: setattr(model.alone, "data", other))


def _optimizer_hook(state: State) -> None:
    def changed(optimizer: Any, state_dict: State) -> State:
        return {**state_dict, "state": {}}

    state["optimizer"].register_state_dict_post_hook(changed)


def _replace_state_dict(state: State) -> None:
    model = state["model"]
    model.layers[2].state_dict = lambda **arguments: {}


def _override_saving(state: State) -> None:
    class _Other(torch.nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "other"] = self.weight.detach()

    state["model"].layers[2].__class__ = _Other


def _extra_state(state: State) -> None:
    class _Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 3}

    state["model"].layers[2].__class__ = _Extra


def _offload_and_back(state: State) -> None:
    model = state["model"]
    host = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    gc.collect()
    for name, parameter in model.named_parameters():
        parameter.data = host[name] + 1


_CHANGES: dict[str, Callable[[State], Any]] = {
    "data of a parameter": _swap_data,
    "another dtype by a view": _swap_data_for_other_dtype,
    "one parameter is another": _share_memory,
    "tied modules are parted": _part_tied_modules,
    "freed and refilled": _free_and_refill,
    "set_": lambda state: state["average"]["alone"].set_(torch.full((2, 3), 5.0)),
    "set_ to another stride": lambda state: state["average"]["alone"].set_(torch.arange(6.0).view(3, 2).T),
    "set_ to another offset": lambda state: state["threes"][3]["a"].set_(state["threes"][3]["a"].new_zeros(9)[3:5]),
    "resize_": lambda state: state["threes"][3]["a"].resize_(7).zero_(),
    "resize_ to less": lambda state: state["threes"][3]["a"].resize_(1),
    "transposed in place": lambda state: state["average"]["alone"].t_(),
    "negated": lambda state: state["threes"][3].update(a=torch._neg_view(state["threes"][3]["a"])),
    "negated in place": lambda state: setattr(state["threes"][3]["a"], "data", torch._neg_view(torch.ones(2))),
    "conjugated": lambda state: state["threes"][3].update(a=torch.tensor([1j, 2.0]).conj().imag),
    "another view": lambda state: state["threes"][3].update(a=state["threes"][3]["b"][:1]),
    "another name of another": lambda state: state["threes"][3].update(a=state["threes"][4]["a"]),
    "a parameter of the optimizer's state": lambda state: state["optimizer"].state.popitem(),
    "moments are replaced": lambda state: next(iter(state["optimizer"].state.values())).update(
        exp_avg=torch.ones(4, 3)
    ),
    "optimizer is replaced": lambda state: state.update(optimizer=_optimizer(state["model"])),
    "another optimizer": lambda state: state.update(optimizer=torch.optim.SGD(state["model"].parameters(), lr=0.1)),
    "model is replaced": lambda state: state.update(model=_Model()),
    "load_state_dict": _load,
    "learning rate": lambda state: state["optimizer"].param_groups[0].update(lr=0.05),
    "order of parameters": lambda state: state["optimizer"].param_groups[0]["params"].reverse(),
    "another group": lambda state: state["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}),
    "learning rate is a tensor": lambda state: state["optimizer"].param_groups[0].update(lr=torch.tensor(0.1)),
    "a key is renamed": lambda state: state["threes"][3].update(d=state["threes"][3].pop("a")),
    "a key of another type": lambda state: state["threes"].update({"3": state["threes"].pop(3)}),
    "two items are exchanged": lambda state: state["threes"].update({3: state["threes"][4], 4: state["threes"][3]}),
    "two tensors are exchanged": lambda state: state["threes"][3].update(
        a=state["threes"][3]["b"], b=state["threes"][3]["a"]
    ),
    "two keys change places": lambda state: state["average"].move_to_end("alone"),
    "an entry more": lambda state: state["threes"][3].update(d=torch.zeros(3)),
    "an entry less": lambda state: state["threes"].pop(3),
    "an entry more in a list": lambda state: state["list"].append(torch.zeros(1)),
    "a list is a tuple": lambda state: state.update(list=tuple(state["list"])),
    "an ordered dict is a dict": lambda state: state.update(average=dict(state["average"])),
    "a dict is empty": lambda state: state["threes"][3].clear(),
    "a tensor is a value": lambda state: state["threes"][3].update(a=3),
    "a tensor is an array": lambda state: state["threes"][3].update(a=np.zeros(2, np.float32)),
    "a tensor is a parameter": lambda state: state["threes"][3].update(a=torch.nn.Parameter(torch.zeros(2))),
    "a number": lambda state: state.update(step=8),
    "a number of another type": lambda state: state.update(step=7.0),
    "a number in an object": lambda state: state["text"]["b"].append(3),
    "a value more": lambda state: state.update(more=None),
    "values of this rank": lambda state: setattr(state["own"], "value", {"w": torch.ones(4), "position": 5}),
    "random numbers": lambda state: torch.rand(3),
    "an array in place": lambda state: state["array"].__iadd__(1),
    "an array is an alias": lambda state: state.update(array=state["threes"][3]["a"].numpy()),
    "another array": lambda state: state.update(array=np.arange(4.0)),
    "a tensor of another shape": lambda state: state.update(nothing=torch.zeros(0, 4)),
    "a parameter more": lambda state: setattr(state["model"], "more", torch.nn.Parameter(torch.ones(2))),
    "a parameter less": lambda state: delattr(state["model"], "alone"),
    "a bias is None": lambda state: setattr(state["model"].layers[0], "bias", None),
    "a buffer is saved": lambda state: state["model"]._non_persistent_buffers_set.clear(),
    "a buffer is there": lambda state: setattr(state["model"], "none", torch.ones(2)),
    "a module is None": lambda state: setattr(state["model"], "norm", None),
    "a module more": lambda state: state["model"].layers.append(torch.nn.Linear(2, 2)),
    "a module is renamed": lambda state: state["model"]._modules.update(other=state["model"]._modules.pop("norm")),
    "another module at an address": lambda state: setattr(state["model"], "norm", torch.nn.LayerNorm(4)),
    "another dtype": lambda state: state["model"].to(torch.bfloat16),
    "a hook": _hook,
    "a hook before": _pre_hook,
    "a hook of the optimizer": _optimizer_hook,
    "a state_dict of an object": _replace_state_dict,
    "a class saves otherwise": _override_saving,
    "a class with extra state": _extra_state,
    "offloaded and back": _offload_and_back,
    "an object's tensors": lambda state: state["application"].tensors.update({"layer.1": torch.ones(3, 4)}),
    "an object's tensor of another shape": lambda state: state["application"].tensors.update(
        {"layer.1": torch.ones(2)}
    ),
    "an object's keys": lambda state: state["application"].tensors.update({"layer.1b": torch.ones(2)}),
}


def _nested(depth: int) -> State:
    state: State = _tensors()
    for _ in range(depth):
        state = {"inner": state}
    return state


def test_a_state_that_is_nested_deeply_is_recognised_or_flattened() -> None:
    for depth in (20, 95):
        known_states(_nested(depth))
    module = torch.nn.Sequential(*map(torch.nn.Linear, [2] * _COUNT, [3] * _COUNT))
    for depth in range(3):
        module = torch.nn.Sequential(*[torch.nn.Identity()] * depth, module)
    known_states({"model": module})
    for _ in range(120):
        module = torch.nn.Sequential(module)
    states = KnownStates()
    assert not any(is_known(states, {"model": module}) for _ in range(2))


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    state = _training()
    states = known_states(state)
    _CHANGES[change](state)
    for _ in range(3):
        is_known(states, state)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(_CHANGES)), max_size=2), max_size=8))
def test_any_changes_between_saves_are_noticed(saves: list[list[str]]) -> None:
    state, states = _training(), KnownStates()
    for changes in saves:
        for change in changes:
            with contextlib.suppress(KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError):
                _CHANGES[change](state)  # which an earlier one may have made impossible
        is_known(states, state)


def test_after_a_change_a_state_is_recognised_again() -> None:
    state = _training()
    states = known_states(state)
    state["threes"][3]["d"] = torch.zeros(3)
    assert not is_known(states, state)
    assert is_known(states, state)


def test_a_state_that_is_copied_for_each_save_is_recognised() -> None:
    """Its tensors are at other addresses, and none of them is another name of another one, then as now."""
    state = {"model": _tensors()}
    states = known_states(state)
    kept = []
    for _ in range(3):
        copy = {"model": {name: tensor.clone() for name, tensor in state["model"].items()}}
        kept.append(copy)
        assert is_known(states, copy)
    copy["model"]["layer.7"] = copy["model"]["layer.8"]
    assert not is_known(states, copy)
    assert flatten(copy).aliases == states.flatten(copy).aliases != {}


def test_an_array_that_becomes_another_name_of_a_tensor_is_noticed() -> None:
    """Arrays are not among what is known, and this one is of the same kind as the one before."""
    state = {"model": {**_tensors(), "w": torch.zeros(3)}, "array": np.ones(3, np.float32)}
    states = known_states(state)
    state["array"] = np.full(3, 2, np.float32)
    assert is_known(states, state)
    state["array"] = state["model"]["w"].numpy()
    assert not is_known(states, state)
    assert states.flatten(state).aliases


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4).to_sparse(),
        lambda: torch.zeros(3, 4, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(3, 4), 1.0, 0, torch.qint8),
        lambda: torch.nn.UninitializedParameter(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: object(),
        lambda: {True: torch.zeros(2)},
        lambda: {1.0: torch.zeros(2)},
    ],
)
def test_what_cannot_be_stored_is_refused_though_the_rest_is_known(make: Callable[[], Any]) -> None:
    state = {"model": _tensors()}
    states = known_states(state)
    state["model"]["layer.5"] = make()
    for _ in range(2):
        with pytest.raises(StateError, match=r"layer\.5"):
            states.flatten(state)
    state["model"]["layer.5"] = torch.zeros(3, 4)
    is_known(states, state)


@pytest.mark.parametrize("key", [True, 1.0])
def test_a_key_that_is_equal_to_another_one_is_refused(key: Any) -> None:
    state = {"model": _tensors(), "numbered": {1: torch.zeros(2)}}
    states = known_states(state)
    state["numbered"] = {key: state["numbered"][1]}
    with pytest.raises(StateError, match="numbered: keys must be str or int"):
        states.flatten(state)


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    state = {"model": _tensors()}
    states = known_states(state)
    state["model"]["layer.5"].untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"layer\.5.*has no memory"):
        states.flatten(state)


@pytest.mark.parametrize(
    "change", [torch.conj, lambda z: z.conj().clone(), lambda z: z.mT, torch.Tensor.conj_physical_]
)
def test_a_complex_tensor_that_is_conjugated_is_noticed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state = {"model": {**_tensors(), "z": torch.tensor([[1j, 2], [3, 4 - 1j]])}}
    states = known_states(state)
    state["model"]["z"].data = change(state["model"]["z"].data)
    for _ in range(3):
        is_known(states, state)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: State = {"model": _tensors()}
    states = known_states(state)
    state["model"]["a"] = state["model"]["b"] = state
    with pytest.raises(StateError, match="nested deeper"):
        states.flatten(state)


def test_an_object_is_asked_once_for_each_save() -> None:
    """Its `state_dict` may be a collective, so that a rank that asks again waits for others that do not."""
    state = {"application": _Application(), "model": _tensors()}
    states = KnownStates()
    for number in range(1, 6):
        states.flatten(state)
        assert state["application"].calls == number
        if number > 2:  # also if the state has changed
            state["model"][f"more.{number}"] = torch.zeros(number)
            state["last"] = np.arange(number)


def test_an_object_that_cannot_be_asked_any_more_is_named() -> None:
    class Broken(_Application):
        def state_dict(self) -> State:
            if self.calls == 2:
                raise ValueError("no state any more")
            return super().state_dict()

    state = {"outer": {"inner": Broken()}}
    states = KnownStates()
    states.flatten(state)
    assert type(states.flatten(state)) is not FlatState
    with pytest.raises(StateError, match=r"outer/inner: .*no state any more"):
        states.flatten(state)


def test_no_tensor_is_kept() -> None:
    """Memory that a program frees between two saves is free."""
    state = _training()
    states = known_states(state)
    tensors = [weakref.ref(leaf) for leaf in [*state["average"].values(), *state["model"].parameters()]]
    storages = [weakref.ref(tensor().untyped_storage()) for tensor in tensors]
    state.clear()
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
    assert [storage() for storage in storages] == [None] * len(storages)
    states.flatten(_training())


@pytest.fixture
def portable() -> Iterator[None]:
    """Without compiled functions."""
    best = choose(2)
    choose(-1)
    yield
    choose(best)


@pytest.mark.usefixtures("portable")
def test_without_compiled_functions_nothing_is_remembered() -> None:
    state = _training()
    states = KnownStates()
    assert not any(is_known(states, state) for _ in range(3))


@pytest.mark.parametrize(
    "change", ["data of a parameter", "set_", "moments are replaced", "offloaded and back", "resize_"]
)
def test_each_save_has_the_elements_of_its_time(tmp_path: Path, change: str) -> None:
    state = _training()
    del state["rng"]
    expected = []
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 6):
            for parameter in state["model"].parameters():
                parameter.grad = torch.full_like(parameter, float(step))
            if change != "moments are replaced" or step < 3:
                state["optimizer"].step()
            state["step"] = step
            if step == 3:
                _CHANGES[change](state)
            expected.append({path: leaf.local.clone() for path, leaf in flatten(state).tensors.items()})
            assert checkpointer.save(state, step)
        for step, tensors in enumerate(expected, 1):
            with ckpt.open(tmp_path, step) as saved:
                found = {keys: leaf for keys, rank, leaf in saved.leaves() if rank is None}
                for path, tensor in tensors.items():
                    if path[0] != "own":
                        assert torch.equal(found[path].torch(), tensor), (step, path)


class _Told:
    """An object that notes when it is asked."""

    def __init__(self, name: str, calls: list[str], *inner: Any) -> None:
        self._name, self._calls, self._inner = name, calls, inner

    def state_dict(self) -> State:
        self._calls.append(self._name)
        return {"w": torch.zeros(2), "n": 1, **{f"inner{number}": each for number, each in enumerate(self._inner)}}

    def load_state_dict(self, state_dict: State) -> None:
        raise NotImplementedError


class _OtherTold(_Told):
    pass


class _StatefulList(list[Any]):
    """Only a list for `flatten` if it holds tensors."""

    def __init__(self, told: _Told) -> None:
        super().__init__([1])
        self.state_dict, self.load_state_dict = told.state_dict, told.load_state_dict


def test_objects_are_asked_in_the_same_order_by_ranks_that_know_the_state_and_others() -> None:
    """If `state_dict` is a collective, ranks would else gather parts of different objects, or never end."""
    calls: list[str] = []

    def told(name: str, *inner: Any) -> _Told:
        return _Told(name, calls, *inner)

    def other(name: str, *inner: Any) -> _Told:
        return _OtherTold(name, calls, *inner)

    state: State = {
        "tensors": _tensors(),
        "nested": {"deeper": [torch.zeros(1), {"first": told("first")}]},
        "model": told("model", other("inner"), told("inner")),
        "own": ckpt.PerRank({"a": other("own")}),
        "optimizer": other("optimizer"),
        "namespace": Namespace(model=told("in namespace")),
        "deque": deque([told("in deque")]),
        "list": _StatefulList(told("list")),
        "module": torch.nn.Linear(2, 3),
        "average": told("average"),
    }
    states = KnownStates()
    for number in range(6):
        calls.clear()
        flatten(state)
        expected = list(calls)
        calls.clear()
        assert (type(states.flatten(state)) is not FlatState) == (number in (1, 2, 5))
        assert calls == expected
        if number == 2:  # the rank that knew the state looks at it, then
            state["nested"]["deeper"].insert(1, {"more": other("more")})
            state["average"] = other("average")
        if number == 3:
            state["another"] = {"x": {"y": told("y")}}
            state["last"] = told("last")


@pytest.mark.parametrize("where", [lambda each: each, ckpt.PerRank, lambda each: Namespace(each=each)])
def test_an_object_that_moves_tensors_when_it_is_asked(where: Callable[[Any], Any]) -> None:
    """The memory that they had before may be free, or that of others, when they are copied."""
    model = torch.nn.Sequential(*map(torch.nn.Linear, [2] * _COUNT, [3] * _COUNT))

    class Offloaded(_Application):
        moves = False

        def state_dict(self) -> State:
            for parameter in model.parameters() if self.moves else ():
                parameter.data = parameter.data.clone()
            return {"moves": 1}

    state = {"model": model, "object": where(offloaded := Offloaded())}
    states = known_states(state)
    offloaded.moves = True
    for _ in range(3):
        flat = states.flatten(state)
        paths = tuple(flat.tensors)
        known = flat.memory_of(paths)
        assert known is not None
        assert known[0].tolist() == [flat.tensors[path].local.data_ptr() for path in paths]


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda items: [*dict(items).values()]])
def test_an_object_that_replaces_tensors_beside_it_when_it_is_asked(make: Callable[[Any], Any]) -> None:
    """They are those of the save, and memory that is not used any more is not read."""

    class Replacing(_Application):
        beside: Any = None

        def state_dict(self) -> State:
            for key in list(self.beside) if isinstance(self.beside, dict) else range(len(self.beside or ())):
                if isinstance(self.beside[key], torch.Tensor):
                    self.beside[key] = torch.full_like(self.beside[key], 7.0)
            return {"n": 1}

    state = {"beside": make([("object", replacing := Replacing()), *_tensors().items()])}
    states = known_states(state)
    replacing.beside = state["beside"]
    for _ in range(3):
        flat = states.flatten(state)
        assert all((leaf.local == 7).all() for leaf in flat.tensors.values())
        assert seen(flat)


def test_memory_that_is_replaced_while_a_save_waits_for_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot may be free and have no memory yet: waiting for that is waiting, too."""
    model = torch.nn.Sequential(*map(torch.nn.Linear, [2] * _COUNT, [3] * _COUNT))
    state, waits, wait = {"model": model}, [], Stager._wait_for_slot

    def replace(*arguments: Any) -> None:
        waits.append([parameter.data for parameter in model.parameters()])  # so that it is not used again
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 5.0)
        wait(*arguments)

    monkeypatch.setattr(Stager, "_wait_for_slot", replace)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(state, step)
        before = checkpointer.save_request(state, 4)
        assert not waits
        request = checkpointer.save_request(state, 5)
        assert waits
        for each in (before, request):
            checkpointer.queue.schedule_async_request(each)
        checkpointer.maybe_finalize(blocking=True)
    saved = ckpt.load(tmp_path / "step_00000005")["model"]
    assert all((tensor == 5).all() for tensor in saved.values())


_REPLACED = """
import functools, torch
original, left_out = torch.nn.Module.state_dict, set()

@functools.wraps(original)
def state_dict(module, *arguments, **more):
    found = original(module, *arguments, **more)
    return {name: tensor for name, tensor in found.items() if name not in left_out}

torch.nn.Module.state_dict = state_dict
from ckpt.planning.known_state import KnownStates
states = KnownStates()
state = {"model": torch.nn.Sequential(*map(torch.nn.Linear, [2] * 70, [3] * 70))}
for _ in range(3):
    states.flatten(state)
left_out.add("5.weight")
assert ("model", "5.weight") not in states.flatten(state).tensors
"""


def test_a_state_dict_of_all_modules_that_was_replaced_before_the_import() -> None:
    subprocess.run([sys.executable, "-c", _REPLACED], check=True)


def test_hooks_in_a_table_that_says_that_it_is_empty_run() -> None:
    class Hooks(OrderedDict[int, Callable[..., None]]):
        def __len__(self) -> int:
            return 0

    more: State = {}
    model = torch.nn.Sequential(*map(torch.nn.Linear, [2] * _COUNT, [3] * _COUNT))
    model[5]._state_dict_hooks = Hooks({1: lambda module, state_dict, *_: state_dict.update(more)})
    states = known_states({"model": model})
    more["more"] = torch.ones(3)
    assert not is_known(states, {"model": model})


def test_a_class_that_replaces_tensors_while_a_module_is_read() -> None:
    """Code of a program that runs then may free what was found before."""

    class Skipped(set[str]):
        def __contains__(self, name: object) -> bool:
            table = model[5]._buffers
            table[str(name)] = torch.full_like(table[str(name)], 7.0)
            return False

    model = torch.nn.Sequential(*map(torch.nn.Linear, [2] * _COUNT, [3] * _COUNT))
    model[5].register_buffer("statistics", torch.zeros(1000))
    model[5]._non_persistent_buffers_set = Skipped()
    states = KnownStates()
    for expected in (0, 7, 7):
        flat = states.flatten({"model": model})
        assert (flat.tensors["model", "5.statistics"].local == expected).all()
