"""One rank of a job under `ckpt_launcher`, of which rank 1 is killed and replaced; see `recover`.

    ckpt_launcher ... -m tools.bench.recover_killed --gb 1 --folder DIR --notes FILE

Every rank has a part of the state for itself, and a snapshot of every step. The part of the rank that is killed is in
memory that its neighbours have mapped. An iteration of fewer ranks waits until the replacement is there. The rank that
is killed, and each that has come back, appends one line of notes.
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
from tools.bench.limits import CopyLimit
from tools.bench.workload import make_state, tensors

__all__ = ["main"]

_VICTIM = 1
_STEPS = 5  # before the fault; each slot was written once then
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
    checkpointer = ckpt.Checkpointer(options.folder / "root", snapshot_every=1, timeout=timedelta(minutes=2))
    notes: dict[str, Any] = {}

    def append() -> None:
        with options.notes.open("a") as file:
            file.write(json.dumps({"rank": rank, **notes}) + "\n")

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo")
        if dist.get_world_size() < world_size:
            while not call.newcomers:
                time.sleep(_POLL_S)
            notes["joining"] = time.monotonic()
            raise RuntimeError("again, with the replacement")
        notes["entered"] = time.monotonic()
        if not call.iteration:
            _fail(checkpointer, state, rank, notes, append)
        begin = time.monotonic()
        step = checkpointer.restore(state)
        notes["restored"] = time.monotonic()
        report = checkpointer.last_restore
        assert report is not None
        notes.update(restore_s=notes["restored"] - begin, tier=report.tier, step=step)
        dist.barrier()
        notes["stepped"] = time.monotonic()
        dist.barrier()
        notes["memcpy_s"] = limit.measure()
        append()
        dist.barrier()
        dist.destroy_process_group()

    train()
    limit.close()
    checkpointer.close()


def _fail(checkpointer: ckpt.Checkpointer, state: Any, rank: int, notes: dict[str, Any], append: Any) -> None:
    """Train until one rank is killed."""
    for step in range(1, _STEPS + 1):
        checkpointer.step(state, step)
        dist.barrier()
    if rank == _VICTIM:
        notes.clear()
        notes["fault"] = time.monotonic()
        append()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


if __name__ == "__main__":
    main()
