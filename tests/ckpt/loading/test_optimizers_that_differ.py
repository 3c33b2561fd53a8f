"""An optimizer with more, less or other state than the step gets what torch's `load_state_dict` would give it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from ckpt import Checkpointer, StateMismatchError
from tests.ckpt.loading.optimizer_training import model_of, same, train
from tests.support import run_ranks
from tests.support.saves import save_here

_Build = Callable[[int], dict[str, Any]]


def _built(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int, frozen: tuple[int, ...] = ()) -> Any:
    model = model_of(steps)
    for number in frozen:
        model[number].requires_grad_(False)
    optimizer = make(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def _loaded(model: nn.Module, optimizer: torch.optim.Optimizer, into: Any) -> Any:
    """Return the pair `into` after it has loaded with torch what torch has saved."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    for item, state_dict in zip(into, torch.load(file), strict=True):
        item.load_state_dict(state_dict)
    return into


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.LBFGS(trained, lr=0.01, max_iter=3, history_size=7)


CASES: dict[str, tuple[Any, Any]] = {
    "saved before the first step": ((_adamw, 0), (_adamw, 3)),
    "saved with a frozen layer": ((_adamw, 2, (0,)), (_adamw, 3)),
    "restored with a frozen layer": ((_adamw, 2), (_adamw, 3, (0,))),
    "frozen layers that differ": ((_adamw, 2, (0,)), (_adamw, 3, (2,))),
    "a short history, into a long one": ((_lbfgs, 1), (_lbfgs, 4)),
    "a long history, into a short one": ((_lbfgs, 4), (_lbfgs, 1)),
    "no history, into one": ((_lbfgs, 0), (_lbfgs, 2)),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", list(CASES))
def test_state_is_removed_and_made(tmp_path: Path, case: str, strict: bool) -> None:
    saved, running = CASES[case]
    model, optimizer = _built(*saved)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer}, 1)
        ours, theirs = _built(*running), _loaded(model, optimizer, _built(*running))
        checkpointer.restore({"model": ours[0], "optimizer": ours[1]}, strict=strict)
        report = checkpointer.last_restore
    assert report is not None
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert same(ours[1].state_dict(), theirs[1].state_dict())
    for each in (ours, theirs):
        train(*each, range(10, 12))
    assert same(ours[0].state_dict(), theirs[0].state_dict())
    assert same(ours[1].state_dict(), theirs[1].state_dict())


def test_a_fault_before_the_first_save_that_has_state(tmp_path: Path) -> None:
    """A snapshot of step 0, in memory."""
    model, optimizer = _built(_adamw, 0)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot(state, 0)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        train(model, optimizer, range(2))
        assert checkpointer.restore(state) == 0
    assert not optimizer.state
    assert same(dict(model.state_dict()), before)


@pytest.mark.parametrize("stepped", [True, False])
def test_a_rate_that_is_a_tensor_in_one_and_a_number_in_the_other(tmp_path: Path, stepped: bool) -> None:
    def make(rate: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: torch.optim.Adam(model.parameters(), lr=rate)

    for step, (saved, running) in enumerate([(torch.tensor(0.02), 0.5), (0.02, torch.tensor(0.5))], 1):
        model, optimizer = _built(make(saved), 2)
        with Checkpointer(tmp_path) as checkpointer:
            save_here(checkpointer, {"model": model, "optimizer": optimizer}, step)
            steps = 3 if stepped else 0
            ours, theirs = _built(make(running), steps), _loaded(model, optimizer, _built(make(running), steps))
            checkpointer.restore({"model": ours[0], "optimizer": ours[1]}, step)
        for each in (ours, theirs):
            train(*each, range(10, 12))
        assert same(ours[0].state_dict(), theirs[0].state_dict())
        assert same(ours[1].state_dict(), theirs[1].state_dict())


def test_state_that_shares_memory_with_a_parameter_gets_memory_of_its_own(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    (model, optimizer), (other, running) = _built(make, 0), _built(make, 1)
    weight = model[0].weight
    optimizer.state[weight]["anchor"] = torch.full_like(weight, 7)
    running.state[other[0].weight]["anchor"] = other[0].weight.detach()
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"optimizer": optimizer, "model": model}, 1)
        checkpointer.restore({"optimizer": running, "model": other})
    assert torch.equal(other[0].weight, weight)
    assert running.state[other[0].weight]["anchor"].eq(7).all()


# -- kinds of optimizers -----------------------------------------------------------------------------------------------


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, 30)


def _averaged(optimizer: torch.optim.Optimizer) -> Any:
    return swa_utils.SWALR(optimizer, swa_lr=0.05)


def _named(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["name"] = "all"


_CHANGES = [_one_cycle, _averaged, _named, lambda optimizer: None]


@pytest.mark.parametrize("after", _CHANGES)
@pytest.mark.parametrize("before", _CHANGES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_options_that_schedulers_and_programs_add_do_not_matter(
    tmp_path: Path, kind: Any, before: Any, after: Any
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    model, optimizer = _built(make, 0)
    before(optimizer)
    train(model, optimizer, range(2))
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": model, "o": optimizer}, 1)
        ours, theirs, moments = _built(make, 3), _built(make, 3), _built(make, 3)
        for _, each in (ours, theirs, moments):
            after(each)
        checkpointer.restore({"m": ours[0], "o": ours[1]})
        groups = moments[1].state_dict()["param_groups"]
        checkpointer.restore({"m": moments[0], "o": moments[1]}, only=["m", "o/state"])
    _loaded(model, optimizer, theirs)
    assert same(ours[1].state_dict(), theirs[1].state_dict())
    assert same(moments[1].state_dict(), {"state": theirs[1].state_dict()["state"], "param_groups": groups})
    for each in (ours, theirs):
        train(*each, range(10, 11))
    assert same(ours[0].state_dict(), theirs[0].state_dict())


class _One(torch.optim.SGD):
    pass


class _Other(torch.optim.SGD):
    pass


def test_the_class_decides_whether_an_optimizer_is_of_another_kind(tmp_path: Path) -> None:
    def make(kind: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: kind(model.parameters(), lr=0.01)

    model, optimizer = _built(make(_One), 2)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": model, "o": optimizer}, 1)
        for kind in (_One, torch.optim.SGD):
            other, running = _built(make(kind), 0)
            checkpointer.restore({"m": other, "o": running})
            assert same(running.state_dict(), optimizer.state_dict())
        for kind, text in (_Other, r"is _One, that of the state _Other"), (torch.optim.Adam, r"_One, has .*momentum"):
            other, running = _built(make(kind), 1)
            for only in (None, ["m", "o/state"], ["o/state"]):
                with pytest.raises(StateMismatchError, match=rf"parameter groups: o is of another kind: .*{text}"):
                    checkpointer.restore({"m": other, "o": running}, only=only)


@pytest.mark.parametrize("stepped", [True, False])
def test_what_was_asked_for_by_name_and_not_restored_is_an_error(tmp_path: Path, stepped: bool) -> None:
    """Also with `strict=False`, which restores some of what was asked for, not none."""
    model, optimizer = _built(_adamw, 2)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"m": model, "o": optimizer, "n": torch.ones(3)}, 1)
        other, running = _built(lambda model: torch.optim.SGD(model.parameters(), momentum=0.9), int(stepped))
        state = {"m": other, "o": running, "n": torch.zeros(4)}
        for only in (["m", "o/state"], ["m", "n"], ["m", "o"]):
            with pytest.raises(StateMismatchError, match=rf"only=.*{only[1]}|No tensor of the state fits"):
                checkpointer.restore(state, only=only, strict=False)
        checkpointer.restore(state, only=["m"], strict=False)
    assert same(other.state_dict(), model.state_dict())


# -- state that is not like its parameter ------------------------------------------------------------------------------


class _LowRank(torch.optim.Optimizer):
    """An optimizer whose moments have fewer rows than their parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None and parameter.dim() == 2:
                state = self.state[parameter]
                moment = state.setdefault("moment", torch.zeros(2, parameter.shape[1]))
                moment.mul_(0.9).add_(parameter.grad[:2])
                parameter[:2] -= 0.01 * moment


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_moments_of_fewer_rows_are_restored(tmp_path: Path, steps: int, with_model: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return _LowRank(model.parameters())

    def state(pair: Any) -> dict[str, Any]:
        return {"optimizer": pair[1]} | ({"model": pair[0]} if with_model else {})

    saved, other = _built(make, 2), _built(make, steps)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, state(saved), 1)
        checkpointer.restore(state(other))
    assert same(other[1].state_dict(), saved[1].state_dict())


def _sharded(rank: int, world_size: int, root: Path, saves: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build(kind: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 45).reshape(5, 9) + step).square().mean().backward()
            optimizer.step()
        return model, optimizer

    def full(optimizer: torch.optim.Optimizer) -> Any:
        def whole(item: Any) -> Any:
            return item.full_tensor() if hasattr(item, "full_tensor") else item

        return [{key: whole(item) for key, item in own.items()} for own in optimizer.state_dict()["state"].values()]

    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        with Checkpointer(root / kind.__name__) as checkpointer:
            for saved in (0, 2) if saves else ():
                model, optimizer = build(kind, saved)
                save_here(checkpointer, {"model": model, "optimizer": optimizer}, saved)
                torch.save(full(optimizer), root / f"{kind.__name__}{saved}.{rank}")
            for saved, running in ((0, 2), (2, 0), (2, 3)):
                other, restored = build(kind, running)
                checkpointer.restore({"model": other, "optimizer": restored}, saved)
                assert same(full(restored), torch.load(root / f"{kind.__name__}{saved}.0")), (kind, saved, running)
                restored.zero_grad()
                other(torch.ones(5, 9)).square().mean().backward()
                restored.step()


def test_sharded_state_is_removed_and_made_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(_sharded, 2, tmp_path, True)
    run_ranks(_sharded, 3, tmp_path, False)
