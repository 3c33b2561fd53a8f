"""Objects whose loading code raises or is their own: nothing is half overwritten, and they load what the step has."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt.loading.state_update
from ckpt import (
    Checkpointer,
    CheckpointError,
    StateError,
    StateMismatchError,
    register_tensor_subclass,
)
from tests.support.saves import save_here

# -- what cannot be stored, or cannot be loaded ------------------------------------------------------------------------


def _freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


_ODD: dict[str, Callable[[], Any]] = {
    "parameter without a shape": nn.UninitializedParameter,
    "buffer without a shape": nn.UninitializedBuffer,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(4, 4).to_mkldnn(),
    "freed": _freed,
    "csr": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", _ODD)
@pytest.mark.parametrize("count", [1, 9], ids=["alone", "among many"])
def test_a_tensor_of_an_unusual_kind_is_refused_by_its_name(tmp_path: Path, kind: str, count: int) -> None:
    odd = _ODD[kind]()
    state = {"other": torch.zeros(2), "m": {f"t{number}": odd for number in range(count)}}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(StateError, match=r"^m/t0: "):
            save_here(checkpointer, state, 1)
        save_here(
            checkpointer, {"other": torch.ones(2), "m": {f"t{number}": torch.ones(3) for number in range(count)}}, 2
        )
        with pytest.raises(StateError, match=r"^m/t0: "):
            checkpointer.restore(state)
    assert not state["other"].any()


def test_a_lazy_module_says_how_to_initialize_it(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    trained, fresh = build(), build()
    trained(torch.ones(2, 4))
    other = torch.zeros(2)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"other": torch.ones(2), "m": trained}, 1)
        for call in (
            lambda: save_here(checkpointer, {"m": fresh}, 2),
            lambda: checkpointer.restore({"other": other, "m": fresh}),
        ):
            with pytest.raises(StateError, match=r"m/0\.weight: .* lazy module .* call the module with a batch"):
                call()
        assert not other.any()
        fresh(torch.zeros(2, 4))
        assert checkpointer.restore({"other": other, "m": fresh}) == 1
    assert torch.equal(fresh[0].weight, trained[0].weight)


def test_an_optimizer_of_a_lazy_module(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"o": optimizer}, 1)
        with pytest.raises(StateError, match=r"o/state/0: .* lazy module"):
            checkpointer.restore({"o": torch.optim.Adam(nn.LazyLinear(3).parameters())})


class _Partial(nn.Linear):
    """A module whose state dict lacks what its `load_state_dict` needs."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        result = super().state_dict(*args, **options)
        del result["bias"]
        return result


class _OnlyGets(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


class _NotCopied(torch.Tensor):
    """A tensor subclass that can be stored, but not be copied to."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> _NotCopied:
        made: _NotCopied = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        return made

    def __init__(self, wrapped: torch.Tensor) -> None:
        self.wrapped = wrapped

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> _NotCopied:
        return _NotCopied(parts["wrapped"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return _NotCopied(args[0].wrapped)
        raise NotImplementedError(str(function))


def _fixed(fill: float) -> nn.Module:
    register_tensor_subclass(_NotCopied, {"wrapped": "shape"})
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(_NotCopied(torch.full((2, 2), fill)), requires_grad=False)
    return module


def _hooked(fill: float) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(
        lambda module, found, prefix, _: found.update({prefix + "more": torch.ones(1)})
    )
    return module


def _patched(fill: float) -> nn.Module:
    module = nn.Linear(2, 2)

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("not today")

    module._load_from_state_dict = refuse
    return module


def _of_inference(fill: float) -> nn.Module:
    module = nn.BatchNorm1d(2)
    with torch.inference_mode():
        module.running_mean = torch.full((2,), fill)
    return module


def _hooked_optimizer(fill: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.full((2,), fill)], fill)

    def change(optimizer: Any, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "param_groups": found["param_groups"] * 2}

    optimizer.register_state_dict_post_hook(change)
    return optimizer


_REFUSING: dict[str, tuple[Callable[[float], Any], str]] = {
    "state_dict lacks a name": (lambda fill: _Partial(2, 2), r'm: _Partial.*Missing key\(s\).*"bias"'),
    "extra state without a setter": (lambda fill: _OnlyGets(2, 2), "m: _OnlyGets.*_extra_state"),
    "a tensor subclass": (_fixed, "m: Linear.*weight"),
    "a hook adds a name": (_hooked, "m: Linear.*more"),
    "a method of the instance": (_patched, "m: Linear.*not today"),
    "inference tensors": (_of_inference, r"m/running_mean: .*inference_mode\(\)"),
    "hook of an optimizer": (_hooked_optimizer, "m: SGD.*parameter groups"),
}


def _bits(state: Any) -> str:
    return str({key: getattr(item, "wrapped", item) for key, item in state.state_dict().items()})


@pytest.mark.parametrize("case", _REFUSING)
@pytest.mark.parametrize("strict", [True, False])
def test_an_object_that_refuses_is_found_before_anything_is_overwritten(
    tmp_path: Path, case: str, strict: bool
) -> None:
    build, message = _REFUSING[case]
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"first": nn.Linear(3, 3), "m": build(1.0), "n": 1}, 1)
        state = {"first": nn.Linear(3, 3), "m": build(2.0), "n": 2}
        before = _bits(state["first"]), _bits(state["m"]), state["n"]
        with pytest.raises(CheckpointError, match=f"(?s){message}"):
            checkpointer.restore(state, strict=strict)
        assert (_bits(state["first"]), _bits(state["m"]), state["n"]) == before


def test_parameters_that_are_exchanged_when_they_are_loaded(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": module}, 1)
        module = nn.Linear(2, 2)
        before = _bits(module)
        reference = weakref.ref(module.weight)  # tensors with weak references cannot be exchanged
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(StateError, match="m: Linear"):
                checkpointer.restore({"m": module})
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert _bits(module) == before
    assert reference() is module.weight


@pytest.mark.parametrize("cast", [False, True])
def test_inference_tensors_outside_of_modules_are_filled(tmp_path: Path, cast: bool) -> None:
    with torch.inference_mode():
        average = torch.zeros(3, dtype=torch.float64 if cast else torch.float32)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"average": torch.ones(3), "m": _of_inference(3.0)}, 1)
        module = _of_inference(2.0)
        checkpointer.restore({"average": average}, only="average", cast=cast)
        with torch.inference_mode():
            checkpointer.restore({"average": average, "m": module}, cast=cast)
    assert average.eq(1).all()
    assert module.running_mean.eq(3).all()


# -- what has loading code of its own ----------------------------------------------------------------------------------


class _Observer(nn.Module):
    """Registers its buffers by its own code, like the observers of torch.ao: in the shape that the step has."""

    def __init__(self, size: int = 0, fill: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((size,), fill))
        self.register_buffer("high", torch.full((size,), fill))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("low", "high"):
            stored = state_dict.get(f"{prefix}{name}")
            if stored is not None:
                getattr(self, name).resize_(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Scaled(nn.Linear):
    """Has extra state of any form, like the modules of Transformer Engine."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, dict) and "too new" in state:
            raise RuntimeError("extra state of a newer version")
        self.extra = state


class _Renamed(nn.Module):
    """Reads steps of an older version, in which a parameter had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ParameterDict({"new": nn.Parameter(torch.zeros(3))})
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}inside.old" in state_dict:
            state_dict[f"{prefix}inside.new"] = state_dict.pop(f"{prefix}inside.old")


class _OldNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ParameterDict({"old": nn.Parameter(torch.ones(3))})


def _restored(root: Path, saved: Any, target: Any, **options: Any) -> Checkpointer:
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, saved, 1)
        assert checkpointer.restore(target, **options) == 1
    return checkpointer


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("sizes", [(4, 0), (0, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("options", [{}, {"resize": True}, {"strict": False}], ids=str)
def test_a_module_that_resizes_its_buffers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
    options: Any,
    large: bool,
) -> None:
    if large:  # tensors that the state has are not read for the trial then
        monkeypatch.setattr(ckpt.loading.state_update, "_KEPT_BYTES", 1)
    saved = {"m": nn.Sequential(nn.Linear(2, 2), _Observer(sizes[0], 5.0))}
    target = {"m": nn.Sequential(nn.Linear(2, 2), _Observer(sizes[1], 1.0))}
    _restored(tmp_path, saved, target, **options)
    assert str(target["m"].state_dict()) == str(saved["m"].state_dict())


_EXTRA: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bytes": lambda: torch.arange(7, dtype=torch.uint8),
    "more bytes": lambda: torch.arange(9, dtype=torch.uint8),
    "floats": lambda: torch.arange(7.0),
    "dict": lambda: {"scale": torch.ones(3), "step": 7},
    "other dict": lambda: {"scale": torch.ones(4), "history": [torch.zeros(2), torch.ones(2)]},
    "values": lambda: {"step": 3},
    "list": lambda: [torch.ones(2), 3],
    "nothing": dict,
    "number": lambda: 7,
}


@pytest.mark.parametrize("stored", _EXTRA)
def test_extra_state_changes_its_form(tmp_path: Path, stored: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": nn.Sequential(_Scaled(_EXTRA[stored]()))}, 1)
        for own in _EXTRA:
            target = nn.Sequential(_Scaled(_EXTRA[own]()))
            assert checkpointer.restore({"m": target}) == 1
            assert str(target[0].extra) == str(_EXTRA[stored]()), own


def test_a_module_that_renames_what_older_steps_have(tmp_path: Path) -> None:
    target = {"m": nn.Sequential(_Renamed())}
    _restored(tmp_path, {"m": nn.Sequential(_OldNames())}, target)
    assert target["m"][0].inside["new"].eq(1).all()


@pytest.mark.parametrize("saved", [_Scaled({"too new": torch.ones(3)}), nn.Sequential(_Scaled(1), nn.Linear(3, 3))])
def test_a_module_that_refuses_another_form_leaves_the_state_as_it_was(tmp_path: Path, saved: nn.Module) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"first": torch.ones(2), "observer": _Observer(4, 5.0), "m": saved}, 1)
        state = {"first": torch.zeros(2), "observer": _Observer(2, 1.0), "m": _Scaled(None)}
        before = _bits(state["observer"]), _bits(state["m"])
        with pytest.raises((StateMismatchError, StateError), match="m"):
            checkpointer.restore(state)
        assert not state["first"].any()
        assert (_bits(state["observer"]), _bits(state["m"])) == before


def _with_hook(rows: int) -> nn.Module:
    module = nn.Sequential(nn.Embedding(rows, 3), nn.Linear(3, 2))
    module.register_load_state_dict_pre_hook(lambda *args: None)
    return module


def test_a_module_whose_code_does_not_resize(tmp_path: Path) -> None:
    """Its hook could change anything, so it is asked; then the options of the restore count."""
    saved, target = _with_hook(5), _with_hook(7)
    own = target[0].weight.detach().clone()
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": saved, "n": 7}, 1)
        state = {"m": target, "n": 1}
        with pytest.raises(StateMismatchError, match=r"(?s)m: Sequential.*m/0\.weight is a tensor, float32\[5, 3\]"):
            checkpointer.restore(state)
        assert (state["n"], torch.equal(target[0].weight, own)) == (1, True)
        checkpointer.restore(state, strict=False)
        assert (state["n"], torch.equal(target[0].weight, own)) == (7, True)
        assert torch.equal(target[1].weight, saved[1].weight)
        report = checkpointer.last_restore
        assert report is not None
        assert report.mismatched == ("m/0.weight",)
        assert "m/0.weight" not in report.restored
        checkpointer.restore(state, resize=True)
        assert torch.equal(target[0].weight[:5], saved[0].weight)
        assert torch.equal(target[0].weight[5:], own[5:])
        assert checkpointer.last_restore.resized == ("m/0.weight",)


def test_names_of_a_plain_module_must_be_those_of_the_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))}, 1)
        target = {"m": nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))}
        with pytest.raises(StateMismatchError, match=r"(?s)missing: m/1\.bias.*unexpected: m/0\.bias"):
            checkpointer.restore(target)


def test_resize_is_refused_where_nothing_is_in_common(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"bank": torch.ones(5, 3), "n": 1}, 1)
        with pytest.raises(StateMismatchError, match=r"shape: bank is \[5, 3\] in the checkpoint, \[0, 3\] in"):
            checkpointer.restore({"bank": torch.zeros(0, 3), "n": 2}, resize=True)


def test_observers_of_pytorch(tmp_path: Path) -> None:
    observers = pytest.importorskip("torch.ao.quantization.observer")

    def build(batches: int) -> nn.Module:
        module = nn.Sequential(observers.PerChannelMinMaxObserver(), observers.HistogramObserver())
        for number in range(batches):
            module(torch.arange(12.0).reshape(4, 3) * (number + 1))
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved, target = build(2), build(0)
        _restored(tmp_path, {"m": saved}, {"m": target})
    assert target[0].min_val.shape == (4,)
    assert str(target.state_dict()) == str(saved.state_dict())
