"""One rank of a job under `ckpt_launcher`, of which rank 1 first raises an exception, then is killed; see `recover`.

    ckpt_launcher ... -m tools.bench.recover_killed --gb 1 --folder DIR --notes FILE

Every rank has a part of the state for itself, and a snapshot of every step. The part of the rank that is killed is in
memory that its neighbours have mapped. An iteration of fewer ranks waits until the replacement is there. The rank that
fails, and each that has come back, appends one line of notes for each fault.
"""

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from inprocess.abort import AbortTorchDistributed
from inprocess.rank_assignment import LauncherOrder
from tools.bench.harness import UNBOUNDED_FAULTS
from tools.bench.limits import CopyLimit
from tools.bench.workload import make_state, tensors

_VICTIM = 1
_STEPS = 5  # before a fault; each slot was written once then
_POLL_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recover_killed")
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = {f"rank{rank}": make_state(1e9 * options.gb / world_size)}
    limit = CopyLimit(tensors(state[f"rank{rank}"]))
    checkpointer = ckpt.Checkpointer(options.folder / "root", snapshots=1, timeout=timedelta(minutes=2))
    was_killed = options.folder / "killed"
    waited: dict[str, float] = {}

    def append(**notes: Any) -> None:
        kind = "killed" if was_killed.exists() else "raised"
        with options.notes.open("a") as file:
            file.write(json.dumps({"rank": rank, "kind": kind, **notes}) + "\n")

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        rank_assignment=LauncherOrder(),
        rejoin="next-restart",  # the function asks for it, and notes when
        **UNBOUNDED_FAULTS,
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo")
        if dist.get_world_size() < world_size:
            while not call.newcomers:
                time.sleep(_POLL_S)
            waited["joining"] = time.monotonic()
            raise RuntimeError("again, with the replacement")
        step, entered = 0, time.monotonic()
        if call.iteration:
            step, times = _come_back(checkpointer, state, limit)
            append(entered=entered, **waited, **times)
            dist.barrier()
        if not was_killed.exists():
            _train(checkpointer, state, step)
            if rank == _VICTIM and call.iteration:
                was_killed.touch()
                append(fault=time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == _VICTIM:
                append(fault=time.monotonic())
                raise RuntimeError("the first fault")
            dist.barrier()  # in which the rank that fails is missing
        dist.barrier()
        dist.destroy_process_group()

    train()
    limit.close()
    checkpointer.close()


def _come_back(checkpointer: ckpt.Checkpointer, state: Any, limit: CopyLimit) -> tuple[int, dict[str, Any]]:
    """Restore, and take a first step; return the step that was restored, and what is to be noted."""
    begin = time.monotonic()
    step = checkpointer.restore(state)
    restored = time.monotonic()
    report = checkpointer.last_restore
    assert report is not None
    assert step is not None
    dist.barrier()
    times = {"restore_s": restored - begin, "restored": restored, "stepped": time.monotonic()}
    dist.barrier()
    return step, {**times, "tier": report.tier, "memcpy_s": limit.measure()}


def _train(checkpointer: ckpt.Checkpointer, state: Any, first: int) -> None:
    for step in range(first + 1, first + 1 + _STEPS):
        checkpointer.step(state, step)
        dist.barrier()


if __name__ == "__main__":
    main()
