"""Time from the loss of a node until a spare trains in its place, beside a relaunch of the whole job.

    nodes 1, 2 and a spare: ckpt_launcher, a rank of `nodes_training` each
    all processes of node 2 are stopped      as when its power fails: no connection is closed
    the spare finds it silent                the launchers meet again, and start ranks, which restore

    relaunch: all processes are killed; torchrun is started on node 1 and the spare, with the same program

In every round: with ranks as usual, with `--ft-preload`, and the relaunch. Times are those of the
last rank to pass each point. A scheduler notices the loss of a node no sooner, so a relaunch begins with the kill.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tools.bench.harness import (
    Row,
    add_disk_option,
    add_size_options,
    at_least,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.processes import cpu_seconds, free_port

_RELAUNCH = "relaunch"
WAYS = {"spare": "a spare", "preloaded": "a spare, --ft-preload", _RELAUNCH: "relaunch by torchrun"}
_RANKS = 2
_VICTIM, _SPARE = 1, 2
_LIMIT_S = 240.0
_POLL_S = 0.05
_QUIET_S = 1.0
_IMPORT_S = 0.5  # processor time that an import of torch takes, at least
_PRELOADER = "preloaded_worker.py"

# The moment at the end of each phase, and the phase.
_OF_RANKS = {"started": "start processes", "imported": "import", "joined": "join", "allocated": "allocate"}
_OF_RANKS |= {"restored": "restore", "stepped": "first step"}
_SPARE_PHASES = {"noticed": "silence", "begun": "rendezvous", **_OF_RANKS}

Notes = dict[str, Any]


@dataclass(frozen=True)
class NodeLoss:
    """Seconds from the loss of a node to the first step without it; `phases` add up to it.

    `total` is without the silence by which the loss is noticed: that is a setting.
    """

    total: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Job:
    """The training of a run, and its folder. A node that is silent for `silence_s` is lost."""

    gigabytes: float
    folder: Path
    silence_s: int

    def command(self, launcher: str, number: int, port: int, *options: str) -> list[str]:
        """Return the command that starts a node; node 0 hosts the rendezvous at this port."""
        conf = f"is_host={str(number == 0).lower()},keep_alive_interval=1,keep_alive_max_attempt={self.silence_s}"
        job = ["--rdzv-backend=c10d", f"--rdzv-endpoint={_address(0)}:{port}", "--rdzv-id=bench", f"--rdzv-conf={conf}"]
        node = [f"--local-addr={_address(number)}", "--nproc-per-node=1", "--monitor-interval=0.1", "--max-restarts=1"]
        program = ["-m", "tools.bench.nodes_training", "--gb", str(self.gigabytes), "--folder", str(self.folder)]
        return [sys.executable, "-m", launcher, *job, *node, *options, *program]

    def notes(self, is_first: bool) -> list[Notes]:
        """Return the notes of the ranks of the first start, or of the next one."""
        file = self.folder / "notes.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [note for note in map(json.loads, lines) if note["is_first"] == is_first]


class Node:
    """A launcher with what it has started, at an address of its own. A context manager: all of it is killed."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def stop(self) -> None:
        """Stop all processes: nothing answers any more, and no connection is closed."""
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def kill(self) -> None:
        """Kill all processes. Idempotent."""
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def log(self) -> str:
        """Return what it has written so far."""
        return self._log.read_text(errors="replace")

    def times_of(self, text: str) -> list[float]:
        """Return when lines with this text were logged, in seconds since 1970."""
        lines = re.findall(rf"^(\S+ \S+),(\d+) \| .*{text}", self.log(), re.MULTILINE)
        return [datetime.fromisoformat(when).timestamp() + int(ms) / 1000 for when, ms in lines]

    def preloaded(self) -> list[int]:
        """Return the processes that import in advance, and wait."""
        found = []
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(_PRELOADER in word for word in process.cmdline()):
                    found.append(process.pid)
        return found

    def _all(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [*process.children(recursive=True), process]
        return []


def _address(number: int) -> str:
    return f"127.0.0.{11 + number}"


def on_a_spare(job: Job, *options: str) -> NodeLoss:
    """Lose one of two nodes of a job of `ckpt_launcher` that has a spare, with these options of the launcher."""
    with ExitStack() as stack:
        port, launcher = free_port(), "inprocess.fault_tolerance.launcher"
        nodes: list[Node] = []

        def start(number: int) -> None:
            command = job.command(launcher, number, port, f"--nnodes={_RANKS}:{_RANKS + 1}", *options)
            nodes.append(stack.enter_context(Node(command, job.folder / f"launcher{number}.log")))

        for number in range(_RANKS):
            start(number)
        _wait(lambda: len(job.notes(True)) == _RANKS, nodes, "the first steps")
        start(_SPARE)
        _wait(lambda: bool(nodes[_SPARE].times_of("this node waits as a spare")), nodes, "the spare")
        if options:
            _wait(_Quiet(nodes, _RANKS + 1), nodes, "imports in advance")
        fault = time.time()
        nodes[_VICTIM].stop()
        _wait(lambda: len(job.notes(False)) == _RANKS, nodes, "the steps after the fault")
        begun = [*nodes[0].times_of("cycle 1 begins"), *nodes[_SPARE].times_of("cycle 1 begins")]
        moments = {"noticed": nodes[0].times_of("cycle 0 is over")[0], "begun": max(begun)}
    return _loss(job, fault, moments, _SPARE_PHASES)


def relaunched(job: Job) -> NodeLoss:
    """Kill a job of torchrun on two nodes, and start it on the first and another one."""
    with ExitStack() as stack:

        def start(*numbers: int) -> list[Node]:
            port, launcher, nodes = free_port(), "torch.distributed.run", []
            for number in numbers:
                command = job.command(launcher, number, port, f"--nnodes={_RANKS}")
                nodes.append(stack.enter_context(Node(command, job.folder / f"torchrun{number}.log")))
            return nodes

        nodes = start(0, _VICTIM)
        _wait(lambda: len(job.notes(True)) == _RANKS, nodes, "the first steps")
        fault = time.time()
        for node in nodes:
            node.kill()
        nodes = start(0, _SPARE)
        _wait(lambda: len(job.notes(False)) == _RANKS, nodes, "the steps after the relaunch")
    return _loss(job, fault, {}, _OF_RANKS)


class _Quiet:
    """Whether so many processes have imported in advance, and compute no more. Workers that began so compute on."""

    def __init__(self, nodes: Sequence[Node], count: int) -> None:
        self._nodes = nodes
        self._count = count
        self._used: dict[int, tuple[float, float]] = {}  # processor time, and when it has last changed

    def __call__(self) -> bool:
        now = time.monotonic()
        for pid in (pid for node in self._nodes for pid in node.preloaded()):
            used = round(cpu_seconds(pid), 2)
            if used != self._used.get(pid, (-1.0, now))[0]:
                self._used[pid] = (used, now)
        done = [pid for pid, (used, since) in self._used.items() if used > _IMPORT_S and now > since + _QUIET_S]
        return len(done) >= self._count


def _wait(condition: Callable[[], bool], nodes: Sequence[Node], what: str) -> None:
    """Wait until the condition holds. TimeoutError, with the logs, if it does not in time."""
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n----\n".join(node.log()[-3000:] for node in nodes)
            raise TimeoutError(f"waited {_LIMIT_S:g} s for {what}:\n{logs}")
        time.sleep(_POLL_S)


def _loss(job: Job, fault: float, moments: dict[str, float], names: dict[str, str]) -> NodeLoss:
    """Return the times since the fault, by what the last rank has noted."""
    noted = {moment: max(float(note[moment]) for note in job.notes(False)) for moment in _OF_RANKS}
    points = [fault, *((moments | noted)[moment] for moment in names)]
    phases = dict(zip(names.values(), (later - earlier for earlier, later in pairwise(points)), strict=True))
    return NodeLoss(points[-1] - moments.get("noticed", fault), phases)


# -- rounds and report -------------------------------------------------------------------------------------------------


def _measure(options: argparse.Namespace) -> list[dict[str, NodeLoss]]:
    """Measure in rounds after one that does not count: each way once, in alternating order."""
    ways: dict[str, Callable[[Job], NodeLoss]] = {
        "spare": on_a_spare,
        "preloaded": lambda job: on_a_spare(job, f"--ft-preload={options.preload}"),
        _RELAUNCH: relaunched,
    }
    results = []
    with temporary_folder(options.folder) as folder:
        for number, counts in enumerate(rounds(options.rounds)):
            taken = {}
            for name in list(WAYS if number % 2 else reversed(WAYS)):
                place = folder / f"{name}{number}"
                place.mkdir()
                taken[name] = ways[name](Job(options.gb, place, options.silence))
                shutil.rmtree(place)
            results += [taken] if counts else []
    return results


def _rows(results: list[dict[str, NodeLoss]]) -> list[Row]:
    """Compare each way with the relaunch of its round."""
    relaunches = [taken[_RELAUNCH].total for taken in results]
    rows = []
    for name, title in WAYS.items():
        limits = None if name == _RELAUNCH else relaunches
        rows.append(Row(title, [taken[name].total for taken in results], limits))
        for phase in results[0][name].phases:
            rows.append(Row(f"  {phase}", [taken[name].phases[phase] for taken in results]))
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=3)
    text = "seconds after which a node that is silent is lost (default: 5; that of the launcher is 15)"
    parser.add_argument("--silence", type=at_least(3), default=5, metavar="SECONDS", help=text)
    parser.add_argument("--preload", default="torch", metavar="MODULE,...", help="modules of --ft-preload (torch)")
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure in rounds, and print a table."""
    results = _measure(options)
    rows = _rows(results)
    title = (
        f"{options.gb:g} GB on {_RANKS} nodes, {len(results)} rounds; from the notice that one is lost to the first "
        "finished step; ratio: median (min-max), to the relaunch in the same round"
    )
    print_report(title, rows)
    write_json(options.json, {"rows": rows, "rounds": [{n: asdict(each) for n, each in t.items()} for t in results]})
