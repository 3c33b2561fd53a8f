"""Jobs whose ranks fail on purpose, and the times of their restarts; a job that idles."""

import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

import inprocess
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from inprocess.store import PrefixStore
from tools.bench.forked import Note, Notes, run_forked

__all__ = ["KINDS", "Idle", "Restart", "measure_idle", "measure_restarts"]

_SETTLE_S = 0.02  # the others are in their collective by then
_TIMEOUT_S = 600.0

KINDS = ("exception", "kill -9", "SystemExit", "hang")


@dataclass(frozen=True)
class Restart:
    """One restart, in seconds from the fault. `floor`: destroy and make the group again and a barrier, just before.

    `unplanned` are the reasons of further restarts, before the group worked again.
    """

    detected: float
    running: float
    ready: float  # the group works again
    floor: float
    phases: dict[str, float]
    unplanned: list[str]


@dataclass
class Idle:
    """CPU seconds per second of waiting, in the rank and in its monitor process."""

    seconds: float
    shares: dict[str, float] = field(default_factory=dict)


def measure_restarts(kind: str, ranks: int, restarts: int, soft_timeout_s: float) -> list[Restart]:
    """`restarts` restarts: in one job, or each in a job of its own if the rank that fails is lost by it."""
    survives = kind in ("exception", "hang")
    jobs = [(restarts, 0)] if survives else [(1, number) for number in range(restarts)]
    found = []
    for faults, first in jobs:
        job = _Job(kind, ranks, faults, first % ranks, soft_timeout_s)
        notes, events = run_forked(job.run, ranks, _TIMEOUT_S)
        at = sorted(note.iteration for note in notes if note.name == "fault")
        found += [
            _restart_of(iteration, following, notes, events) for iteration, following in pairwise([*at, sys.maxsize])
        ]
    return found


@dataclass(frozen=True)
class _Job:
    """Ranks that meet in a collective; in each of the first iterations one of them, in turn, fails instead."""

    kind: str
    ranks: int
    faults: int
    first_victim: int
    soft_timeout_s: float

    def run(self, rank: int, notes: Notes, folder: Path) -> None:
        logging.getLogger("inprocess").setLevel(logging.CRITICAL + 1)
        options: dict[str, Any] = {}
        if self.kind == "hang":
            options["soft_timeout"] = timedelta(seconds=self.soft_timeout_s)
        wrapper = inprocess.Wrapper(monitor_process_logfile=folder / "rank-{rank}.log", **options)

        done: list[int] = []  # iterations with a fault: the same on all ranks, because each then waits for all

        def train(call: inprocess.CallWrapper) -> None:
            notes.add("running", call.iteration)
            self._make_group(call.store)
            notes.add("ready", call.iteration)
            if len(done) < self.faults:
                done.append(call.iteration)
                self._measure_floor(call, notes)
                if rank == (self.first_victim + len(done)) % self.ranks:
                    time.sleep(_SETTLE_S)
                    notes.add("fault", call.iteration)
                    self._fail()
                dist.barrier()
            dist.destroy_process_group()

        wrapper(train)(None)  # type: ignore[arg-type]  # the call is passed by the wrapper

    def _make_group(self, store: Any) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()

    def _measure_floor(self, call: inprocess.CallWrapper, notes: Notes) -> None:
        begin = time.perf_counter()
        dist.destroy_process_group()
        self._make_group(PrefixStore("floor", call.store))
        notes.add("floor", call.iteration, time.perf_counter() - begin)

    def _fail(self) -> None:
        if self.kind == "exception":
            raise RuntimeError("of the benchmark")
        if self.kind == "SystemExit":
            sys.exit(1)
        if self.kind == "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_TIMEOUT_S)


def _restart_of(iteration: int, following: int, notes: list[Note], events: list[dict[str, Any]]) -> Restart:
    """The restart after the fault of `iteration`; the next fault was in `following`."""
    by_name: dict[tuple[str, int], list[Note]] = defaultdict(list)
    for note in notes:
        by_name[note.name, note.iteration].append(note)
    (fault,) = by_name["fault", iteration]
    (event,) = [event for event in events if event["iteration"] == iteration]
    more = [event for event in events if iteration < event["iteration"] < following]
    phases = dict(event["seconds"])
    total = phases.pop("total")
    running = max(note.time for note in by_name["running", iteration + 1])
    # What the wrapper has no name for: the new numbers are given after the last phase; then garbage is collected.
    phases |= {"assignment": total - sum(phases.values()), "begin": running - event["time"]}
    return Restart(
        detected=event["time"] - total - fault.time,
        running=running - fault.time,
        ready=max(note.time for note in by_name["ready", iteration + 1 + len(more)]) - fault.time,
        floor=max(note.value for note in by_name["floor", iteration]),
        phases=phases,
        unplanned=[f"{reason['interruption']}: {reason['summary']}" for event in more for reason in event["reasons"]],
    )


def measure_idle(seconds: float) -> Idle:
    """Two ranks with default settings: one whose function sleeps, and a spare that waits for it."""

    def run(rank: int, notes: Notes, folder: Path) -> None:
        logging.getLogger("inprocess").setLevel(logging.CRITICAL + 1)
        names = ("active", "spare")
        sampled = threading.Event()

        def train() -> None:
            time.sleep(seconds + 1.0)

        def sample() -> None:
            monitor = _child_of(os.getpid())
            time.sleep(0.5)  # until everything has started
            before = _cpu_seconds(os.getpid()), _cpu_seconds(monitor)
            begin = time.perf_counter()
            time.sleep(seconds)
            passed = time.perf_counter() - begin
            after = _cpu_seconds(os.getpid()), _cpu_seconds(monitor)
            for name, b, a in zip(("rank", "monitor process"), before, after, strict=True):
                notes.add(f"{names[rank]} {name}", 0, (a - b) / passed)
            sampled.set()

        def begin(state: inprocess.FrozenState) -> inprocess.FrozenState:
            threading.Thread(target=sample, daemon=True).start()
            return state

        assignment = inprocess.Compose(MaxActiveWorldSize(1), ShiftRanks())
        inprocess.Wrapper(initialize=begin, rank_assignment=assignment)(train)()
        sampled.wait(seconds)

    notes, _ = run_forked(run, 2, seconds + 60.0)
    return Idle(seconds, {note.name: note.value for note in notes})


def _child_of(pid: int) -> int:
    children = [
        int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
    ]
    (child,) = children
    return child


def _cpu_seconds(pid: int) -> float:
    """Of all threads that live; in nanoseconds, where `times` would count in hundredths of a second."""
    return sum(int((task / "schedstat").read_text().split()[0]) / 1e9 for task in Path(f"/proc/{pid}/task").iterdir())
