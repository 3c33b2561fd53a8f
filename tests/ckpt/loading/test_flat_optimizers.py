"""Optimizers whose state dict does not have PyTorch's form are saved, and restored into others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckpt import Checkpointer, StateMismatchError
from tests.support import run_ranks
from tests.support.saves import save_here


class Container(torch.optim.Optimizer):
    """One optimizer for each part of a model, with a flat state dict by names of parameters.

    It has no state before its first step."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
        parameters = [parameter for part in parts for parameter in part.parameters()]
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for number, name, parameter in self._names():
            optimizer = self.optimizers[number]
            flat |= {f"state.{name}.{key}": item for key, item in optimizer.state.get(parameter, {}).items()}
            (group,) = optimizer.param_groups
            flat |= {f"param_groups.{name}.{key}": item for key, item in group.items() if key != "params"}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        left = dict(state_dict)
        for number, name, parameter in self._names():
            optimizer = self.optimizers[number]
            for key in [key for key in left if key.startswith(f"param_groups.{name}.")]:
                optimizer.param_groups[0][key.rpartition(".")[2]] = left.pop(key)
            for key in [key for key in left if key.startswith(f"state.{name}.")]:
                optimizer.state[parameter][key.rpartition(".")[2]] = left.pop(key)
        if left:
            raise KeyError(f"unknown: {sorted(left)}")

    def _names(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for number, part in enumerate(self.parts):
            for name, parameter in part.named_parameters():
                yield number, f"{number}.{name}", parameter


class Initialized(Container):
    """As in torchtitan: PyTorch's functions flatten the state, and create it before if there is none."""

    _OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self.parts, self.optimizers, strict=True)
        parts = [get_optimizer_state_dict(part, optimizer, options=self._OPTIONS) for part, optimizer in pairs]
        return {f"{number}.{key}": item for number, part in enumerate(parts) for key, item in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            start = f"{number}."
            own = {key.removeprefix(start): item for key, item in state_dict.items() if key.startswith(start)}
            set_optimizer_state_dict(part, optimizer, optim_state_dict=own, options=self._OPTIONS)


def _build(kind: type[Container], seed: int, steps: int, width: int = 5) -> tuple[nn.ModuleList, Container]:
    torch.manual_seed(seed)
    parts = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 2)])
    container = kind(list(parts))
    _train(parts, container, steps)
    return parts, container


def _train(parts: nn.ModuleList, container: Container, steps: int) -> None:
    for _ in range(steps):
        container.zero_grad()
        hidden = torch.ones(4)
        for part in parts:
            hidden = part(hidden)
        hidden.square().sum().backward()
        container.step()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [Container, Initialized])
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: type[Container], steps: int) -> None:
    parts, container = _build(kind, 1, 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": parts, "optimizer": container}, 3)
        others, other = _build(kind, 2, steps)
        checkpointer.restore({"model": others, "optimizer": other})
    assert str(other.state_dict()) == str(container.state_dict())
    assert all(optimizer.state for optimizer in other.optimizers)
    _train(parts, container, 3)
    _train(others, other, 3)
    assert str(others.state_dict()) == str(parts.state_dict())


@pytest.mark.parametrize("kind", [Container, Initialized])
def test_state_of_other_shapes_is_refused_or_left_out_as_a_whole(tmp_path: Path, kind: type[Container]) -> None:
    parts, container = _build(kind, 1, 3)
    with Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"model": parts, "optimizer": container}, 3)
        others, other = _build(kind, 2, 1, width=6)
        state = {"model": others, "optimizer": other}
        before = f"{others.state_dict()} {other.state_dict()}"
        with pytest.raises(StateMismatchError, match=r"shape: optimizer/.*weight\.exp_avg is \[5, 4\]"):
            checkpointer.restore(state)
        assert f"{others.state_dict()} {other.state_dict()}" == before
        own = str(other.optimizers[0].state)
        checkpointer.restore(state, strict=False)
    assert str(other.optimizers[0].state) == own
    fits, restored = others[1].bias, parts[1].bias
    assert str(other.optimizers[1].state[fits]) == str(container.optimizers[1].state[restored])
    _train(others, other, 1)


def test_a_container_that_never_stepped_is_restored_into_one_like_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        _, container = _build(Container, 1, 0)
        save_here(checkpointer, {"optimizer": container}, 1)
        _, other = _build(Container, 2, 0)
        checkpointer.restore({"optimizer": other})
        assert other.state_dict() == container.state_dict()


def _sharded(rank: int, world_size: int, root: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make(seed: int, kind: type[Container], steps: int) -> tuple[nn.ModuleList, Container]:
        torch.manual_seed(seed)
        parts = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 2)])
        mesh = init_device_mesh("cpu", (world_size,))
        for part in parts:
            fully_shard(part, mesh=mesh)
        container = kind(list(parts))
        _train(parts, container, steps)
        return parts, container

    for kind in (Container, Initialized):
        parts, container = make(1, kind, 2)
        with Checkpointer(root / kind.__name__) as checkpointer:
            save_here(checkpointer, {"model": parts, "optimizer": container}, 2)
            others, other = make(2, kind, 0)
            checkpointer.restore({"model": others, "optimizer": other})
        for number in (0, 1):
            for one, two in zip(parts[number].parameters(), others[number].parameters(), strict=True):
                for key, item in container.optimizers[number].state[one].items():
                    assert torch.equal(_local(other.optimizers[number].state[two][key]), _local(item)), key
        _train(others, other, 1)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_sharded_containers(tmp_path: Path) -> None:
    run_ranks(_sharded, 2, tmp_path)
