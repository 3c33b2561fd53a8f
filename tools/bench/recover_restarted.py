"""One rank of a job that fails again and again in its processes, and notes how it comes back; see `recover`.

    python -m tools.bench.recover_restarted --gb 1 --folder DIR

It reads a situation per line on standard input, and writes the notes of the recovery on standard output.
"""

import argparse
import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from inprocess.abort import Abort, AbortTorchDistributed
from inprocess.finalize import Finalize
from tools.bench.harness import UNBOUNDED_FAULTS
from tools.bench.limits import CopyLimit, drop_cache
from tools.bench.workload import make_state, tensors

_END = "end"
_LONG = timedelta(minutes=10)


class InjectedError(Exception):
    """The fault: raised by rank 1."""


class FailingRank:
    """This rank, in the situation that is asked for.

    `bare` restarts without any checkpoint. `warm` and `cold` restore from storage, by a Checkpointer that has nothing
    in memory; the others have the newest step in staging memory. In `drain` and `abort` all ranks have staged a save
    that is still being written.
    """

    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._folder = folder
        self._state = make_state(total_bytes)
        self._copy = CopyLimit(tensors(self._state))
        self._saving = self._checkpointer()
        self._restoring: ckpt.Checkpointer | None = None
        self._situation = ""
        self._step = 0
        self.notes: dict[str, Any] = {}

    def run(self) -> None:
        """Train until the end is asked for."""
        wrapper = inprocess.Wrapper(
            abort=inprocess.Compose(CheckpointAbort(self._saving), AbortTorchDistributed(), _Detected(self)),
            finalize=_Recover(self),
            soft_timeout=_LONG,
            hard_timeout=2 * _LONG,
            barrier_timeout=3 * _LONG,
            completion_timeout=3 * _LONG,
            **UNBOUNDED_FAULTS,
        )
        wrapper(self.train)()
        self._saving.close()

    def train(self, call: inprocess.CallWrapper | None = None) -> None:
        """Run one iteration: finish a step, write the notes of the last recovery, fail in the next situation."""
        assert call is not None
        self.note("entered")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=call.store, rank=rank, world_size=world_size)
        self._train_step()
        self.note("stepped")
        print(json.dumps(self.notes), flush=True)
        self._situation = sys.stdin.readline().strip() or _END
        self.notes = {}
        if self._situation == _END:
            dist.destroy_process_group()
            return
        self._prepare(self._situation)
        dist.barrier()
        if rank == 1:
            self.note("fault")
            raise InjectedError(self._situation)
        self._train_step()

    def note(self, moment: str) -> None:
        """Note the time of now."""
        self.notes[moment] = time.monotonic()

    def recover(self, state: inprocess.FrozenState) -> None:
        """Restore, as the finalize hook of a training job would."""
        self.note("finalize")
        if self._restoring is not None:
            on_fault = CheckpointFinalize(self._restoring, "abort" if self._situation == "abort" else "drain")
            on_fault(state)
            report = self._restoring.last_restore
            assert report is not None
            self.notes["restore_s"] = report.seconds
            self.notes["step"] = report.step
            self.notes["from_memory"] = not report.storage_bytes
        self.note("finalized")
        if self._restoring is not None and self._restoring is not self._saving:
            self._restoring.close()

    def _checkpointer(self) -> ckpt.Checkpointer:
        checkpointer = ckpt.Checkpointer(self._folder, keep=2, timeout=_LONG)
        checkpointer.register(**self._state)
        return checkpointer

    def _prepare(self, situation: str) -> None:
        self._restoring = None if situation == "bare" else self._saving
        if situation == "memory" or not self._step:
            self._step += 1
            self._saving.save(self._state, self._step)
            dist.barrier()
            self.notes["memcpy_s"] = self._copy.measure()
        if situation in ("drain", "abort"):
            self._step += 1
            self._saving.async_save(self._state, self._step)
        elif situation in ("warm", "cold"):
            self._restoring = self._checkpointer()
            dist.barrier()
            newest = self._folder / f"step_{self._saving.latest_step():08d}"
            if situation == "cold":
                drop_cache([path for path in newest.rglob("*") if path.is_file()])

    def _train_step(self) -> None:
        """The smallest step there is: a sum over the ranks."""
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()


class _Detected(Abort):
    def __init__(self, rank: FailingRank) -> None:
        self._rank = rank

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        self._rank.note("detected")
        return state


class _Recover(Finalize):
    def __init__(self, rank: FailingRank) -> None:
        self._rank = rank

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        self._rank.recover(state)
        return state


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recover_restarted")
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(created).3f %(name)s %(message)s")
    FailingRank(1e9 * options.gb, options.folder).run()


if __name__ == "__main__":
    main()
