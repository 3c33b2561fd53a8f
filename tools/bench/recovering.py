"""One job of two ranks that is made to fail again and again, and takes notes on how it comes back.

    parent                          each rank
    Recoveries.of(scenario)    ──▶ train: prepare the scenario, barrier, rank 1 raises
                                      abort hook, finalize hook, train again, first step
         notes of all ranks    ◀──── what happened when, CLOCK_MONOTONIC: one clock for all processes

A rank is `python -m tools.bench.recovering --gb 1 --folder DIR`.
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
from tools.bench.limits import CopyLimit
from tools.bench.reading import drop_cache
from tools.bench.state import make_state, tensors

__all__ = ["SCENARIOS", "FaultyJob"]

SCENARIOS = ("bare", "memory", "drain", "abort", "warm", "cold")
_END = "end"
_LONG = timedelta(minutes=10)


class InjectedError(Exception):
    """What rank 1 raises."""


class FaultyJob:
    """This rank. `bare` restarts without any checkpoint; `warm` and `cold` restore from storage, by a Checkpointer that
    has nothing in memory; the others have the newest step in staging memory. In `drain` and `abort` all ranks have
    staged a save that is still being written."""

    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._folder = folder
        self._state = make_state(total_bytes)
        self._copy = CopyLimit(tensors(self._state))
        self._saving = self._checkpointer()
        self._restoring: ckpt.Checkpointer | None = None
        self._scenario = ""
        self._step = 0
        self.notes: dict[str, Any] = {}

    def run(self) -> None:
        wrapper = inprocess.Wrapper(
            abort=inprocess.Compose(CheckpointAbort(self._saving), AbortTorchDistributed(), _Detected(self)),
            finalize=_Recover(self),
            soft_timeout=_LONG,
            hard_timeout=2 * _LONG,
            barrier_timeout=3 * _LONG,
            completion_timeout=3 * _LONG,
        )
        wrapper(self.train)()
        self._saving.close()

    def train(self, call: inprocess.CallWrapper | None = None) -> None:
        """One iteration: finish a step, say how the fault before was survived, fail in the next way asked for."""
        assert call is not None
        self.note("entered")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=call.store, rank=rank, world_size=world_size)
        self._train_step()
        self.note("stepped")
        print(json.dumps(self.notes), flush=True)
        self._scenario = sys.stdin.readline().strip() or _END
        self.notes = {}
        if self._scenario == _END:
            dist.destroy_process_group()
            return
        self._prepare(self._scenario)
        dist.barrier()
        if rank == 1:
            self.note("fault")
            raise InjectedError(self._scenario)
        self._train_step()

    def note(self, moment: str) -> None:
        self.notes[moment] = time.monotonic()

    def recover(self, state: inprocess.FrozenState) -> None:
        """What a training job would have as its finalize hook."""
        self.note("finalize")
        if self._restoring is not None:
            on_fault = CheckpointFinalize(self._restoring, "abort" if self._scenario == "abort" else "drain")
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
        checkpointer = ckpt.Checkpointer(self._folder, keep_last=2, timeout=_LONG)
        checkpointer.register(**self._state)
        return checkpointer

    def _prepare(self, scenario: str) -> None:
        self._restoring = None if scenario == "bare" else self._saving
        if scenario == "memory" or not self._step:
            self._next_step()
            self._saving.save(self._state, self._step)
            dist.barrier()
            self.notes["memcpy_s"] = self._copy.measure()
        if scenario in ("drain", "abort"):
            self._next_step()
            self._saving.async_save(self._state, self._step)
        elif scenario in ("warm", "cold"):
            self._restoring = self._checkpointer()
            dist.barrier()
            newest = self._folder / f"step_{self._saving.latest_step():08d}"
            if scenario == "cold":
                drop_cache([path for path in newest.rglob("*") if path.is_file()])

    def _next_step(self) -> None:
        self._step += 1

    def _train_step(self) -> None:
        """As small as a step can be: a sum over the ranks."""
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()


class _Detected(Abort):
    def __init__(self, job: FaultyJob) -> None:
        self._job = job

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        self._job.note("detected")
        return state


class _Recover(Finalize):
    def __init__(self, job: FaultyJob) -> None:
        self._job = job

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        self._job.recover(state)
        return state


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recovering")
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(created).3f %(name)s %(message)s")
    FaultyJob(1e9 * options.gb, options.folder).run()


if __name__ == "__main__":
    main()
