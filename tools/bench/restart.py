"""Time from a fault until the wrapped function runs again on all ranks, beside making a process group again.

The ranks fail on purpose, in a collective of gloo. Also the processor time of a job that waits, with default settings.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from inprocess.store import PrefixStore
from tools.bench.harness import (
    UNBOUNDED_FAULTS,
    Row,
    at_least,
    milliseconds,
    percent,
    percentile,
    print_report,
    write_json,
)
from tools.bench.processes import Note, Notes, children_of, cpu_seconds, run_forked
from tools.bench.restart_burdens import BURDENS, Burden

FAULTS = ("exception", "kill -9", "SystemExit", "hang")

_SETTLE_S = 0.02  # the others are in their collective by then
_TIMEOUT_S = 600.0
_TARGET_RESTART_S, _TARGET_DETECTION_S, _TARGET_HANG_S = 0.3, 0.2, 0.2
_TARGET_GROUPS = 4.0  # times the process group made again
_TARGET_BURDENED = 1.5  # the same, whatever the function holds or does: as the median without
_TARGET_IDLE = 0.01  # of a core

# Phases by their names in events.jsonl: each lasts until the next one begins.
_PHASES = {
    "outcome": "last call",
    "last_call": "abort hook",
    "aborted": "main thread back in bytecode, throw",
    "thrown": "unwinding",
    "acknowledged": "monitor thread ends",
    "release": "process groups, frames, garbage",
    "finalize": "finalize",
    "health": "health check",
    "barrier": "iteration barrier",
    "assignment": "assignment",
    "begin": "beginning of the next iteration",
}


# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restart:
    """One restart, in seconds from the fault until ...

    `detected`: the first rank knows; `running`: the function runs again on all ranks; `ready`: the new group works.
    `floor` is the time to destroy the group, make it again, and pass a barrier, measured just before the fault.
    `unplanned` are the reasons of further restarts, before the group worked again.
    """

    detected: float
    running: float
    ready: float
    floor: float
    phases: dict[str, float]
    unplanned: list[str]


def measure_restarts(
    kind: str, ranks: int, restarts: int, soft_timeout_s: float, burden: str | None = None
) -> list[Restart]:
    """Restart in one job, or each time in a job of its own if the rank that fails is lost."""
    survives = kind in ("exception", "hang")
    jobs = [(restarts, 0)] if survives else [(1, number) for number in range(restarts)]
    found = []
    for faults, first in jobs:
        job = _FailingJob(kind, ranks, faults, first % ranks, soft_timeout_s, BURDENS.get(burden or "", Burden()))
        notes, events = run_forked(job.run, ranks, _TIMEOUT_S)
        at = sorted(note.iteration for note in notes if note.name == "fault")
        found += [
            _restart_of(iteration, following, notes, events) for iteration, following in pairwise([*at, sys.maxsize])
        ]
    return found


@dataclass(frozen=True)
class _FailingJob:
    """Ranks that meet in a collective; in each of the first iterations one of them, in turn, fails instead."""

    kind: str
    ranks: int
    faults: int
    first_victim: int
    soft_timeout_s: float
    burden: Burden

    def run(self, rank: int, notes: Notes, folder: Path) -> None:
        """Run the rank, to its end or its fault."""
        logging.getLogger("inprocess").setLevel(logging.CRITICAL + 1)
        options: dict[str, Any] = dict(UNBOUNDED_FAULTS)
        if self.kind == "hang":
            options["soft_timeout"] = timedelta(seconds=self.soft_timeout_s)
        wrapper = inprocess.Wrapper(monitor_process_logfile=folder / "rank-{rank}.log", **options)

        self.burden.prepare()
        done: list[int] = []  # iterations with a fault: the same on all ranks, because each then waits for all

        def train(call: inprocess.CallWrapper) -> None:
            notes.add("running", call.iteration)
            self._make_group(call.store)
            notes.add("ready", call.iteration)
            if len(done) < self.faults:
                done.append(call.iteration)
                held = self.burden.hold()
                self._measure_floor(call, notes)
                if rank == (self.first_victim + len(done)) % self.ranks:
                    time.sleep(_SETTLE_S)
                    notes.add("fault", call.iteration)
                    self._fail()
                self.burden.work()
                dist.barrier()
                del held
            dist.destroy_process_group()

        wrapper(train)()

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
    """Return the restart after the fault of `iteration`; the next fault was in `following`."""
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


# -- idling ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """Processor time per second of waiting, of each process."""

    seconds: float
    shares: dict[str, float]


def measure_idle(seconds: float) -> Idle:
    """Run two ranks with default settings: one whose function sleeps, and a spare that waits for it."""

    def run_rank(rank: int, notes: Notes, folder: Path) -> None:
        logging.getLogger("inprocess").setLevel(logging.CRITICAL + 1)
        sampled = threading.Event()

        def train() -> None:
            time.sleep(seconds + 1.0)

        def sample() -> None:
            (monitor,) = children_of(os.getpid())
            time.sleep(0.5)  # until everything has started
            processes = {"rank": os.getpid(), "monitor process": monitor}
            before = {name: cpu_seconds(pid) for name, pid in processes.items()}
            begin = time.perf_counter()
            time.sleep(seconds)
            passed = time.perf_counter() - begin
            for name, pid in processes.items():
                notes.add(f"{('active', 'spare')[rank]} {name}", 0, (cpu_seconds(pid) - before[name]) / passed)
            sampled.set()

        def begin(state: inprocess.FrozenState) -> inprocess.FrozenState:
            threading.Thread(target=sample, daemon=True).start()
            return state

        assignment = inprocess.Compose(MaxActiveWorldSize(1), ShiftRanks())
        inprocess.Wrapper(initialize=begin, rank_assignment=assignment)(train)()
        sampled.wait(seconds)

    notes, _ = run_forked(run_rank, 2, seconds + 60.0)
    return Idle(seconds, {note.name: note.value for note in notes})


# -- report ------------------------------------------------------------------------------------------------------------


def _rows(results: dict[str, list[Restart]], idle: Idle | None, soft_timeout_s: float) -> list[Row]:
    rows = []
    for kind, restarts in results.items():
        rows += _rows_of(kind, restarts, soft_timeout_s) if kind in FAULTS else _rows_with_burden(kind, restarts)
    if idle is not None:
        rows += [Row(f"idle: {name}", [share], [_TARGET_IDLE], 1.0, percent) for name, share in idle.shares.items()]
    return rows


def _rows_of(kind: str, restarts: list[Restart], soft_timeout_s: float) -> list[Row]:
    running = [restart.running for restart in restarts]
    floor = [restart.floor for restart in restarts]
    detected = [restart.detected for restart in restarts]
    allowed = soft_timeout_s + _TARGET_HANG_S if kind == "hang" else _TARGET_RESTART_S
    to_detect = ([_TARGET_DETECTION_S] * len(restarts), 1.0) if kind == "kill -9" else (None, None)
    rows = [
        Row(f"{kind}: running again on all ranks", running, floor, _TARGET_GROUPS if kind == "exception" else None),
        Row(f"  to {allowed:g} s", running, [allowed] * len(running), 1.0 if kind in ("exception", "hang") else None),
        Row("  95 of 100 take at most", [percentile(running, 0.95)]),
        Row("  limit: destroy and make the group, barrier", floor),
        Row("  and until the new group works", [restart.ready for restart in restarts], floor),
        Row("  detected", detected, *to_detect),
    ]
    if unplanned := sum(bool(restart.unplanned) for restart in restarts):
        rows.append(Row("  restarts followed by an unplanned one", [float(unplanned)], show=lambda n: f"{n:.0f}"))
    for name in dict.fromkeys(name for restart in restarts for name in restart.phases):
        values = [restart.phases.get(name, 0.0) for restart in restarts]
        rows.append(Row(f"  - {_PHASES.get(name, name)}", values, show=partial(milliseconds, digits=1)))
    return rows


def _rows_with_burden(name: str, restarts: list[Restart]) -> list[Row]:
    running, floor = [restart.running for restart in restarts], [restart.floor for restart in restarts]
    return [
        Row(f"exception, {name}: running again on all ranks", running, floor, _TARGET_BURDENED),
        Row("  limit: destroy and make the group, barrier", floor),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--ranks", type=at_least(2), default=4, help="at the start of each job (default: 4)")
    parser.add_argument("--restarts", type=at_least(1), default=50, help="after each kind of fault (default: 50)")
    faults = ", ".join(FAULTS)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS, metavar="FAULT", help=faults)
    burdens = f"held or done by the function when an exception comes: {', '.join(BURDENS)}"
    parser.add_argument("--burdens", nargs="*", default=list(BURDENS), choices=BURDENS, metavar="BURDEN", help=burdens)
    parser.add_argument("--soft-timeout", type=_soft_timeout, default=2.0, metavar="S", help="of hangs (default: 2)")
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="how long to idle; 0: not at all")


def _soft_timeout(text: str) -> float:
    if float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 1")
    return float(text)


def run(options: argparse.Namespace) -> None:
    """Measure all kinds of faults, then a job that idles, and print a table."""
    torch.set_num_threads(1)  # of this process and those forked from it
    results = {}
    for kind in (*options.faults, *options.burdens):
        text = f"{kind}: {options.restarts} restarts of {options.ranks} ranks ...    "
        print(f"\r{text}", end="", file=sys.stderr, flush=True)
        fault, burden = (kind, None) if kind in FAULTS else ("exception", kind)
        results[kind] = measure_restarts(fault, options.ranks, options.restarts, options.soft_timeout, burden)
        for reason in {reason for restart in results[kind] for reason in restart.unplanned}:
            print(f"\nnot planned: {reason}", file=sys.stderr)
    print(file=sys.stderr)
    idle = measure_idle(options.idle) if options.idle > 0 else None
    rows = _rows(results, idle, options.soft_timeout)
    title = f"{options.ranks} ranks, gloo, {options.restarts} restarts of each kind; ratio: median of the restarts"
    print_report(title, rows)
    restarts = {kind: [asdict(restart) for restart in found] for kind, found in results.items()}
    write_json(options.json, {"rows": rows, "restarts": restarts, "idle": None if idle is None else asdict(idle)})
