"""Cost of the coordination server in a job of thousands of ranks: the real server, simulated ranks.

The ranks have no torch; they send the requests that real ranks send.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inprocess.coordination import Access
from inprocess.ipc.process import start_module
from inprocess.monitor_process.sibling import heartbeat_interval_s
from tools.bench.harness import Row, at_least, megabytes, print_table, write_json
from tools.bench.processes import REPOSITORY, cpu_seconds
from tools.bench.simulated_ranks import Command, encode_command

_RANKS_OF_A_PROCESS = 1024
_CONNECTIONS_OF_A_RANK = 2
_HEARTBEAT_S, _HEARTBEAT_TIMEOUT_S = 1.0, 30.0
_NO_PING_S = 1e6  # the simulation takes longer for a restart than real ranks, which would send no pings meanwhile
_SETTLE_S = 0.3
_TARGET_CPU_S, _TARGET_SENT, _TARGET_RSS, _TARGET_IDLE = 1.0, 100e6, 200e6, 0.1


@dataclass(frozen=True)
class Restart:
    """One restart: processor time of the server, time that passed, bytes that it sent, requests by operation."""

    cpu_s: float
    wall_s: float
    sent_bytes: int
    requests: dict[str, int]
    rss_bytes: int


@dataclass(frozen=True)
class Idle:
    """A job without faults: the share of a core that the server needs, and the frames it receives per second."""

    share: float
    frames: dict[str, float]


@dataclass(frozen=True)
class Results:
    """One size of job. `connect_cpu_s` is the server's processor time for all connections and the first iteration."""

    ranks: int
    connections: int
    connect_cpu_s: float
    one: list[Restart]
    all: list[Restart]
    idle: Idle | None


class Job:
    """A server in a process of its own, and ranks in several processes. A context manager."""

    def __init__(self, ranks: int, *, ping_s: float = _HEARTBEAT_TIMEOUT_S / 6) -> None:
        self.ranks = ranks
        self._ping_s = ping_s
        self._simulating: list[subprocess.Popen[str]] = []
        self._undo = ExitStack()
        self.pid = 0

    def __enter__(self) -> "Job":
        with ExitStack() as undo:
            access = undo.enter_context(self._server())
            starts = range(0, self.ranks, _RANKS_OF_A_PROCESS)
            for _ in starts:
                self._simulating.append(undo.enter_context(_simulating()))
            for process, start in zip(self._simulating, starts, strict=True):
                end = min(start + _RANKS_OF_A_PROCESS, self.ranks)
                document = {"access": access.to_document(), "ranks": [start, end], "world_size": self.ranks}
                _write(process, json.dumps({**document, "ping_s": self._ping_s}))
            self.wait_ready()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._simulating:
            _write(process, encode_command(Command(end=True)))
        self._undo.close()

    @contextmanager
    def _server(self) -> Iterator[Access]:
        access = Access("127.0.0.1", 0)
        server: Any = start_module(
            "inprocess.coordination.server_process", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        config = {
            "clients": _CONNECTIONS_OF_A_RANK * self.ranks,
            "silence_s": 600.0,
            "logfile": None,
            "port_wait_s": 0.0,
        }
        with server:
            server.stdin.write(json.dumps({**config, "access": access.to_document()}).encode() + b"\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
            self.pid = answer["pid"]
            yield Access(access.host, answer["port"], access.job, access.secret)

    def wait_ready(self) -> tuple[Counter[str], int]:
        """Wait until all ranks are in the next iteration. Return frames sent by operation, and bytes received."""
        sent: Counter[str] = Counter()
        received = 0
        for process in self._simulating:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a process of simulated ranks has ended")
            answer = json.loads(line)
            sent.update(answer["sent"])
            received += answer["received"]
        return sent, received

    def go(self, command: Command) -> None:
        """Tell all ranks what to do."""
        for process in self._simulating:
            _write(process, encode_command(command))

    def restart(self, raising: int, heartbeat_s: float | None = None) -> Restart:
        """Restart once, after the first `raising` ranks have failed."""
        time.sleep(_SETTLE_S)  # until the last heartbeats and answers are through
        begin, cpu = time.perf_counter(), self.cpu_s()
        self.go(Command(raising) if heartbeat_s is None else Command(raising, heartbeat_s=heartbeat_s))
        sent, received = self.wait_ready()
        wall = time.perf_counter() - begin
        time.sleep(_SETTLE_S)
        return Restart(self.cpu_s() - cpu, wall, received, dict(sent), self.rss_bytes())

    def idle(self, seconds: float, heartbeat_s: float) -> Idle:
        """Let time pass, with heartbeats. The restart that ends it does not count."""
        self.restart(1, heartbeat_s)
        begin, cpu = time.perf_counter(), self.cpu_s()
        self.go(Command(1, idle_s=seconds))
        time.sleep(seconds)
        share = (self.cpu_s() - cpu) / (time.perf_counter() - begin)
        sent, _ = self.wait_ready()
        return Idle(share, {name: number / seconds for name, number in sent.items()})

    def cpu_s(self) -> float:
        """Return the processor time that the server has used."""
        return cpu_seconds(self.pid)

    def rss_bytes(self) -> int:
        """Return the memory of the server."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(lines["VmRSS"].split()[0]) << 10

    def connections(self) -> int:
        """Return how many sockets the server has for clients."""
        return len(os.listdir(f"/proc/{self.pid}/fd")) - _OTHER_DESCRIPTORS


_OTHER_DESCRIPTORS = 6  # standard streams, epoll, listener, two to wake it up: one of the streams is /dev/null


@contextmanager
def _simulating() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tools.bench.simulated_ranks"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def measure(ranks: int, restarts: int, idle_s: float) -> Results:
    """Measure one size of job. The first restart, after which the server has seen every operation, does not count."""
    with Job(ranks, ping_s=_NO_PING_S) as job:
        connect_cpu_s = job.cpu_s()
        connections = job.connections()
        job.restart(1)
        one = [job.restart(1) for _ in range(restarts)]
        every = [job.restart(ranks) for _ in range(restarts)]
    idle = None
    if idle_s > 0:
        with Job(ranks) as job:
            idle = job.idle(idle_s, heartbeat_interval_s(_HEARTBEAT_S, _HEARTBEAT_TIMEOUT_S, ranks))
    return Results(ranks, connections, connect_cpu_s, one, every, idle)


def _rows(results: Results) -> list[Row]:
    rows = [
        Row("connections", [float(results.connections)], show=_whole),
        Row("connecting, first iteration: server CPU", [results.connect_cpu_s]),
        *_rows_of("one rank raises", results.one, results.ranks),
        *_rows_of("all ranks raise", results.all, results.ranks),
    ]
    if results.idle is not None:
        rows += [
            Row("idle: share of a core", [results.idle.share], [_TARGET_IDLE], 1.0, lambda s: f"{100 * s:.1f} %"),
            Row("  frames per second", [sum(results.idle.frames.values())], show=_whole),
        ]
    return rows


def _rows_of(title: str, restarts: list[Restart], ranks: int) -> list[Row]:
    count = len(restarts)
    requests = [sum(restart.requests.values()) / ranks for restart in restarts]
    sent = [float(restart.sent_bytes) for restart in restarts]
    memory = [float(restart.rss_bytes) for restart in restarts]
    show_bytes = partial(megabytes, digits=1)
    return [
        Row(f"{title}: server CPU", [restart.cpu_s for restart in restarts], [_TARGET_CPU_S] * count, 1.0),
        Row("  bytes sent", sent, [_TARGET_SENT] * count, 1.0, show_bytes),
        Row("  frames per rank", requests, show=lambda number: f"{number:.1f}"),
        Row("  server memory", memory, [_TARGET_RSS] * count, 1.0, show_bytes),
        Row("  with the simulation, on this machine", [restart.wall_s for restart in restarts]),
    ]


def _whole(number: float) -> str:
    return f"{number:.0f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    sizes = [1024, 4096]
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=sizes, help="of jobs (default: 1024 4096)")
    parser.add_argument("--restarts", type=at_least(1), default=5, help="of each kind (default: 5)")
    parser.add_argument("--idle", type=_seconds, default=20.0, metavar="S", help="how long to idle; 0: not at all")


def _seconds(text: str) -> float:
    if float(text) < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return float(text)


def run(options: argparse.Namespace) -> None:
    """Measure all sizes, and print a table of each as soon as it is there."""
    found: list[Results] = []
    for ranks in options.ranks:
        results = measure(ranks, options.restarts, options.idle)
        title = f"coordination server, {ranks} ranks, 2 connections each; {options.restarts} restarts of each kind"
        print_table(title, _rows(results))
        found.append(results)
    tables = {str(results.ranks): _rows(results) for results in found}
    write_json(options.json, {"rows": tables, "results": [asdict(results) for results in found]})
