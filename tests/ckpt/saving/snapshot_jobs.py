"""Trainings of a few real ranks that make a snapshot of every step, and what their state must be after each."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize, CheckpointInitialize
from inprocess.abort import AbortTorchDistributed
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from tests.inprocess.restarting import UNBOUNDED

FLOATS = 20_000

At = Callable[[int, int, int], None]
"""What happens in a step: is called with iteration, rank and step, when the snapshot of the step before is made."""


def fresh() -> dict[str, Any]:
    """The state before the first step."""
    return {
        "weights": {f"w{i}": torch.full((FLOATS,), float(i)) for i in range(3)},
        "turned": torch.zeros(30, 20).t(),
        "own": ckpt.PerRank({"seen": torch.zeros(8), "log": ""}),
        "count": {"steps": 0},
    }


def train_step(state: dict[str, Any], rank: int, step: int) -> None:
    """Make the state of `step` out of that of the step before."""
    for number, tensor in enumerate(state["weights"].values()):
        tensor.mul_(0.5).add_(step + number)
    state["turned"].add_(step)
    state["own"].value["seen"].add_(step * (rank + 1))
    state["own"].value["log"] = f"{rank}:{step}"
    state["count"]["steps"] = step


def is_state_of(state: dict[str, Any], rank: int, step: int) -> bool:
    """Return whether a rank has the state of a step, to the bit."""
    expected = fresh()
    for number in range(1, step + 1):
        train_step(expected, rank, number)
    same = all(state["weights"][name].equal(tensor) for name, tensor in expected["weights"].items())
    same = same and state["turned"].equal(expected["turned"]) and state["count"] == expected["count"]
    own, wanted = state["own"].value, expected["own"].value
    return same and own["seen"].equal(wanted["seen"]) and own["log"] == wanted["log"]


class Faults:
    """Raises, or kills this process, in given steps of an iteration."""

    def __init__(self, *faults: tuple[str, int, int, int]) -> None:
        """`faults` are kind ("raise" or "kill"), iteration, rank, step."""
        self._faults = faults

    def __call__(self, iteration: int, rank: int, step: int) -> None:
        for kind, *when in self._faults:
            if when == [iteration, rank, step]:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("a fault on one rank")


def restarted(
    initial_rank: int,
    world_size: int,
    root: Path,
    at: At,
    active: int | None = None,
    steps: int = 8,
    registered: bool = False,
    wait_for: Callable[[], None] | None = None,
    snapshots: ckpt.Snapshots | int = 1,
    **options: Any,
) -> list[tuple[int, int, int | None, str, bool]]:
    """Train with a snapshot of every step, in the wrapper; return what each iteration began with.

    Iteration, rank, step, tier, and whether the state was that of the step. Of all ranks `active` train, the others are
    spares. With `registered` the state is made once, and restored before the function is called again. With `wait_for`
    an iteration of fewer ranks trains nothing, but waits for that and begins again.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the parent that forked it
    checkpointer = ckpt.Checkpointer(root, snapshots=snapshots, timeout=timedelta(seconds=20), **options)
    begun: list[tuple[int, int, int | None, str, bool]] = []
    kept = fresh()
    if registered:
        checkpointer.register(**kept)
    assignment = (ShiftRanks(),) if active is None else (MaxActiveWorldSize(active), ShiftRanks())

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        initialize=CheckpointInitialize(checkpointer) if registered else None,
        finalize=CheckpointFinalize(checkpointer),
        rank_assignment=inprocess.Compose(*assignment),
        soft_timeout=timedelta(seconds=25),
        hard_timeout=timedelta(seconds=40),
        last_call_wait=timedelta(seconds=0.1),
        monitor_thread_interval=timedelta(seconds=0.1),
        monitor_process_interval=timedelta(seconds=0.1),
        **UNBOUNDED,
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo")
        rank, state = dist.get_rank(), kept if registered else fresh()
        step = checkpointer.resume_step if registered else checkpointer.restore(state)
        report = checkpointer.last_restore
        tier = "" if report is None else report.tier
        begun.append((call.iteration, rank, step, tier, is_state_of(state, rank, step or 0)))
        dist.barrier()  # all have noted that before a fault of one ends the iteration
        if wait_for is not None and dist.get_world_size() < world_size:
            dist.barrier()
            wait_for()
            raise RuntimeError("once more, with those that have come")
        for current in range((step or 0) + 1, steps + 1):
            at(call.iteration, rank, current)
            train_step(state, rank, current)
            checkpointer.step(state, current)
            dist.barrier()  # so that all have it before one fails
        dist.destroy_process_group()

    train()
    checkpointer.close()
    return begun


def resized(initial_rank: int, world_size: int, root: Path, at: At) -> list[tuple[int, int, int | None, str, bool]]:
    """As `restarted`, of a state that does not depend on the number of ranks."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    checkpointer = ckpt.Checkpointer(root, snapshots=1, timeout=timedelta(seconds=20))
    begun: list[tuple[int, int, int | None, str, bool]] = []

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        soft_timeout=timedelta(seconds=25),
        hard_timeout=timedelta(seconds=40),
        last_call_wait=timedelta(seconds=0.1),
        monitor_thread_interval=timedelta(seconds=0.1),
        monitor_process_interval=timedelta(seconds=0.1),
        **UNBOUNDED,
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo")
        rank, state = dist.get_rank(), {"weights": [torch.zeros(FLOATS) for _ in range(6)], "count": {"steps": 0}}
        step = checkpointer.restore(state)
        report = checkpointer.last_restore
        expected = torch.full((FLOATS,), float(sum(range((step or 0) + 1))))
        right = all(tensor.equal(expected) for tensor in state["weights"]) and state["count"] == {"steps": step or 0}
        begun.append((call.iteration, rank, step, "" if report is None else report.tier, right))
        for current in range((step or 0) + 1, 9):
            at(call.iteration, rank, current)
            for tensor in state["weights"]:
                tensor.add_(current)
            state["count"]["steps"] = current
            checkpointer.step(state, current)
            dist.barrier()
        dist.destroy_process_group()

    train()
    checkpointer.close()
    return begun
