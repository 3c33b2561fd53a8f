"""A restore changes all of a state or nothing, even if an object of the state refuses to load."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointError,
    PerRank,
    StateError,
    StateMismatchError,
)
from ckpt.loading import restore
from tests.support import run_ranks
from tests.support.saves import save_here


class _Untouched:
    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("as one whose state begins here, such as an optimizer in wrappers of many kinds")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def test_nothing_of_the_state_is_called_when_there_is_no_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"optimizer": _Untouched()}) is None
    assert list(tmp_path.iterdir()) == []


class _Loader:
    """An object that refuses some positions after loading half of its state; with `tensors`, in place or as a copy."""

    def __init__(self, position: int, limit: int = 1000) -> None:
        self.position = position
        self.limit = limit
        self.order = torch.full((6,), float(position))
        self.copy = torch.full((3,), float(position))
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "copy": self.copy.clone(), "inner": {"position": self.position}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads += 1
        self.position = state_dict.pop("inner")["position"]  # it may modify its argument
        self.copy = state_dict.pop("copy").clone()
        if self.position > self.limit:
            raise ValueError(f"position {self.position} is beyond {self.limit}")
        assert state_dict["order"] is self.order
        assert self.order.eq(self.position).all(), "the tensors that it is given belong to the position"

    def content(self) -> str:
        return f"{self.position} {self.order.tolist()} {self.copy.tolist()}"


class _Extra(nn.Linear):
    """A module with extra state that is not a tensor and may not fit."""

    def __init__(self, version: int) -> None:
        super().__init__(3, 2)
        self.version = version

    def get_extra_state(self) -> int:
        return self.version

    def set_extra_state(self, state: int) -> None:
        if state > 5:
            raise RuntimeError("a version of the future")
        self.version = state


def _trained(seed: int, steps: int, count: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, bias=False))
    optimizer = torch.optim.AdamW(list(model.parameters())[:count])
    for _ in range(steps):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    return model, optimizer


def _state(value: int, limit: int = 1000) -> dict[str, Any]:
    model, optimizer = _trained(value, 2)
    return {
        "first": _Loader(value),
        "model": model,
        "optimizer": optimizer,
        "numbers": {"n": value, "list": [value], "array": np.full(3, value)[::-1]},
        "loader": _Loader(value, limit),
        "last": _Loader(value),
    }


def _content(state: dict[str, Any]) -> str:
    parts = [item.content() if isinstance(item, _Loader) else item for item in state.values()]
    return "\n".join(str(part.state_dict()) if hasattr(part, "state_dict") else str(part) for part in parts)


def test_an_object_that_refuses_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, _state(7), 1)
        state = _state(3, limit=5)
        before = _content(state)
        with pytest.raises(
            StateError, match=r"loader: _Loader.load_state_dict failed: .*position 7 is beyond"
        ) as caught:
            checkpointer.restore(state)
        assert _content(state) == before
        assert "the state is as it was before" in caught.value.__notes__[0]
        state["loader"].limit = 7
        assert checkpointer.restore(state) == 1
    assert _content(state) == _content(_state(7))


def test_a_module_with_code_of_its_own_is_asked_before_it_is_overwritten(tmp_path: Path) -> None:
    def build(value: int) -> dict[str, Any]:
        torch.manual_seed(value)
        return {"plain": nn.Linear(9, 9), "model": nn.Sequential(_Extra(value), nn.Linear(2, 2)), "n": value}

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(7), 1)
        save_here(checkpointer, build(4), 2)
        state = build(3)
        with pytest.raises(StateError, match=r"model: Sequential.load_state_dict failed: .*a version of the future"):
            checkpointer.restore(state, 1)
        assert _content(state) == _content(build(3))
        checkpointer.restore(state, 2)
    assert _content(state) == _content(build(4))


def test_large_tensors_of_an_object_are_not_copied_to_ask_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried with the values of the checkpoint and its own tensors."""
    import ckpt.loading.state_update

    class Large(_Loader):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = [*getattr(self, "seen", []), float(state_dict["order"][0])]
            self.position = state_dict["inner"]["position"]
            if self.position > self.limit:
                raise ValueError("too far")

    monkeypatch.setattr(ckpt.loading.state_update, "_KEPT_BYTES", 10)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"object": Large(7)}, 1)
        state = {"object": Large(3, limit=5)}
        with pytest.raises(StateError, match=r"object: Large\.load_state_dict failed"):
            checkpointer.restore(state)
        assert (state["object"].position, state["object"].seen) == (3, [3, 3])
        assert state["object"].order.eq(3).all()
        state["object"].limit = 7
        checkpointer.restore(state)
        assert (state["object"].position, state["object"].seen) == (7, [3, 3, 3, 7])


def test_a_step_that_turns_out_to_be_damaged_leaves_numbers_and_objects(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"big": torch.ones(4000), "loader": _Loader(7), "n": 7}, 1)
    damaged = tmp_path / "step_00000001" / "packs/000/rank_00000_000"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    state = {"big": torch.zeros(4000), "loader": _Loader(3), "n": 3}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointCorruptError, match="tensor big") as caught:
            checkpointer.restore(state, 1)
        assert (state["loader"].content(), state["n"]) == (_Loader(3).content(), 3)
        assert "tensors of the state may be partly overwritten" in caught.value.__notes__[0]


def _one_refuses(rank: int, world_size: int, root: Path) -> str:
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"t": torch.ones(50), "own": PerRank(_Loader(7))}, 1)
        state = {"t": torch.zeros(50), "own": PerRank(_Loader(3, limit=5 if rank else 9))}
        with pytest.raises(StateError) as caught:
            checkpointer.restore(state)
        assert not state["t"].any()
        assert state["own"].value.content() == _Loader(3).content()
        return str(caught.value)


def test_an_object_that_refuses_on_one_rank_stops_all(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks(_one_refuses, 2, tmp_path))
    assert first.startswith("rank 1 could not load step 1: StateError: own: _Loader.load_state_dict failed")
    assert second.startswith("own: _Loader.load_state_dict failed")


def _rank_0_cannot_look(rank: int, world_size: int, root: Path) -> tuple[str, str]:
    def breaks(*args: Any, **options: Any) -> Any:
        raise ValueError("a driver of the storage has a bug")

    with Checkpointer(root, timeout=10) as checkpointer:
        save_here(checkpointer, {"t": torch.ones(50)}, 1)
        state = {"t": torch.zeros(50)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restore, "published_candidates", breaks)
            with pytest.raises(CheckpointError if rank else ValueError) as caught:
                checkpointer.restore(state)
        assert checkpointer.restore(state) == 1
        return str(caught.value), str(caught.value.__cause__)


def test_an_unknown_error_of_the_rank_that_looks_for_steps_stops_all(tmp_path: Path) -> None:
    """At once, with its traceback: the others do not wait for the timeout."""
    first, second = (result.value for result in run_ranks(_rank_0_cannot_look, 2, tmp_path))
    assert first[0] == "a driver of the storage has a bug"
    assert second[0] == "rank 0 could not look for steps: ValueError: a driver of the storage has a bug"
    assert "in breaks" in second[1]


class _OnlyOnce(_Loader):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.loads > 1:
            raise ValueError("once was enough")


def test_an_object_that_refuses_in_the_end_is_told_apart_from_what_is_restored(tmp_path: Path) -> None:
    def build(value: int) -> dict[str, Any]:
        return {"t": torch.full((5,), value), "a": _Loader(value), "b": _OnlyOnce(value), "c": _Loader(value)}

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(7), 1)
        state = build(3)
        with pytest.raises(
            StateError, match=r"(?s)b: _OnlyOnce.*All tensors, values and the objects before it.*loaded: c"
        ):
            checkpointer.restore(state)
    assert state["t"].eq(7).all()


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("tensor_rate", [True, False])
def test_an_optimizer_of_other_parameters_is_refused_before_anything_is_restored(
    tmp_path: Path, stepped: bool, tensor_rate: bool
) -> None:
    """A layer that was frozen is trained now."""

    def build(seed: int, count: int, steps: int) -> dict[str, Any]:
        model, optimizer = _trained(seed, steps, count)
        if tensor_rate:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * seed)
        return {"model": model, "optimizer": optimizer}

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(1, 2, 2), 1)
        state = build(2, 3, 2 if stepped else 0)
        before = _content(state)
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore(state)
        assert "\n  parameter groups: optimizer has 1 parameter group with 2 parameter(s) in the checkpoint, " in str(
            caught.value
        )
        assert "1 parameter group with 3 parameter(s) in the state; make it of the same parameters" in str(caught.value)
        assert str(caught.value).startswith("1 name(s)"), "what follows from it is not listed"
        with pytest.raises(StateMismatchError, match="Nothing of optimizer fits: nothing was restored"):
            checkpointer.restore(state, strict=False)
        assert _content(state) == before
        checkpointer.restore(state, only=["model"])
    assert str(state["model"].state_dict()) == str(build(1, 2, 2)["model"].state_dict())
    assert before.endswith(str(state["optimizer"].state_dict())), "all of the optimizer is left out"


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    with Checkpointer(tmp_path) as checkpointer:
        save_here(
            checkpointer, {"optimizer": torch.optim.SGD([{"params": parameters[:3]}, {"params": parameters[3:]}])}, 1
        )
        with pytest.raises(StateMismatchError, match=r"2 parameter groups with 3, 1 .* 1 parameter group with 4 "):
            checkpointer.restore({"optimizer": torch.optim.SGD(parameters)})
        with pytest.raises(StateMismatchError, match=r"2 parameter groups with 3, 1 .* 2 parameter groups with 2, 2 "):
            checkpointer.restore(
                {"optimizer": torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}])}
            )


def _with_vocabulary(size: int, optimizer: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(size)
    model = nn.Sequential(nn.Embedding(size, 8), nn.Linear(8, 3))
    kinds: dict[str, Any] = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
        "adagrad": torch.optim.Adagrad,
        "lbfgs": torch.optim.LBFGS,
    }
    made = kinds[optimizer](model.parameters())
    for _ in range(steps):
        _step(model, made)
    return model, made


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.arange(5)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor", "adagrad"])
def test_the_state_of_a_parameter_that_does_not_fit_is_left_out_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, stepped: bool
) -> None:
    source, optimizer = _with_vocabulary(20, kind, 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": source, "optimizer": optimizer}, 1)
        model, other = _with_vocabulary(24, kind, 1 if stepped else 0)
        state = {"model": model, "optimizer": other}
        before, first = _content(state), next(iter(model.parameters()))
        own = str(other.state.get(first))
        with pytest.raises(StateMismatchError, match=r"shape: optimizer/state/0/.* is \["):
            checkpointer.restore(state)
        assert _content(state) == before
        checkpointer.restore(state, strict=False)
    assert "optimizer/state/0" in caplog.text
    assert str(other.state.get(first)) == own, "none of it is restored"
    for number, parameter in enumerate(model.parameters()):
        if number:
            assert str(other.state[parameter]) == str(optimizer.state[list(source.parameters())[number]])
    _step(model, other)


@pytest.mark.parametrize("options", [{"strict": False}, {"resize": True}], ids=str)
def test_state_of_all_parameters_in_one_tensor_does_not_fit_other_shapes(tmp_path: Path, options: Any) -> None:
    """LBFGS concatenates the gradients: cut to another length, they would be those of other parameters."""
    source, optimizer = _with_vocabulary(20, "lbfgs", 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": source, "optimizer": optimizer}, 1)
        model, other = _with_vocabulary(24, "lbfgs", 1)
        state = {"model": model, "optimizer": other}
        before = _content(state)
        with pytest.raises(StateMismatchError, match=r"(?s)shape: optimizer/state/0/.*\nshape: .* make the state in"):
            checkpointer.restore(state, **options)
        assert _content(state) == before


# -- containers --------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    weight: torch.Tensor
    steps: int


def test_values_beside_tensors_come_back_in_every_container(tmp_path: Path) -> None:
    def build(value: int) -> dict[str, Any]:
        def tensor() -> torch.Tensor:
            return torch.full((3,), value)

        return {
            "tuple": (tensor(), value, [value, tensor()]),
            "nested": ((value, (tensor(), value)),),
            "pair": _Pair(tensor(), value),
            "list": [_Pair(tensor(), value), value],
            "deque": deque([tensor(), value], maxlen=2),
            "args": Namespace(lr=value, weight=tensor(), inner=Namespace(n=value)),
            "plain": Namespace(lr=value, tags={"a", value}),
            "own": PerRank((value, tensor())),
            "numpy": ("MT19937", np.full(4, value), value),
            "object": _Tuples((value, tensor())),
            "number": _Tuples(value),
        }

    state = build(3)
    tensors = [state["tuple"][0], state["pair"].weight, state["deque"][0], state["args"].weight]
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(7), 1)
        checkpointer.restore(state)
    assert str(state) == str(build(7))
    assert type(state["pair"]) is _Pair
    now = [state["tuple"][0], state["pair"].weight, state["deque"][0], state["args"].weight]
    assert all(one is other for one, other in zip(tensors, now, strict=True)), "tensors are filled in place"


class _Tuples:
    """An object whose state dict is not a dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict

    def __repr__(self) -> str:
        return f"_Tuples({self.state})"


class _Odd(tuple):  # a tuple that cannot be made from its items
    __slots__ = ()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda value, tensor: (tensor, value), "1"),
        (lambda value, tensor: {"a": MappingProxyType({"x": value, "t": tensor})}, "a/x"),
        (lambda value, tensor: {"a": _Odd((value, tensor))}, "a/0"),
    ],
)
def test_a_value_that_cannot_be_replaced_is_refused_before_anything_is_restored(
    tmp_path: Path, build: Any, name: str
) -> None:
    tensor = torch.zeros(3)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(7, torch.ones(3)), 1)
        with pytest.raises(StateMismatchError, match=f"read-only: {name} is in a container"):
            checkpointer.restore(build(3, tensor))
        assert not tensor.any()
        checkpointer.restore(build(7, tensor))  # nothing is to be replaced
        assert tensor.all()


def test_a_container_that_takes_no_other_value_leaves_everything_as_it_was(tmp_path: Path) -> None:
    class Frozen(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise KeyError("closed")

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"t": torch.ones(3), "n": 7, "d": {"x": 7}}, 1)
        state = {"t": torch.zeros(3), "n": 3, "d": Frozen(x=3)}
        with pytest.raises(StateError, match="d/x: the container does not accept 7: KeyError"):
            checkpointer.restore(state)
    assert (state["n"], state["d"]) == (3, {"x": 3})
    assert not state["t"].any()


def test_containers_keep_their_type_and_place(tmp_path: Path) -> None:
    state = {"empty": OrderedDict(), "list": [1, 2], "flag": True}
    empty, numbers = state["empty"], state["list"]
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"empty": {}, "list": [1, 2], "flag": 1}, 1)
        checkpointer.restore(state)
    assert state["empty"] is empty
    assert state["list"] is numbers
    assert type(state["flag"]) is int


def _cycle() -> dict[str, Any]:
    state: dict[str, Any] = {"a": {"b": [torch.ones(2)]}}
    state["a"]["b"].append(state["a"])
    return state


class _Broken(_Loader):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


_Held = namedtuple("_Held", "weights")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (_cycle(), r"a/b/1/b/.*: the state is nested deeper than 100, or contains itself"),
        ({"a": [_Broken(1)]}, r"a/0: _Broken.state_dict failed: .*not now"),
        ({"a": {"b": {torch.ones(2)}}}, r"a/b/\(in a set\): a torch.Tensor cannot be stored"),
        ({"a": [_Held({torch.ones(2)})]}, r"a/0/weights/0/\(in a set\): a torch.Tensor cannot be stored|a/0/0/"),
        ({"a": [Namespace(b=torch.ones(2), c=print)]}, r"a/0/c: a builtins.builtin_function_or_method cannot"),
        ({"a": Namespace(b=[1, print])}, r"a/b/1: a builtins.builtin_function_or_method cannot be stored"),
        (5, "a state that is a single int cannot be restored in place; put it into a dict"),
        (torch.ones(3), "a state that is a single Tensor cannot be restored in place; put it into a dict"),
    ],
    ids=["cycle", "state_dict", "set", "tuple", "namespace", "namespace of values", "number", "tensor"],
)
def test_a_state_that_cannot_be_stored_is_refused_by_name(tmp_path: Path, state: Any, says: str) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match=says):
        checkpointer.save_request(state, 1)
