"""64 ranks, for real: FSDP2 saves, ten ranks are killed in the middle of a save, and 48 go on."""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer, CheckpointError
from tests.support import run_ranks
from tests.support.layouts import full_tensor
from tests.support.selection import full_only

_RANKS, _KILLED, _AFTER = 64, 10, 48
_TIMEOUT = timedelta(seconds=40)


class _Training:
    """A model and an optimizer, whose numbers do not depend on the number of ranks."""

    def __init__(self, world_size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.mesh = init_device_mesh("cpu", (world_size,))
        self.model = nn.Sequential(*(nn.Linear(96, 70) for _ in range(3)), nn.LayerNorm(33))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(full_tensor(name, tuple(parameter.shape)))
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.steps = 0

    def step(self) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        self.steps += 1
        for name, parameter in self.model.named_parameters():
            gradient = full_tensor(f"{name}{self.steps}", tuple(parameter.shape))
            parameter.grad = distribute_tensor(gradient, self.mesh, [Shard(0)])
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "steps": self.steps}

    def numbers(self) -> list[torch.Tensor]:
        """All numbers that this rank has."""
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        tensors = [*self.model.parameters(), *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]
        return [tensor.to_local().clone() for tensor in tensors]  # type: ignore[attr-defined]


def _save_and_die(rank: int, world_size: int, root: str) -> str:
    training = _Training(world_size)
    with Checkpointer(root, timeout=_TIMEOUT) as checkpointer:
        training.step()
        checkpointer.save(training.state, 1)
        training.step()
        checkpointer.async_save(training.state, 2)
        if rank >= world_size - _KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            checkpointer.maybe_finalize(blocking=True)
        except CheckpointError:
            return "abandoned"
        return "published"


def _go_on(rank: int, world_size: int, root: str) -> int:
    training = _Training(world_size)
    training.step()  # so that the optimizer has a state
    with Checkpointer(root, timeout=_TIMEOUT) as checkpointer:
        step = checkpointer.restore(training.state)
        assert step is not None
        expected = _Training(world_size)
        for _ in range(step):
            expected.step()
        pairs = zip(training.numbers(), expected.numbers(), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs)
        training.steps = step
        training.step()
        checkpointer.save(training.state, step + 1)
    return step


def _files(step: Path) -> Counter[int | None]:
    """Return how many files of a step each rank wrote; None for those of all ranks."""
    ranks = [file.name[5:10] if file.name.startswith("rank_") else None for file in step.rglob("*") if file.is_file()]
    return Counter(None if rank is None else int(rank) for rank in ranks)


@full_only
@pytest.mark.timeout(600)
def test_ten_of_64_ranks_are_killed_and_48_go_on(tmp_path: Path) -> None:
    codes: dict[int, int | None] = dict.fromkeys(range(_RANKS - _KILLED, _RANKS), -signal.SIGKILL)
    results = run_ranks(_save_and_die, _RANKS, str(tmp_path), timeout=250.0, returncodes=codes, survivors_timeout=60.0)
    outcomes = {result.value for result in results if result.rank < _RANKS - _KILLED}
    assert len(outcomes) == 1, outcomes
    files = _files(tmp_path / "step_00000001")
    assert files[None] <= 10
    assert max(count for rank, count in files.items() if rank is not None) <= 2

    steps = {result.value for result in run_ranks(_go_on, _AFTER, str(tmp_path), timeout=250.0)}
    (step,) = steps
    assert step == 2 or outcomes == {"abandoned"}
    assert (tmp_path / f"step_{step + 1:08d}").is_dir()
