"""What ranks have several of: buffers and values come from the lowest rank, parameters must be equal."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import SaveAbandonedError
from tests.support import run_ranks
from tests.support.saves import save_here


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _log() -> list[str]:
    """The warnings of `ckpt` in this rank from now on."""
    handler = _Lines()
    logging.getLogger("ckpt").addHandler(handler)
    return handler.lines


def _outcome_of_save(checkpointer: ckpt.Checkpointer, state: Any, step: int) -> str:
    try:
        save_here(checkpointer, state, step)
    except SaveAbandonedError as error:
        return str(error)
    return "published"


def _stored(root: Path, step: int, like: dict[str, Any]) -> dict[str, Any]:
    """What a step holds, read by one process; `like` is changed."""
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(like, step=step, strict=False) == step
    return like


# -- buffers -----------------------------------------------------------------------------------------------------------


class _Net(torch.nn.Module):
    """Buffers of several sizes, among parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.norms = torch.nn.Sequential(*(torch.nn.BatchNorm1d(64) for _ in range(6)))
        self.register_buffer("table", torch.zeros(600, 600))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.norms(x)
        return result


def _train_with_batch_norm(rank: int, world_size: int, root: Path, form: str) -> Any:
    torch.manual_seed(0)
    net = _Net()
    model = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    net.table.fill_(rank)
    torch.manual_seed(100 + rank)  # each rank has data of its own
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64) * (1 + rank)).square().sum().backward()
        optimizer.step()
    lines = _log()
    state = {"model": model if form == "module" else model.state_dict(), "optimizer": optimizer}
    if form == "plain":
        del state["model"]["module.table"]  # large: could be a parameter
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, state, step)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}, lines


@pytest.mark.parametrize("form", ["module", "plain"])
def test_all_buffers_are_those_of_the_lowest_rank(tmp_path: Path, form: str) -> None:
    (own, lines), (other, others_lines) = (
        result.value for result in run_ranks(_train_with_batch_norm, 2, tmp_path, form)
    )
    assert lines == others_lines == []
    names = [name for name in own if form == "module" or not name.endswith("table")]
    differing = [name for name in names if not torch.equal(own[name], other[name])]
    assert len(differing) >= 12  # of each norm the mean and the variance
    stored = _stored(tmp_path, 2, {"model": {name: torch.zeros_like(own[name]) for name in names}})["model"]
    for name in names:
        assert torch.equal(stored[name], own[name]), name


# -- parameters --------------------------------------------------------------------------------------------------------


def _with_other_parameters(rank: int, world_size: int, root: Path, replicas: Any, form: str) -> Any:
    """Rank 1 has a bias and a moment of its own; then they are equal again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    changed = [model[2].weight, optimizer.state[model[3].bias]["exp_avg"]]
    changed += [model[1].bias] if form == "module" else []
    lines = _log()
    with ckpt.Checkpointer(root, staging=ckpt.Staging(on_divergence=replicas)) as checkpointer:
        state = {"model": model if form == "module" else model.state_dict(), "optimizer": optimizer}
        save_here(checkpointer, state, 1)
        with torch.no_grad():
            before = [tensor.clone() for tensor in changed]
            for tensor in changed:
                tensor += rank
        outcome = _outcome_of_save(checkpointer, state, 2)
        silent = list(lines)
        again = _outcome_of_save(checkpointer, state, 3)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        save_here(checkpointer, state, 4)
        return outcome, silent, again, lines, checkpointer.all_steps()


@pytest.mark.parametrize("form", ["module", "plain"])
def test_parameters_that_differ_are_an_error_on_all_ranks(tmp_path: Path, form: str) -> None:
    for result in run_ranks(_with_other_parameters, 2, tmp_path, "error", form):
        outcome, lines, _, _, steps = result.value
        assert "the save of step 2 was abandoned on all ranks" in outcome
        assert "model/2.weight (rank 1 unlike rank 0)" in outcome
        assert "exp_avg (rank 1 unlike rank 0)" in outcome
        assert ("model/1.bias (rank 1 unlike rank 0)" in outcome) == (form == "module")
        assert "0.weight" not in outcome
        assert "ckpt.PerRank" in outcome
        assert lines == []
        assert steps == [1, 4]


def test_parameters_that_differ_can_be_a_warning(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks(_with_other_parameters, 2, tmp_path, "warn", "module"))
    for outcome, _, again, _, steps in (first, second):
        assert (outcome, again, steps) == ("published", "published", [1, 2, 3, 4])
    (line,) = first[3]  # once, though two steps had them
    assert "step 2: ranks have different values of" in line
    assert "model/1.bias (rank 1 unlike rank 0)" in line
    assert "parts of the values of each rank" in line
    assert second[3] == []


def test_they_can_be_ignored(tmp_path: Path) -> None:
    for result in run_ranks(_with_other_parameters, 2, tmp_path, "ignore", "module"):
        outcome, _, again, lines, steps = result.value
        assert (outcome, again, lines, steps) == ("published", "published", [], [1, 2, 3, 4])


def _one_element(rank: int, world_size: int, root: Path) -> Any:
    """One element of a large matrix, transposed in memory, differs: found by and by."""
    matrix = torch.zeros(256, 160).t()
    packs = {str(number): torch.zeros(30_000) for number in range(3)}
    outcomes = []
    with ckpt.Checkpointer(root) as checkpointer:
        for step in range(1, 13):
            matrix[:, 7] = rank * (step > 2)  # of each row an element, so each sample has one
            outcomes.append(_outcome_of_save(checkpointer, {"matrix": matrix, **packs}, step))
            if rank and step == 2:
                packs["1"][::400] = 1
        return outcomes


def test_samples_are_of_the_same_elements_whatever_the_strides(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks(_one_element, 2, tmp_path))
    assert first[:2] == second[:2] == ["published", "published"]
    for outcome in (*first[2:], *second[2:]):
        assert "matrix (rank 1 unlike rank 0)" in outcome
        assert "1 (rank 1 unlike rank 0)" in outcome
        assert "0 (rank 1" not in outcome


def _sharded_and_replicated(rank: int, world_size: int, root: Path) -> Any:
    """A mesh of two replicas of two shards: rank 3 has another second half than rank 1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    weight = distribute_tensor(torch.zeros(256, 200), mesh, [Replicate(), Shard(0)])
    outcomes = []
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            outcomes.append(_outcome_of_save(checkpointer, {"weight": weight}, step))
            if rank == 3:
                weight.to_local().fill_(1)
        return outcomes


def test_replicas_of_shards_are_compared_with_each_other(tmp_path: Path) -> None:
    for result in run_ranks(_sharded_and_replicated, 4, tmp_path):
        before, after = result.value
        assert before == "published"
        assert "weight (rank 3 unlike rank 1)" in after


# -- values and small tensors ------------------------------------------------------------------------------------------


def _with_other_values(rank: int, world_size: int, root: Path) -> Any:
    own = {
        "loss": 0.5 + rank,
        "history": [rank] * 3,
        "same": {"lr": 0.1, "betas": (0.9, 0.99), "nothing": float("nan")},
        "seen": torch.tensor([rank, 3]),
        "random": ckpt.PerRank(torch.tensor([rank])),
        "position": ckpt.PerRank(100 + rank),
    }
    lines = _log()
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, own, step)
        own["same"]["lr"] += rank
        save_here(checkpointer, own, 3)
        return lines, checkpointer.all_steps()


def test_values_that_differ_are_those_of_the_lowest_rank_and_named_once(tmp_path: Path) -> None:
    (lines, steps), (others_lines, _) = (result.value for result in run_ranks(_with_other_values, 2, tmp_path))
    assert steps == [1, 2, 3]
    assert others_lines == []
    first, second = lines
    assert "step 1: ranks have different values of" in first
    for name in ("history", "loss", "seen"):
        assert f"{name} (rank 1 unlike rank 0)" in first
    assert "those of the lowest rank" in first
    assert not any(name in first for name in ("same", "random", "position"))
    assert "step 3: ranks have different values of same/lr (rank 1 unlike rank 0);" in second
    stored = _stored(tmp_path, 3, {"loss": 0.0, "history": [0], "seen": torch.zeros(2, dtype=torch.int64)})
    assert stored["loss"] == 0.5
    assert stored["history"] == [0, 0, 0]
    assert stored["seen"].tolist() == [0, 3]
