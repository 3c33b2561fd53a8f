"""A rank of a job that is started again as a whole: trains with a snapshot of each step, and is killed in some of them.

    program.py FOLDER PLAN

PLAN is a JSON list with the step in which all ranks are killed in each start of the job, when the snapshot of the step
before is made on all ranks; null to train to the end. Each rank writes what it began with to FOLDER/START-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import ckpt
from tests.ckpt.keeper.jobs import began
from tests.ckpt.saving.snapshot_jobs import fresh, train_step

_LAST = 8


def main(folder: Path, plan: list[int | None]) -> None:
    """Take part in one start of the job."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with ckpt.Checkpointer(
        folder / "root", snapshots=ckpt.Snapshots(every=1, linger=timedelta(minutes=2))
    ) as checkpointer:
        state = fresh()
        step = checkpointer.restore(state) or 0
        (folder / f"{start}-{rank}.json").write_text(json.dumps(began(checkpointer, state, rank)))
        for current in range(step + 1, _LAST + 1):
            if plan[start] == current:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(state, rank, current)
            checkpointer.step(state, current)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
