"""Data loaders of torchdata in a state: a new process goes on with the batch after the last one that was saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from tests.support import run_ranks
from tests.support.frameworks import TORCHDATA
from tests.support.selection import full_only

pytest.importorskip("torchdata")

from torchdata.nodes import Loader, MapStyleWrapper, ParallelMapper
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES, BATCH, STEPS = 24, 3, 20  # two epochs and a half
pytestmark = [
    pytest.mark.timeout(120),  # each starts processes that import torch, and their workers
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.fixture(scope="module")
def queue() -> Iterator[ckpt.AsyncCallsQueue]:
    with ckpt.AsyncCallsQueue() as queue:
        yield queue


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> int:
        return number


class Stream(torch.utils.data.IterableDataset[float]):
    """Random numbers, different for each worker, of three generators whose states are an array, a tensor and ints."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Stream:
        info = torch.utils.data.get_worker_info()
        seed = self.seed + (0 if info is None else info.id)
        self.old, self.new = np.random.RandomState(seed), np.random.default_rng(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.left = SAMPLES // (1 if info is None else info.num_workers)
        return self

    def __next__(self) -> float:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.old.random_sample() + self.new.random() + torch.rand((), generator=self.torch).item()

    def state_dict(self) -> dict[str, Any]:
        return {
            "old": self.old.get_state(),
            "new": self.new.bit_generator.state,
            "torch": self.torch.get_state(),
            "left": self.left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        iter(self)
        self.old.set_state(state["old"])
        self.new.bit_generator.state = state["new"]
        self.torch.set_state(state["torch"])
        self.left = state["left"]


def plus_one(number: int) -> int:
    return number + 1


class Derived(StatefulDataLoader[Any]):
    """As frameworks derive their own."""


def new_loader(kind: str, workers: int, seed: int) -> Any:
    match kind:
        case "map":
            return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers)
        case "persistent":
            return Derived(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
        case "stream":
            return StatefulDataLoader(Stream(seed), batch_size=BATCH, num_workers=workers)
        case "nodes":
            sampler = torch.utils.data.SequentialSampler(range(SAMPLES))
            node = ParallelMapper(MapStyleWrapper(Numbers(), sampler), plus_one, num_workers=max(workers, 1))
            return Loader(node)
    raise ValueError(kind)


def train(
    rank: int, world_size: int, root: str, kind: str, workers: int, save_at: int | None, die_at: int | None
) -> list[tuple[list[float], float]]:
    """Return the batches and, beside each, a random number, from the step of the newest checkpoint on."""
    torch.manual_seed(rank if save_at is not None or die_at is not None else 1000 + os.getpid())
    loader, seen = new_loader(kind, workers, 100 * rank), []
    state = {"loader": loader, "rng": ckpt.RngState(), "step": 0}
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.restore(state)
        while state["step"] < STEPS:
            for batch in loader:
                state["step"] += 1
                seen.append((torch.as_tensor(batch).flatten().tolist(), torch.rand(()).item()))
                if state["step"] == save_at:
                    checkpointer.save(state, save_at)
                if state["step"] == die_at:
                    torch.distributed.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                if state["step"] == STEPS:
                    break
    return seen


@pytest.mark.parametrize(
    ("kind", "workers", "save_at"),
    [
        pytest.param("map", 0, 5, marks=full_only),
        ("map", 2, 8),  # the last batch of an epoch
        pytest.param("persistent", 2, 11, marks=full_only),
        pytest.param("stream", 0, 11, marks=full_only),
        pytest.param("stream", 2, 5, marks=full_only),
        ("nodes", 2, 5),
    ],
)
def test_a_new_process_goes_on_with_the_next_batch(kind: str, workers: int, save_at: int, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, str(tmp_path / "whole"), kind, workers, save_at, None, imports=TORCHDATA)
    died = {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    run_ranks(train, 2, str(tmp_path / "run"), kind, workers, save_at, save_at + 2, returncodes=died, imports=TORCHDATA)
    resumed = run_ranks(train, 2, str(tmp_path / "run"), kind, workers, None, None, imports=TORCHDATA)
    for one, other in zip(whole, resumed, strict=True):
        assert len(one.value) == STEPS
        assert other.value == one.value[save_at:]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    whole = run_ranks(train, before, str(tmp_path), "map", 0, 5, None, imports=TORCHDATA)
    resumed = run_ranks(train, after, str(tmp_path), "map", 0, None, None, imports=TORCHDATA)
    assert resumed[0].value == whole[0].value[5:]
    if after > before:
        numbers = [number for batch, _ in resumed[1].value[: SAMPLES // BATCH] for number in batch]
        assert sorted(numbers) == list(range(SAMPLES))  # it begins an epoch


def save_while_only_rank_0_reads(rank: int, world_size: int, root: str) -> list[Any]:
    loader = new_loader("map", 0, 0)
    numbers = iter(loader) if rank == 0 else iter(())
    with ckpt.Checkpointer(root) as checkpointer:
        for step in range(1, 4):
            checkpointer.save({"loader": loader}, step)
            next(numbers, None)
    again = new_loader("map", 0, 0)
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        checkpointer.restore({"loader": ckpt.PerRank(again)})
    return [len(list(again)), [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]]


def test_ranks_need_not_read_at_the_same_time(tmp_path: Path) -> None:
    results = run_ranks(save_while_only_rank_0_reads, 2, str(tmp_path), imports=TORCHDATA)
    assert [result.value[0] for result in results] == [SAMPLES // BATCH - 2, SAMPLES // BATCH]


def test_a_loader_with_other_workers_is_refused(tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(tmp_path, queue=queue) as checkpointer:
        checkpointer.save({"loader": new_loader("map", 0, 0)}, 1)
        with pytest.raises(
            ckpt.StateError, match=r"loader: the StatefulDataLoader does not continue .* number of work"
        ):
            checkpointer.restore({"loader": new_loader("map", 1, 0)})


def test_what_cannot_be_stored_is_named(tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    class Odd(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"files": [open]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    with (
        ckpt.Checkpointer(tmp_path, queue=queue) as checkpointer,
        pytest.raises(ckpt.StateError, match=r"loader/dataset_state/files/0: a .* cannot be stored"),
    ):
        checkpointer.save({"loader": StatefulDataLoader(Odd())}, 1)


def test_a_checkpoint_without_the_loader_does_not_fit(tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    loader = new_loader("map", 0, 0)
    with ckpt.Checkpointer(tmp_path, queue=queue) as checkpointer:
        checkpointer.save({"step": 1}, 1)
        with pytest.raises(ckpt.StateMismatchError, match="missing: loader"):
            checkpointer.restore({"step": 0, "loader": loader})
        checkpointer.restore({"step": 0, "loader": loader}, strict=False)
    assert len(list(loader)) == SAMPLES // BATCH


def test_the_state_is_one_value_that_needs_no_torch_to_read(tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    loader = new_loader("map", 0, 0)
    next(iter(loader))
    with ckpt.Checkpointer(tmp_path, queue=queue) as checkpointer:
        checkpointer.save({"loader": loader}, 1)
    with ckpt.open(tmp_path) as checkpoint:
        value = checkpoint.values_by_name["loader@rank0"]
    generator = value["_sampler_iter_state"]["sampler_iter_state"]["generator"]
    assert (value["_num_yielded"], repr(generator)) == (1, "<torch uint8[5056]>")
