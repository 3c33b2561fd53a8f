"""Random number generators continue from their saved state, on every rank, with any devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt import AsyncCallsQueue, Checkpointer, RngState
from tests.support import run_ranks


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the generators, which belong to the whole test process."""
    rng = RngState()
    before = rng.state_dict()
    yield
    rng.load_state_dict(before)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), np.random.normal(), random.random(), random.gauss(0, 1)]


class _Training:
    """Training with dropout, noise from numpy, and a choice by `random` in every step."""

    def __init__(self, seed: int) -> None:
        _seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer, "rng": RngState()}

    def run(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        noise = torch.from_numpy(np.random.normal(size=(4, 8))).float()
        self.optimizer.zero_grad()
        loss: torch.Tensor = (self.model(noise) * random.gauss(0, 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def test_training_resumes_bit_for_bit(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, queue=queue) as checkpointer:
        training = _Training(1)
        training.run(3)
        checkpointer.save(training.state, 3)
        assert training.run(1) != training.run(1)
        checkpointer.save(training.state, 5)  # the state of the generators at the time of the save
        losses = training.run(5)

        resumed = _Training(2)
        assert checkpointer.restore(resumed.state) == 5
        assert resumed.run(5) == losses
    after = [tensor.tolist() for tensor in training.model.state_dict().values()]
    assert [tensor.tolist() for tensor in resumed.model.state_dict().values()] == after


def test_generators_are_set_after_all_objects_have_loaded(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    class Shuffles:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            _draw()

    state = {"rng": RngState(), "object": Shuffles()}
    with Checkpointer(tmp_path, queue=queue) as checkpointer:
        _seed(5)
        checkpointer.save(state, 1)
        expected = _draw()
        checkpointer.restore(state)
    assert _draw() == expected


def _ranks(rank: int, world_size: int, root: Path, save: bool) -> None:
    state = {"rng": RngState(), "t": torch.zeros(2)}
    with Checkpointer(root) as checkpointer:
        if save:
            _seed(100 + rank)
            checkpointer.save(state, 1)
        _seed(7 + rank)
        checkpointer.restore(state)
        drawn = _draw()
    _seed(100 + rank if rank < 2 else 7 + rank)
    assert drawn == _draw(), f"rank {rank} of {world_size}"


def test_each_rank_gets_its_own_back_and_a_new_one_keeps_what_it_has(tmp_path: Path) -> None:
    run_ranks(_ranks, 2, tmp_path, True)
    run_ranks(_ranks, 1, tmp_path, False)
    run_ranks(_ranks, 3, tmp_path, False)


def test_another_generator_of_numpy_is_kept(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = {"rng": RngState()}
        with Checkpointer(tmp_path, queue=queue) as checkpointer:
            checkpointer.save(state, 1)
            expected = _draw()
            checkpointer.restore(state)
        assert _draw() == expected
    finally:
        np.random.set_bit_generator(before)


class _Cuda:
    """A fake of the CUDA functions that `RngState` uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int, initialized: bool = True) -> None:
        self.states = [torch.full((16,), device, dtype=torch.uint8) for device in range(devices)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: devices > 0 and initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in self.states])
        monkeypatch.setattr(torch.cuda, "set_rng_state", self._set)

    def _set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state.clone()

    def numbers(self) -> list[int]:
        return [int(state[0]) for state in self.states]


def test_cuda_may_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch, 3).states[1].fill_(77)
    on_three = RngState().state_dict()

    _Cuda(monkeypatch, 0)
    rng = RngState()
    assert rng.state_dict().keys() == on_three.keys(), "so that either can be restored into the other"
    rng.load_state_dict(on_three)
    on_none = rng.state_dict()  # without CUDA, but with its saved state

    cuda = _Cuda(monkeypatch, 2, initialized=False)
    RngState().load_state_dict(on_none)
    assert cuda.numbers() == [0, 77]

    cuda = _Cuda(monkeypatch, 4)
    cuda.states[3].fill_(9)
    RngState().load_state_dict(on_none)
    assert cuda.numbers() == [0, 77, 2, 9]


def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    def run(steps: int) -> list[list[float]]:
        """Train up to this step, and return the random numbers of each step."""
        drawn: list[list[float]] = []
        state = {"model": nn.Linear(2, 2), "rng": RngState()}
        with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
            for step in range((checkpointer.restore(state) or 0) + 1, steps + 1):
                drawn.append(_draw())
                if step % 100 == 0:
                    checkpointer.async_save(state, step)
                checkpointer.maybe_finalize()
        return drawn

    _seed(1)
    run(100)
    expected = run(103)
    assert len(expected) == 3
    _seed(2)
    assert run(103) == expected


@pytest.mark.gpu
def test_a_gpu_goes_on_where_it_was(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    state = {"rng": RngState()}
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    with Checkpointer(tmp_path, queue=queue) as checkpointer:
        checkpointer.save(state, 1)
        expected = torch.rand(5, device="cuda")
        checkpointer.restore(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def test_it_is_small_and_has_no_pickle(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, queue=queue) as checkpointer:
        checkpointer.save({"rng": RngState()}, 1)
    opened = ckpt.open(tmp_path)
    assert {name: (lazy.dtype, lazy.shape) for name, lazy in opened.items()} == {
        "rng/torch@rank0": ("uint8", (5056,)),
        "rng/numpy/state/key@rank0": ("uint32", (624,)),
        "rng/python/numbers@rank0": ("uint32", (625,)),
    }
    assert len((tmp_path / "step_00000001" / "state.json").read_bytes()) < 2000
