"""Snapshots: what one stops training for, what one before each step costs, and a restart that restores one.

One rank, and two that share the state, with a process group of gloo. A round has many short turns: a copy of the same
bytes in memory, some training steps alone, and as many with a snapshot before each, in alternating order. Of each the
median of the round is taken, of the slowest rank. At its end rank 0 raises an exception: until all ranks have
the snapshot of the step before and can train.

A snapshot takes a few percent of the seconds that a long window of steps takes, and windows one after the other differ
by as much; so few steps are compared at a time, and often.
"""

import argparse
import gc
import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import inprocess
from ckpt import Checkpointer
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from tools.bench.harness import (
    UNBOUNDED_FAULTS,
    Row,
    add_disk_option,
    add_size_options,
    print_report,
    temporary_folder,
    write_json,
)
from tools.bench.limits import CopyLimit
from tools.bench.processes import Note, Notes, run_forked
from tools.bench.workload import State, StepLoop, make_state, tensors

_WORLDS = (1, 2)
_STEP_S = 0.1
_STEPS = 3  # of each kind in a turn
_TURNS = 8  # in a round
_WARM = 4  # snapshots, so that each slot was written once
_TIMEOUT_S = 1800.0
_TARGET_STALL, _TARGET_WINDOW, _TARGET_RESTART_S = 1.1, 1.2, 0.2
_TARGET_TRAINING = 1.03  # of the steps alone and the stalls


@dataclass(frozen=True)
class _Round:
    """Seconds: of a copy, of the call of a snapshot, of what a snapshot adds to training, its call included.

    `step` is a training step alone. `restart` is from a fault until all ranks have a process group again, `restore`
    that of the snapshot then.
    """

    copy: float
    stall: float
    added: float
    step: float
    restart: float
    restore: float


@dataclass(frozen=True)
class _Job:
    """A rank of the job: `rounds` iterations that count, after one that does not. Each ends with a fault."""

    world_size: int
    rounds: int
    total_bytes: float
    root: Path

    def run(self, rank: int, notes: Notes, folder: Path) -> None:
        """Run the rank to its end."""
        logging.getLogger("inprocess").setLevel(logging.CRITICAL + 1)
        logging.getLogger("ckpt").setLevel(logging.ERROR)
        torch.set_num_threads(max(1, 2 // self.world_size))
        state = make_state(self.total_bytes / self.world_size)
        mine = {f"rank{rank}": state}
        limit, loop = CopyLimit(tensors(state)), StepLoop(_STEP_S)
        checkpointer = Checkpointer(self.root, snapshots=1)
        gc.freeze()

        @inprocess.Wrapper(
            abort=inprocess.Compose(CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()),
            finalize=CheckpointFinalize(checkpointer),
            **UNBOUNDED_FAULTS,
        )
        def train(call: inprocess.CallWrapper | None = None) -> None:
            assert call is not None
            dist.init_process_group("gloo")
            dist.barrier()
            if call.iteration:
                notes.add("running", call.iteration - 1)
                begin = time.perf_counter()
                step = checkpointer.restore(mine)
                assert step is not None
                notes.add("restore", call.iteration - 1, time.perf_counter() - begin)
            else:
                step = 0
            if call.iteration <= self.rounds:
                self._measure(call, step, mine, limit, loop, checkpointer, notes)
                dist.barrier()
                if rank == 0:
                    notes.add("fault", call.iteration)
                    raise RuntimeError("of the benchmark")
                dist.barrier()  # which rank 0 never enters
            dist.destroy_process_group()

        train()
        limit.close()
        checkpointer.close()

    def _measure(
        self,
        call: inprocess.CallWrapper,
        step: int,
        state: dict[str, State],
        limit: CopyLimit,
        loop: StepLoop,
        checkpointer: Checkpointer,
        notes: Notes,
    ) -> None:
        def snapshot() -> float:
            nonlocal step
            step += 1
            begin = time.perf_counter()
            checkpointer.step(state, step)
            return time.perf_counter() - begin

        for _ in range(_WARM):
            snapshot()
            dist.barrier()
        found: dict[str, list[float]] = defaultdict(list)
        for turn in range(_TURNS):
            dist.barrier()
            found["copy"].append(limit.measure())
            taken = {}
            for with_snapshots in (turn % 2 == 0, turn % 2 != 0):
                loop.run(1)  # what was done before does not count
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(_STEPS):
                    if with_snapshots:
                        found["stall"].append(snapshot())
                    loop.run(1)
                taken[with_snapshots] = (time.perf_counter() - begin) / _STEPS
                dist.barrier()
            found["step"].append(taken[False])
            found["added"].append(taken[True] - taken[False])
        for name, seconds in found.items():
            notes.add(name, call.iteration, median(seconds))


def _rounds_of(notes: list[Note]) -> list[_Round]:
    """Return the rounds that count."""
    found: dict[tuple[int, str], list[Note]] = defaultdict(list)
    for note in notes:
        found[note.iteration, note.name].append(note)
    rounds = []
    for iteration in sorted({note.iteration for note in notes if note.name == "fault"} - {0}):
        (fault,) = found[iteration, "fault"]
        measured = {
            field.name: max(note.value for note in found[iteration, field.name])
            for field in fields(_Round)
            if field.name != "restart"
        }
        running = max(note.time for note in found[iteration, "running"])
        rounds.append(_Round(**measured, restart=running - fault.time))
    return rounds


def _rows(world_size: int, taken: list[_Round]) -> list[Row]:
    copy, step = [each.copy for each in taken], [each.step for each in taken]
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return [
        Row(f"{ranks}: limit: copy to warm memory", copy),
        Row("  stall of a snapshot, steady", [each.stall for each in taken], copy, _TARGET_STALL),
        Row("  one before each step: added to a step", [each.added for each in taken], copy, _TARGET_WINDOW),
        Row("  training step alone", step),
        Row(
            "  step and snapshot, to the step alone and the stall",
            [each.step + each.added for each in taken],
            [each.step + each.stall for each in taken],
            _TARGET_TRAINING,
        ),
        Row("  exception to process group", [each.restart for each in taken], [_TARGET_RESTART_S] * len(taken), 1.0),
        Row("  restore of the snapshot", [each.restore for each in taken], copy),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=7)
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, and print a table."""
    rows: list[Row] = []
    values: dict[str, list[dict[str, float]]] = {}
    with temporary_folder(options.folder) as folder:
        for world_size in _WORLDS:
            job = _Job(world_size, options.rounds, 1e9 * options.gb, folder / f"root{world_size}")
            notes, _ = run_forked(job.run, world_size, _TIMEOUT_S)
            taken = _rounds_of(notes)
            rows += _rows(world_size, taken)
            values[f"world_size_{world_size}"] = [asdict(each) for each in taken]
    title = f"{options.gb:g} GB in all, {options.rounds} rounds of {_TURNS} turns"
    print_report(f"{title}; ratio: median of the rounds, to the limit in the same round", rows)
    write_json(options.json, {"rows": rows, **values})
