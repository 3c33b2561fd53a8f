"""Jobs that saved with `torch.distributed.checkpoint` and `get_state_dict` go on, on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer, load_foreign
from tests.ckpt.loading.optimizer_training import same
from tests.support import run_ranks
from tests.support.saves import save_here
from tools.inspect_ckpt.__main__ import main

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


def _build(seed: int, shard: int = 0, turned: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, which is sharded over this number of ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (shard,)))
    biases: dict[str, Any] = {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0}
    weights: dict[str, Any] = {"params": [model[0].weight, model[2].weight]}
    return model, torch.optim.AdamW([biases, weights] if turned else [weights, biases], lr=0.01)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 24).reshape(4, 6) + step).square().mean().backward()
        optimizer.step()


def _content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The parameters and their state, whole, by name."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("module.")
        found[plain] = _whole(parameter)
        found |= {f"{plain}/{key}": _whole(tensor) for key, tensor in optimizer.state[parameter].items()}
    return found


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return whole


def _saved(rank: int, world_size: int, folder: Path) -> None:
    """Train three steps and save in all ways, then two more that are not interrupted."""
    model, optimizer = _build(1, shard=world_size)
    _train(model, optimizer, range(3))
    weights = get_model_state_dict(model)
    named = get_optimizer_state_dict(model, optimizer)
    flattened = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
    dcp.save({"model": weights, "optimizer": named}, checkpoint_id=folder / "plain")
    # As torchtitan: the names of the model are at the top.
    dcp.save({**weights, "optimizer": flattened, "train_state": {"step": 3}}, checkpoint_id=folder / "titan")
    with Checkpointer(folder / "ours") as checkpointer:
        save_here(checkpointer, {"model": weights, "optimizer": named}, 1)
        save_here(checkpointer, {"model": weights, "optimizer": flattened}, 2)
        save_here(checkpointer, {"model": model, "optimizer": optimizer}, 3)
    contents = [_content(model, optimizer)]
    _train(model, optimizer, range(3, 5))
    contents.append(_content(model, optimizer))
    if rank == 0:
        torch.save(contents, folder / "contents.pt")


def _below_model(name: str) -> str:
    return name if name.startswith(("optimizer", "train_state")) else f"model/{name}"


def _goes_on(rank: int, world_size: int, folder: Path) -> list[str]:
    """Restore each of the steps, into sharded and replicated models; return those that differ, now or later."""
    before, after = torch.load(folder / "contents.pt")
    sources: list[tuple[str, int, dict[str, Any]]] = [
        ("from_plain", 3, {}),
        ("from_titan", 3, {"rename": _below_model}),
        *(("ours", step, {}) for step in (1, 2, 3)),
    ]
    wrong = []
    for root, step, options in sources:
        for shard in (world_size, 0):
            model, optimizer = _build(
                2, shard, turned=step != 3 or root != "ours"
            )  # by number, the order has to be equal
            parallel = model if shard else DistributedDataParallel(model)
            state: dict[str, Any] = {"model": model, "optimizer": optimizer}
            state |= {"train_state": {"step": 0}} if root == "from_titan" else {}
            with Checkpointer(folder / root, read_only=True) as checkpointer:
                checkpointer.restore(state, step, **options)
            is_equal = same(_content(model, optimizer), before) and optimizer.param_groups[0]["lr"] == 0.01
            _train(parallel, optimizer, range(3, 5))
            if not is_equal or not same(_content(model, optimizer), after):
                wrong.append(f"{root} {step} {shard}")
    # The form of `get_state_dict` takes all of them as well.
    for root, step, options in sources:
        model, optimizer = _build(2, world_size)
        weights, named = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": named, "train_state": {"step": 0}}
        with Checkpointer(folder / root, read_only=True) as checkpointer:
            checkpointer.restore(state, step, only=["model", "optimizer"], **options)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=named)
        _train(model, optimizer, range(3, 5))
        if not same(_content(model, optimizer), after):
            wrong.append(f"{root} {step} into named")
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    run_ranks(_saved, 2, folder)
    for name in ("plain", "titan"):
        assert main(["convert", str(folder / name), str(folder / f"from_{name}"), "--step", "3"]) == 0
    return folder


@pytest.mark.parametrize("world_size", [1, 4])
def test_training_goes_on_bit_for_bit_on_another_number_of_ranks(folder: Path, world_size: int) -> None:
    assert [result.value for result in run_ranks(_goes_on, world_size, folder)] == [[]] * world_size


@pytest.mark.parametrize("name", ["plain", "titan"])
def test_what_load_foreign_returns_is_taken_by_set_state_dict(folder: Path, name: str) -> None:
    loaded = load_foreign(folder / name)
    weights = loaded["model"] if name == "plain" else {key: loaded[key] for key in loaded if key[0].isdecimal()}
    model, optimizer = _build(2, turned=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    before, after = torch.load(folder / "contents.pt")
    assert same(_content(model, optimizer), before)
    _train(model, optimizer, range(3, 5))
    assert same(_content(model, optimizer), after)
