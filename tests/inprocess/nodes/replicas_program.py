"""Program of the ranks of a laboratory: a training with a snapshot of every step, and replicas on other nodes.

The state of a step follows from its number, to the bit, so any rank can say whether what it has restored is right. It
goes on until the file `stop` is there, and makes no steps while there is one named `pause`; all ranks see these in the
same step. The process whose number is in the file `raise` takes it, and raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from inprocess.abort import AbortTorchDistributed
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from tests.inprocess.nodes.journal import Journal
from tests.inprocess.nodes.program import Options

FLOATS = 50_000
_STEP_S = 0.01  # the ranks are not to take all of the machine
_PAUSE, _STOP = 1, 2


@dataclass(frozen=True)
class Began:
    """What an iteration began with on a rank: the step restored, whether its state was right, and from where."""

    iteration: int
    rank: int
    world_size: int
    step: int | None
    right: bool
    tier: str
    remote_bytes: int
    storage_bytes: int
    damaged: tuple[int, ...]


def fresh() -> dict[str, Any]:
    """The state before the first step."""
    return {"weights": {f"w{i}": torch.full((FLOATS,), float(i)) for i in range(6)}, "count": {"steps": 0}}


def train_step(state: dict[str, Any], step: int) -> None:
    """Make the state of `step` out of that of the step before."""
    for number, tensor in enumerate(state["weights"].values()):
        tensor.mul_(0.75).add_(step + number)
    state["count"]["steps"] = step


def is_state_of(state: dict[str, Any], step: int) -> bool:
    """Return whether this is the state of a step, to the bit."""
    expected = fresh()
    for number in range(1, step + 1):
        train_step(expected, number)
    same = all(state["weights"][name].equal(tensor) for name, tensor in expected["weights"].items())
    return same and state["count"] == expected["count"]


def train(journal: Journal, active: int, options: dict[str, Any]) -> None:
    """Run a rank; of all ranks `active` train, the others are spares.

    `options` are those of the Checkpointer, and of its replicas.
    """
    with contextlib.suppress(RuntimeError):
        torch.set_num_threads(1)
    timeouts = Options(soft_timeout_s=15.0, hard_timeout_s=20.0, barrier_timeout_s=40.0).timeouts()
    snapshots = ckpt.Snapshots(1, replicas=1, bandwidth=options.pop("bandwidth", None))
    checkpointer = ckpt.Checkpointer(
        journal.folder / "root", snapshots=snapshots, timeout=timedelta(seconds=15), **options
    )

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer, drain_timeout=timedelta(seconds=5)),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(active), ShiftRanks()),
        monitor_process_logfile=journal.folder / "monitor_{rank}.log",
        monitor_process_pidfile=journal.folder / "monitor_{rank}.pid",
        **timeouts,
    )
    def function(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank, world_size, state = dist.get_rank(), dist.get_world_size(), fresh()
        step = checkpointer.restore(state)
        _note(journal, checkpointer.last_restore, call.iteration, rank, world_size, step, is_state_of(state, step or 0))
        replicated = paused_at = None
        while (wish := _wish(journal, rank)) != _STOP:
            if (journal.folder / "raise").exists() and _is_meant(journal):
                raise RuntimeError("injected")
            if wish != _PAUSE:
                step = (step or 0) + 1
                train_step(state, step)
                checkpointer.step(state, step)
                time.sleep(_STEP_S)
            elif paused_at != step:
                paused_at = step
                journal.note(f"paused at {step}", call.iteration, rank, world_size)
            checkpointer.maybe_finalize()
            if checkpointer.replicated_step != replicated:
                replicated = checkpointer.replicated_step
                journal.note(f"replicated {replicated}", call.iteration, rank, world_size)
        dist.destroy_process_group()

    function()
    checkpointer.close()


def _is_meant(journal: Journal) -> bool:
    """Take the file `raise`, if it has the number of this process."""
    file = journal.folder / "raise"
    with contextlib.suppress(FileNotFoundError):
        if file.read_text() == str(journal.process):
            file.unlink()
            return True
    return False


def _wish(journal: Journal, rank: int) -> int:
    """Return what the test wants, as all ranks see it in the same step."""
    files = (journal.folder / "pause", journal.folder / "stop")
    wish = torch.tensor([max((number for number, file in enumerate(files, 1) if file.exists()), default=0)])
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    return int(wish[0])


def _note(
    journal: Journal, report: Any, iteration: int, rank: int, world_size: int, step: int | None, right: bool
) -> None:
    where = ("", 0, 0, ()) if report is None else (
        report.tier, report.remote_memory_bytes, report.storage_bytes, report.damaged
    )  # fmt: skip
    line = Began(iteration, rank, world_size, step, right, *where)
    fd = os.open(journal.folder / "began.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(asdict(line)).encode() + b"\n")
    os.close(fd)


def began(folder: Path, iteration: int) -> list[Began]:
    """Return what all ranks have noted of an iteration."""
    file = folder / "began.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [Began(**json.loads(line)) for line in lines]
    return [each for each in found if each.iteration == iteration]
