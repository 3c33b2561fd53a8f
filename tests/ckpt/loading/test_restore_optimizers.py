"""Optimizers and schedulers are restored into new ones that have not stepped, and training continues bit for bit."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ckpt import Checkpointer, StateError
from tests.support import run_ranks
from tests.support.saves import save_here


def _model(dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5, dtype=dtype)))
    model.register_parameter("frozen", nn.Parameter(torch.randn(4, dtype=dtype), requires_grad=False))
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.linspace(-1, 1, 9 * 5).reshape(5, 9).to(model.scale.dtype) + step

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) * model.scale).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": others, "lr": 0.02}, {"params": weights}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(_groups(model), lr=0.01),
    "adamw_foreach": lambda model: torch.optim.AdamW(_groups(model), lr=0.01, foreach=True),
    "adamw_fused": lambda model: torch.optim.AdamW(_groups(model), lr=0.01, fused=True),
    "adam_amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "adam_tensor_lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "sgd_momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "rmsprop_centered": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True, momentum=0.5),
    "lbfgs": lambda model: torch.optim.LBFGS(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01, max_iter=3
    ),
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_goes_on_where_it_was(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = _model(dtype, 1)
    optimizer = OPTIMIZERS[name](model)
    _train(model, optimizer, range(3))
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer}, 3)
        for stepped in (True, False) if name != "lbfgs" else (False,):  # its state has another structure in each step
            fresh = _model(dtype, 2)
            other = OPTIMIZERS[name](fresh)
            if stepped:
                _train(fresh, other, range(1))
            parameters = [parameter.detach().clone() for parameter in fresh.parameters()]
            seen: list[Any] = []
            hook = other.register_step_pre_hook(lambda *_: seen.append(1))  # noqa: B023
            checkpointer.restore({"model": fresh, "optimizer": other})
            hook.remove()
            assert not seen, "a restore does not step"
            assert not _same(parameters, list(fresh.parameters()))
            assert _same(other.state_dict(), optimizer.state_dict())
        saved = model.state_dict()
        saved = {key: tensor.clone() for key, tensor in saved.items()}
        _train(model, optimizer, range(3, 6))
        _train(fresh, other, range(3, 6))
        assert _same(fresh.state_dict(), model.state_dict())
        assert not _same(fresh.state_dict(), saved)


class _WideAdam(torch.optim.Optimizer):
    """An optimizer with float32 moments of bfloat16 parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("moment", torch.zeros(parameter.shape, dtype=torch.float32))
                state.setdefault("master", parameter.float())
                state["step"] += 1
                state["moment"].mul_(0.9).add_(torch.full_like(state["moment"], 0.1234567))
                state["master"].add_(state["moment"], alpha=-group["lr"])
                parameter.copy_(state["master"])


def test_state_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = _model(torch.bfloat16, 1)
    optimizer = _WideAdam(model.parameters())
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer}, 1)
        for stepped in (False, True):
            fresh = _model(torch.bfloat16, 2)
            other = _WideAdam(fresh.parameters())
            if stepped:
                other.step()
            checkpointer.restore({"model": fresh, "optimizer": other})
            assert _same(other.state_dict(), optimizer.state_dict())
    optimizer.step()
    other.step()
    assert _same(other.state_dict(), optimizer.state_dict())
    assert _same(fresh.state_dict(), model.state_dict())


class _NestedAdam(torch.optim.Optimizer):
    """An optimizer with float32 state in containers, for bfloat16 parameters."""

    def __init__(self, params: Any, made: Callable[[], Any]) -> None:
        super().__init__(params, {"lr": 0.01})
        self._made = made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), nested=self._made(), name="a", steps=0)
                state["steps"] += 1


def _wide(*shape: int) -> torch.Tensor:
    """Return elements that bfloat16 does not have."""
    return torch.rand(*shape) + 1e-4


_CONTAINERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"m": _wide(3), "more": {"v": _wide(2), "n": 3}},
    "list": lambda: [_wide(3), 1.5, _wide(2)],
    "tuple": lambda: (_wide(3), None),
    "tuple of values": lambda: (1, 2.5, "text"),
    "list of tuples": lambda: [(_wide(2), _wide(3)), (_wide(1),)],
    "tuple of dicts": lambda: ({"m": _wide(2)}, {"m": [_wide(1)]}),
    "deque": lambda: deque([_wide(2), _wide(1)], maxlen=3),
    "ordered dict": lambda: OrderedDict(m=_wide(2), v=_wide(1)),
    "integers": lambda: [torch.arange(3), _wide(3).double(), torch.tensor([True, False])],
    "text": lambda: ["text", b"bytes"],
}


@pytest.mark.parametrize("name", _CONTAINERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_state_in_containers_keeps_its_dtypes_and_containers(tmp_path: Path, name: str, stepped: bool) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _model(torch.bfloat16, seed)
        return model, _NestedAdam(model.parameters(), _CONTAINERS[name])

    model, optimizer = build(1)
    optimizer.step()
    saved = str(optimizer.state_dict())
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer}, 1)
        fresh, other = build(2)
        if stepped:
            other.step()
        checkpointer.restore({"model": fresh, "optimizer": other})
    assert str(other.state_dict()) == saved
    dtypes = [each.dtype for each in _tensors(other.state_dict())]
    assert dtypes == [each.dtype for each in _tensors(optimizer.state_dict())]


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict | list | tuple | deque):
        for each in item.values() if isinstance(item, dict) else item:
            yield from _tensors(each)


def test_state_that_pytorch_cannot_load_is_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    def build(fill: float) -> dict[str, Any]:
        parameter = torch.full((3,), fill)
        optimizer = _NestedAdam([parameter], lambda: range(3))
        optimizer.step()
        return {"model": {"p": parameter}, "optimizer": optimizer}

    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, build(2.0), 1)
        state = build(1.0)
        with pytest.raises(StateError, match=r"optimizer: _NestedAdam\.load_state_dict failed"):
            checkpointer.restore(state)
    assert state["model"]["p"].eq(1).all()


def test_restoring_into_a_stepped_optimizer_is_in_place(tmp_path: Path) -> None:
    model = _model(torch.float32, 1)
    optimizer = OPTIMIZERS["adamw"](model)
    _train(model, optimizer, range(2))
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"optimizer": optimizer}, 1)
        _train(model, optimizer, range(2, 4))
        pointers = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
        checkpointer.restore({"optimizer": optimizer})
    assert [state["exp_avg"].data_ptr() for state in optimizer.state.values()] == pointers


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 30),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def go(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = make()
    go(optimizer, scheduler, 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"optimizer": optimizer, "scheduler": scheduler}, 3)
        fresh, other = make()
        checkpointer.restore({"optimizer": fresh, "scheduler": other})
    assert go(fresh, other, 5) == go(optimizer, scheduler, 5)
    assert other.state_dict().keys() == scheduler.state_dict().keys()


def _fsdp(rank: int, world_size: int, root: Path, train: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make(seed: int, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        return model, (torch.optim.AdamW(model.parameters(), lr=0.01, foreach=name == "foreach"))

    def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 45).reshape(5, 9) + step).square().mean().backward()
            optimizer.step()

    def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        tensors = list(model.state_dict().values())
        tensors += [optimizer.state[p][key] for p in model.parameters() for key in ("step", "exp_avg", "exp_avg_sq")]
        return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in tensors]

    for name in ("plain", "foreach"):
        model, optimizer = make(1, name)
        with Checkpointer(root / name) as checkpointer:
            if train:
                train_on(model, optimizer, range(3))
                save_here(checkpointer, {"model": model, "optimizer": optimizer}, 3)
                torch.save(full(model, optimizer), root / f"{name}{rank}.pt")
            fresh, other = make(2, name)
            checkpointer.restore({"model": fresh, "optimizer": other})
            assert all(map(torch.equal, full(fresh, other), torch.load(root / f"{name}0.pt")))
            train_on(fresh, other, range(3, 5))  # it can step
            if train:
                train_on(model, optimizer, range(3, 5))
                assert all(map(torch.equal, full(fresh, other), full(model, optimizer)))


def test_sharded_optimizer_state_moves_to_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_fsdp, 2, tmp_path, True)
    run_ranks(_fsdp, 3, tmp_path, False)
