"""What the coordination server costs in a job of thousands of ranks: simulated ranks, the real server.

python -m tools.bench.coordination [--ranks 1024 4096] [--restarts 5] [--idle 20] [--json FILE]

The ranks have no torch; what they ask of the server is what real ones ask. Slow figures never make it fail.
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
from pathlib import Path
from typing import Any

from inprocess.coordination import Access
from inprocess.ipc.process import start_module
from inprocess.monitor_process.sibling import heartbeat_interval_s
from tools.bench.simulated_ranks import Command, encode_command

__all__ = ["Idle", "Job", "Restart", "Results", "main", "measure"]

_RANKS_OF_A_PROCESS = 256  # more threads in a process mostly wait for the interpreter lock
_CONNECTIONS_OF_A_RANK = 2
_HEARTBEAT_S, _HEARTBEAT_TIMEOUT_S = 1.0, 30.0
_SETTLE_S = 0.3
_CPU_S, _SENT, _RSS, _IDLE = 1.0, 100e6, 200e6, 0.1
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Restart:
    """One restart: seconds of the server's processor and of the clock, bytes that the server sent, requests by kind."""

    cpu_s: float
    wall_s: float
    sent_bytes: int
    requests: dict[str, int]
    rss_bytes: int


@dataclass(frozen=True)
class Idle:
    """A job in which nothing happens: the share of a core that the server needs, frames it receives per second."""

    share: float
    frames: dict[str, float]


@dataclass(frozen=True)
class Results:
    """Of one size of job. `connect_cpu_s` is for all connections, and the first iteration."""

    ranks: int
    connections: int
    connect_cpu_s: float
    one: list[Restart]
    all: list[Restart]
    idle: Idle | None


class Job:
    """A server in a process of its own, and the ranks in several; a context manager."""

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
        server: Any = start_module("inprocess.coordination.process", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        config = {"clients": _CONNECTIONS_OF_A_RANK * self.ranks, "silence_s": 600.0, "logfile": None}
        with server:
            server.stdin.write(json.dumps({**config, "access": access.to_document()}).encode() + b"\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
            self.pid = answer["pid"]
            yield Access(access.host, answer["port"], access.job, access.secret)

    def wait_ready(self) -> tuple[Counter[str], int]:
        """Wait until all ranks are in the next iteration. Return frames sent by kind, and bytes received."""
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
        """One restart, after the first `raising` ranks have failed."""
        time.sleep(_SETTLE_S)  # until the last heartbeats and answers are through
        begin, cpu = time.perf_counter(), self.cpu_s()
        self.go(Command(raising) if heartbeat_s is None else Command(raising, heartbeat_s=heartbeat_s))
        sent, received = self.wait_ready()
        wall = time.perf_counter() - begin
        time.sleep(_SETTLE_S)
        return Restart(self.cpu_s() - cpu, wall, received, dict(sent), self.rss_bytes())

    def idle(self, seconds: float, heartbeat_s: float) -> Idle:
        """Let time pass, with heartbeats. Ends with a restart, which does not count."""
        self.restart(1, heartbeat_s)
        begin, cpu = time.perf_counter(), self.cpu_s()
        self.go(Command(1, idle_s=seconds))
        time.sleep(seconds)
        share = (self.cpu_s() - cpu) / (time.perf_counter() - begin)
        sent, _ = self.wait_ready()
        return Idle(share, {name: number / seconds for name, number in sent.items()})

    def cpu_s(self) -> float:
        """Seconds of processor that the server has used."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks)

    def rss_bytes(self) -> int:
        """Memory of the server."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(lines["VmRSS"].split()[0]) << 10

    def connections(self) -> int:
        """How many sockets the server has for clients."""
        return len(os.listdir(f"/proc/{self.pid}/fd")) - _OTHER_DESCRIPTORS


_OTHER_DESCRIPTORS = 6  # standard streams, epoll, listener, two to wake it: one of the streams leads nowhere


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
    """All figures of one size. The first restart, in which the server has everything to learn, does not count."""
    with Job(ranks) as job:
        connect_cpu_s = job.cpu_s()
        connections = job.connections()
        job.restart(1)
        one = [job.restart(1) for _ in range(restarts)]
        every = [job.restart(ranks) for _ in range(restarts)]
        heartbeat_s = heartbeat_interval_s(_HEARTBEAT_S, _HEARTBEAT_TIMEOUT_S, ranks)
        idle = job.idle(idle_s, heartbeat_s) if idle_s > 0 else None
    return Results(ranks, connections, connect_cpu_s, one, every, idle)


def rows(results: Results) -> list[Any]:
    from tools.bench.report import Row

    def of(title: str, restarts: list[Restart]) -> list[Row]:
        count = len(restarts)
        requests = [sum(restart.requests.values()) / results.ranks for restart in restarts]
        sent = [restart.sent_bytes + 0.0 for restart in restarts]
        memory = [restart.rss_bytes + 0.0 for restart in restarts]
        return [
            Row(f"{title}: server CPU", [restart.cpu_s for restart in restarts], [_CPU_S] * count, 1.0),
            Row("  bytes sent", sent, [_SENT] * count, 1.0, _megabytes),
            Row("  frames per rank", requests, show=lambda number: f"{number:.1f}"),
            Row("  server memory", memory, [_RSS] * count, 1.0, _megabytes),
            Row("  with the simulation, on this machine", [restart.wall_s for restart in restarts]),
        ]

    found = [
        Row("connections", [results.connections + 0.0], show=lambda number: f"{number:.0f}"),
        Row("connecting, first iteration: server CPU", [results.connect_cpu_s]),
        *of("one rank raises", results.one),
        *of("all ranks raise", results.all),
    ]
    if results.idle is not None:
        frames = [sum(results.idle.frames.values())]
        found.append(Row("idle: share of a core", [results.idle.share], [_IDLE], 1.0, lambda s: f"{100 * s:.1f} %"))
        found.append(Row("  frames per second", frames, show=lambda number: f"{number:.0f}"))
    return found


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def as_document(results: list[Results]) -> dict[str, Any]:
    """The same for programs."""
    from tools.bench.report import environment

    table = {str(result.ranks): [row.document() for row in rows(result)] for result in results}
    return {"environment": environment(), "rows": table, "results": [asdict(result) for result in results]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.coordination", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096], help="sizes of jobs (default: 1024 4096)")
    parser.add_argument("--restarts", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="how long to idle; 0: not at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every value to FILE")
    options = parser.parse_args(arguments)
    if min(options.ranks) < 2 or options.restarts < 1 or options.idle < 0:
        parser.error("--ranks must be at least 2, --restarts at least 1 and --idle at least 0")
    results = []
    for ranks in options.ranks:
        results.append(measure(ranks, options.restarts, options.idle))
        _print(results[-1])
    if options.json is not None:
        options.json.write_text(json.dumps(as_document(results), indent=1) + "\n")
    return 0


def _print(results: Results) -> None:
    from tools.bench.report import print_table

    title = f"coordination server, {results.ranks} ranks, 2 connections each; {len(results.one)} restarts of each kind"
    print_table(title, rows(results))


if __name__ == "__main__":
    sys.exit(main())
