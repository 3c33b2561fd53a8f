"""Replicas of snapshots on another node: what they add to training that makes a snapshot before each step.

Two ranks in two places, on one machine: what is sent goes through its loopback device, and sender, receiver and
training share its cores. A round has turns of training steps, each with a snapshot before it: without replicas, and
with them. A turn with replicas begins while one is being sent, a turn without when all have arrived. Of each the median
of the round is taken, of the slowest rank.
"""

import argparse
import gc
import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist

from ckpt import Checkpointer, Snapshots
from tools.bench.harness import (
    Row,
    add_disk_option,
    add_size_options,
    positive,
    print_report,
    temporary_folder,
    write_json,
)
from tools.bench.processes import Note, Notes, cpu_seconds, run_forked
from tools.bench.workload import StepLoop, make_state, size_of, tensors

_RANKS = 2
_STEP_S = 0.1
_STEPS = 8  # in a turn
_TURNS = 4  # of each kind in a round
_WARM = 6  # snapshots, so that each slot was written once
_TIMEOUT_S = 1800.0
_ARRIVAL_S = 120.0
_TARGET_WINDOW = 1.3
_PROCESS_NAME = "ckpt-replicas"


@dataclass(frozen=True)
class _Round:
    """Seconds of a step and the snapshot before it: without replicas, and with them.

    `rate` is how many bytes per second reach the buddy of a rank then, `cpu` the processor time of a rank's replica
    process for each GB that it sends and receives.
    """

    without: float
    replicated: float
    rate: float
    cpu: float


@dataclass(frozen=True)
class _Job:
    """A rank of the job, with at most `bandwidth` bytes per second; `rounds` count, after one that does not."""

    rounds: int
    total_bytes: float
    bandwidth: float | None
    root: Path

    def run(self, rank: int, notes: Notes, folder: Path) -> None:
        """Run the rank to its end."""
        logging.getLogger("ckpt").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        state = {f"rank{rank}": make_state(self.total_bytes / _RANKS)}
        training = _Training(state, StepLoop(_STEP_S))
        plain = Checkpointer(self.root / "plain", snapshots=1)
        replicating = Checkpointer(
            self.root / "replicating",
            snapshots=Snapshots(every=1, replicas=1, place=f"place {rank}", host="127.0.0.1", bandwidth=self.bandwidth),
            timeout=timedelta(minutes=5),
        )
        gc.freeze()
        for checkpointer in (plain, replicating):
            training.run(checkpointer, _WARM)
        training.await_arrival(replicating)
        share = size_of(tensors(state[f"rank{rank}"]))
        for number in range(self.rounds + 1):
            found: dict[str, list[float]] = defaultdict(list)
            for turn in range(_TURNS):
                for with_replicas in (turn % 2 == 0, turn % 2 != 0):
                    if not with_replicas:
                        found["without"].append(training.run(plain, _STEPS))
                        continue
                    training.run(replicating, 2)
                    before, began = _replica_seconds(), time.perf_counter()
                    sent = training.snapshots_sent
                    found["replicated"].append(training.run(replicating, _STEPS))
                    training.await_arrival(replicating)
                    copies = training.snapshots_sent - sent
                    found["rate"].append(copies * share / (time.perf_counter() - began))
                    found["cpu"].append((_replica_seconds() - before) / (copies * share / 1e9))
            if number:
                for name, values in found.items():
                    notes.add(name, number, median(values))
        dist.barrier()
        plain.close()
        replicating.close()
        dist.destroy_process_group()


class _Training:
    """Steps of training on all ranks, each with a snapshot before it."""

    def __init__(self, state: object, loop: StepLoop) -> None:
        self._state = state
        self._loop = loop
        self._step = 0
        self._known: int | None = None
        self.snapshots_sent = 0

    def run(self, checkpointer: Checkpointer, steps: int) -> float:
        """Return the seconds of a step, on average."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step += 1
            checkpointer.step(self._state, self._step)
            self._loop.run(1)
            self._count(checkpointer)
        seconds = (time.perf_counter() - begin) / steps
        dist.barrier()
        return seconds

    def await_arrival(self, checkpointer: Checkpointer) -> None:
        """Wait until the last snapshot is replicated on all ranks. TimeoutError."""
        deadline = time.monotonic() + _ARRIVAL_S
        while checkpointer.replicated_step != self._step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step} is not replicated, only {checkpointer.replicated_step}")
            time.sleep(0.002)
            checkpointer.maybe_finalize()
            self._count(checkpointer)
        dist.barrier()

    def _count(self, checkpointer: Checkpointer) -> None:
        """Count what became known to be replicated; one that ends between two calls may be counted with the next."""
        now = checkpointer.replicated_step
        if now is not None and now != self._known:
            self.snapshots_sent += 1
            self._known = now


def _replica_seconds() -> float:
    """Return the processor time of this rank's replica process."""
    below = psutil.Process().children(recursive=True)
    return sum(cpu_seconds(child.pid) for child in below if child.name() == _PROCESS_NAME)


def _rounds_of(notes: list[Note]) -> list[_Round]:
    """Return the rounds that count: of times the slowest rank's."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for note in notes:
        found[note.iteration, note.name].append(note.value)
    return [
        _Round(**{each.name: max(found[number, each.name]) for each in fields(_Round)})
        for number in sorted({note.iteration for note in notes})
    ]


def _rows(title: str, taken: list[_Round]) -> list[Row]:
    without = [each.without for each in taken]
    return [
        Row(f"{title}: a step and its snapshot, without replicas", without),
        Row("  with replicas", [each.replicated for each in taken], without, _TARGET_WINDOW),
        Row(
            "  GB per second that reach the buddy of a rank",
            [each.rate for each in taken],
            show=lambda rate: f"{rate / 1e9:.2f}",
        ),
        Row(
            "  processor time of a rank's replica process for each GB",
            [each.cpu for each in taken],
        ),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=5)
    parser.add_argument(
        "--bandwidth",
        type=positive,
        nargs="+",
        default=[0.25, 1.0],
        metavar="GB/S",
        help="limits of what a rank sends, one job for each, besides one without a limit (default: 0.25 1)",
    )
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, and print a table."""
    rows: list[Row] = []
    values: dict[str, list[dict[str, float]]] = {}
    for limit in (None, *options.bandwidth):
        with temporary_folder(options.folder) as folder:
            job = _Job(options.rounds, 1e9 * options.gb, None if limit is None else 1e9 * limit, folder)
            notes, _ = run_forked(job.run, _RANKS, _TIMEOUT_S)
        taken = _rounds_of(notes)
        title = "no limit" if limit is None else f"at most {limit:g} GB/s"
        rows += _rows(title, taken)
        values[title] = [asdict(each) for each in taken]
    title = f"{options.gb:g} GB on {_RANKS} ranks, {options.rounds} rounds; ratio: to the same turn without replicas"
    print_report(title, rows)
    write_json(options.json, {"rows": rows, **values})
