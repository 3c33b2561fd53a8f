"""Plain containers of a state get the items that the step has; what must have the same names is still compared."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import Checkpointer, PerRank, StateError, StateMismatchError
from tests.support import run_ranks
from tests.support.saves import save_here


def _forms() -> dict[str, Any]:
    """Return items of a dict in every form that plain containers have."""
    return {
        "nothing": None,
        "number": 3,
        "tensor": torch.arange(4.0),
        "array": np.arange(3),
        "empty dict": {},
        "dict": {"loss": torch.ones(3), "step": 7, "inner": {"x": torch.zeros(2, 2)}},
        "values": {"loss": 0.5, "step": 7},
        "empty list": [],
        "list": [torch.ones(2), torch.zeros(3)],
        "long list": [torch.ones(2), torch.zeros(3), {"a": torch.ones(1)}, 4],
        "list of values": [1, 2, 3],
        "deque": deque([torch.ones(2)], maxlen=5),
        "tuple": (torch.ones(2), 5),
        "empty tuple": (),
    }


def _text(item: Any) -> str:
    """Return a text that does not tell the order of dicts, nor a list from a deque: a container keeps its class."""
    if isinstance(item, dict):
        return str({key: _text(item[key]) for key in sorted(item)})
    return str(list(map(_text, item))) if isinstance(item, list | deque) else str(item)


@pytest.mark.parametrize("stored", [name for name in _forms() if name != "array"])
def test_what_is_in_a_dict_or_a_list_becomes_what_the_step_has(tmp_path: Path, stored: str) -> None:
    """All pairs of forms: in a dict, in a list, of a rank, and in the state dict of an object."""

    def build(form: str) -> dict[str, Any]:
        return {
            "log": {"x": _forms()[form]},
            "all": [0, torch.zeros(1), _forms()[form]],
            "own": PerRank({"x": _forms()[form], "n": 1}),
            "object": _Holder(_forms()[form]),
        }

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(stored), 1)
        for own in _forms():
            if "array" not in own:
                state, expected = build(own), build(stored)
                assert checkpointer.restore(state) == 1, own
                assert _text(state["log"]) == _text(expected["log"]), own
                assert _text(state["all"]) == _text(expected["all"]), own
                assert _text(state["own"].value) == _text(expected["own"].value), own
                assert _text(state["object"].item) == _text(expected["object"].item), own


class _Holder:
    """An object with a container in its state."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def state_dict(self) -> dict[str, Any]:
        return {"kept": {"item": self.item}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.item = state_dict["kept"]["item"]


def test_the_containers_of_the_user_stay_the_same_objects(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"log": {"loss": [torch.ones(2), torch.ones(3)], "n": 2}, "last": torch.ones(2)}, 1)
        losses: list[Any] = [torch.zeros(2)]
        log: dict[str, Any] = {"gone": torch.zeros(4), "loss": losses}
        first = losses[0]
        state: dict[str, Any] = {"log": log, "last": None}
        assert checkpointer.restore(state) == 1
        assert state["log"] is log
        assert log["loss"] is losses
        assert losses[0] is first
        assert str(log) == str({"loss": [torch.ones(2), torch.ones(3)], "n": 2})
        assert torch.equal(state["last"], torch.ones(2))
        report = checkpointer.last_restore
    assert report is not None
    assert report.added == ("last", "log/loss/1", "log/n")
    assert report.removed == ("log/gone",)


def test_what_is_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING, "ckpt"):
        save_here(checkpointer, {"log": {"a": 1}}, 1)
        checkpointer.restore({"log": {"a": 2, "b": torch.ones(3)}})
    assert "removed from the state:\n  log/b" in caplog.text


def test_the_structure_of_the_state_can_be_insisted_on(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"log": {"a": torch.ones(2), "b": 3}, "list": [torch.ones(1), torch.ones(1)]}, 1)
        state: dict[str, Any] = {"log": {}, "list": [torch.zeros(1)]}
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore(state, structure="state")
        assert "form: log is a dict of 2 item(s) in the checkpoint, an empty dict in the state" in str(caught.value)
        assert "unexpected: list/1" in str(caught.value)
        assert str(state) == str({"log": {}, "list": [torch.zeros(1)]})
        with pytest.raises(ValueError, match="structure is"):
            checkpointer.restore(state, structure="mine")  # type: ignore[arg-type]


class _Failing:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["n"] > 1:
            raise ValueError("too many")


def test_containers_are_as_before_if_the_restore_fails(tmp_path: Path) -> None:
    failing = _Failing()
    failing.state_dict = lambda: {"n": 2}  # type: ignore[method-assign]
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"log": {"a": [torch.ones(2)]}, "list": [torch.ones(3)], "object": failing}, 1)
        log: dict[str, Any] = {"b": torch.zeros(1), "a": [1, 2]}
        state = {"log": log, "list": [], "object": _Failing()}
        with pytest.raises(StateError, match="too many"):
            checkpointer.restore(state)
    assert str(state["log"]) == str({"b": torch.zeros(1), "a": [1, 2]})
    assert state["log"] is log
    assert state["list"] == []


# -- what must have the same names -------------------------------------------------------------------------------------


def _dicts_of_modules() -> dict[str, tuple[Any, Any]]:
    """Return pairs of states that differ in a parameter, each with one more than the other."""
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    return {
        "module": ({"m": small}, {"m": large}),
        "module in a dict": ({"all": {"m": small}}, {"all": {"m": large}}),
        "module in a list": ({"all": [small]}, {"all": [large]}),
        "one module more": ({"all": {"m": small}}, {"all": {"m": small, "n": one}}),
        "one module more in a list": ({"all": [small]}, {"all": [small, one]}),
        "state dict": ({"m": small.state_dict()}, {"m": large.state_dict()}),
        "state dict as a dict": ({"m": dict(small.state_dict())}, {"m": dict(large.state_dict())}),
        "state dict without dots": ({"m": one.state_dict()}, {"m": two.state_dict()}),
        "parameters by name": ({"m": dict(one.named_parameters())}, {"m": dict(two.named_parameters())}),
        "list of parameters": ({"m": list(one.parameters())}, {"m": list(two.parameters())}),
        "topmost names": ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(3)}),
        "ordered dict": ({"a": OrderedDict(x=torch.ones(2))}, {"a": OrderedDict(x=torch.ones(2), y=torch.ones(2))}),
        "of a rank": ({"a": {"x": torch.ones(1)}}, {"a": {"x": torch.ones(1), "y": PerRank(torch.ones(2))}}),
    }


@pytest.mark.parametrize("case", _dicts_of_modules())
@pytest.mark.parametrize("grows", [False, True])
def test_parameters_and_objects_must_be_those_of_the_step(tmp_path: Path, case: str, grows: bool) -> None:
    small, large = _dicts_of_modules()[case]
    saved, state = (large, small) if grows else (small, large)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"other": torch.ones(1), **saved}, 1)
        other = torch.zeros(1)
        with pytest.raises(StateMismatchError, match="unexpected: " if grows else "missing: "):
            checkpointer.restore({"other": other, **state})
    assert not other.any()


def test_with_strict_false_nothing_is_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": {"body": torch.ones(2), "log": {"n": 3}}, "list": [torch.ones(1)]}, 1)
        state: dict[str, Any] = {
            "m": {"body": torch.zeros(2), "head": torch.zeros(3), "log": {}},
            "list": [torch.zeros(1), torch.zeros(1)],
        }
        checkpointer.restore(state, strict=False)
        assert torch.equal(state["m"]["body"], torch.ones(2))
        assert torch.equal(state["m"]["head"], torch.zeros(3))
        assert state["m"]["log"] == {"n": 3}
        assert str(state["list"]) == str([torch.ones(1), torch.zeros(1)])
        report = checkpointer.last_restore
    assert report is not None
    assert report.missing == ("list/1", "m/head")


def test_a_form_that_does_not_fit_is_told_in_words(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(
            checkpointer, {"a": torch.ones(3), "b": 3, "c": {"x": torch.ones(1)}, "d": PerRank(3), "e": 5, "f": 6}, 1
        )
        state = {
            "a": 1,
            "b": torch.zeros(2),
            "c": 4,
            "d": 3,
            "e": PerRank(torch.zeros(1)),
            "f": {"x": torch.zeros(1)},
        }
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore(state)
    for line in (
        "form: a is a tensor, float32[3] in the checkpoint, the value 1 in the state",
        "form: b is the value 3 in the checkpoint, a tensor, float32[2] in the state",
        "form: c is a dict of 1 item(s) in the checkpoint, the value 4 in the state",
        "form: d is the value 3 of this rank in the checkpoint, the value 3 of all ranks in the state",
        "form: e is the value 5 of all ranks in the checkpoint, a tensor, float32[1] of this rank in the state",
        "form: f is the value 6 in the checkpoint, a container of f/x in the state",
    ):
        assert f"\n  {line}\n" in str(caught.value)


# -- objects of libraries ----------------------------------------------------------------------------------------------


def test_a_gradient_scaler_that_is_switched_off_or_on(tmp_path: Path) -> None:
    def scaler(enabled: bool, scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"n": 1, "scaler": scaler(True, 64.0)}, 1)
        save_here(checkpointer, {"n": 2, "scaler": scaler(False, 8.0)}, 2)
        off, on = scaler(False, 8.0), scaler(True, 8.0)
        assert checkpointer.restore({"n": 0, "scaler": off}, 1) == 1
        assert checkpointer.restore({"n": 0, "scaler": off}, 2) == 2
        state = {"n": 0, "scaler": on}
        with pytest.raises(StateMismatchError, match="scaler is an empty dict in the checkpoint") as caught:
            checkpointer.restore(state, 2)
        assert "disabled instance of GradScaler" in str(caught.value)
        assert (state["n"], on.get_scale()) == (0, 8.0)
        assert checkpointer.restore(state, 2, strict=False) == 2
        assert (state["n"], on.get_scale()) == (2, 8.0)
        assert checkpointer.restore(state, 1) == 1
        assert (state["n"], on.get_scale()) == (1, 64.0)


def test_an_object_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A scheduler takes whatever it is given, so its names are compared."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"s": torch.optim.lr_scheduler.StepLR(optimizer, 3)}, 1)
        with pytest.raises(StateMismatchError, match=r"missing: s/T_max"):
            checkpointer.restore({"s": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)})


def test_metrics_with_lists(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def metric(batches: int) -> Any:
        result = torchmetrics.CatMetric()
        result.persistent(True)
        for number in range(batches):
            result.update(torch.full((number + 1,), float(number)))
        return result

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"metric": metric(3)}, 1)
        for batches in (0, 1, 5):
            target = metric(batches)
            checkpointer.restore({"metric": target})
            assert str(target.value) == str(metric(3).value)


def _lists_of_ranks(rank: int, world_size: int, root: Path) -> None:
    def build(count: int) -> dict[str, Any]:
        return {
            "all": [torch.full((2,), 7.0)] * count,
            "own": PerRank([torch.full((2,), float(rank))] * (count + rank)),
        }

    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, build(3), 1)
        for count in (0, 1, 5):
            state = build(count)
            assert checkpointer.restore(state) == 1
            assert str([state["all"], state["own"].value]) == str([build(3)["all"], build(3)["own"].value])


def test_lists_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(_lists_of_ranks, 2, tmp_path)
