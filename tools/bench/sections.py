"""What section monitoring costs a rank, how exactly a monitor notices a hang, and what a monitor costs the node.

python -m tools.bench.sections [--pairs 20000] [--hangs 50] [--seconds 45] [--ranks 64] [--json FILE]

Slow figures never make it fail.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inprocess.fault_tolerance import FaultToleranceConfig
from inprocess.fault_tolerance.rank_monitor_server import MonitorHandle, RankMonitorServer
from tools.bench.busy_ranks import BusyRank, client_at
from tools.bench.report import Row, environment, print_table

__all__ = ["main"]

_TURNS = 9
_LIMIT_S = 0.5
_BAR_S = 0.05 + 0.01 * _LIMIT_S
_IDLE_BAR = 0.001  # of a core
_LONG = {"long": 600.0, "short": _LIMIT_S}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--hangs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    os.environ.setdefault("RANK", "0")
    os.environ.pop("LOCAL_RANK", None)
    with tempfile.TemporaryDirectory() as folder:
        pairs = _pairs(folder, options.pairs, True)
        acknowledged = _pairs(folder, options.pairs // 20 or 1, False)
        datagrams = _datagrams(options.pairs)
        late, dead = _hangs(folder, options.hangs)
        idle = _idle(folder, options.seconds)
        load = _load(folder, options.ranks, options.seconds, options.hangs)
    rows = [
        Row("start and end, shared memory", pairs, show=_us),
        Row("start and end, acknowledged", acknowledged, show=_us),
        Row("the same as two datagrams of JSON", datagrams, show=_us),
        Row("hang noticed late by", late, show=_ms),
        Row("  95 of 100 within", [_p95(late)], [_BAR_S], 1.0, _ms),
        Row("  the rank has ended after", dead, show=_ms),
        Row("idle monitor, of a core", idle, [_IDLE_BAR] * len(idle), 1.0, _percent),
        Row(f"monitor of {options.ranks} busy ranks, of a core", load.shares, show=_percent),
        Row("  events of each rank", load.rates, show=lambda rate: f"{rate:.0f} /s"),
        Row("  events lost", [load.lost], show=lambda lost: f"{lost:.0f} of {load.made:.0f}"),
        Row("  hang noticed late by, beside them", load.late, show=_ms),
        Row("    95 of 100 within", [_p95(load.late)], [_BAR_S], 1.0, _ms),
        Row("    the rank has ended after", load.dead, show=_ms),
    ]
    print_table(f"Section monitoring; limit of the hangs: {_LIMIT_S:g} s", rows)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    if options.json is not None:
        document = {"environment": environment(), "rows": [row.document() for row in rows]}
        options.json.write_text(json.dumps(document, indent=1))
    return 0


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


# -- cost of events ----------------------------------------------------------------------------------------------------


def _pairs(folder: str, count: int, skip_response: bool) -> list[float]:
    """Seconds per start and end, of several turns."""
    with _monitor([f"{folder}/pairs"], skip_section_response=skip_response, rank_section_timeouts={"step": 600.0}):
        client = client_at(f"{folder}/pairs")

        def pair() -> None:
            client.start_section("step")
            client.end_section("step")

        found = [_seconds_per_call(pair, count) for _ in range(_TURNS)]
        client.shutdown_workload_monitoring()
    return found


def _datagrams(count: int) -> list[float]:
    """The other way: two messages sent, without an answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = os.fork()
        if not child:
            ours.close()
            while theirs.recv(4096):
                pass
            os._exit(0)

        def pair() -> None:
            for action in ("OPEN", "CLOSE"):
                message = ["Section", {"name": "step", "action": action, "at": time.monotonic_ns(), "epoch": 0}]
                ours.send(json.dumps(message).encode())

        found = [_seconds_per_call(pair, count) for _ in range(_TURNS)]
        ours.shutdown(socket.SHUT_RDWR)
        os.waitpid(child, 0)
    return found


def _seconds_per_call(function: Callable[[], None], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - begun) / count


# -- detection ---------------------------------------------------------------------------------------------------------


def _hangs(folder: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds between a deadline and the monitor's notice, and the death of the rank, once per hang."""
    path, log = f"{folder}/hangs", Path(folder, "hangs.log")
    with _monitor([path], log, rank_section_timeouts=_LONG):
        dead = [_hang(path) for _ in range(count)]
    return _noticed(log, count), dead


def _noticed(log: Path, count: int) -> list[float]:
    """What the monitor has reported: the time it looked at, less the deadline."""
    lines = [line[line.index("{") :] for line in log.read_text().splitlines() if '"section_timeout"' in line]
    found = {report["pid"]: report["late_s"] for report in map(json.loads, reversed(lines))}  # the first of each rank
    if len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} hangs were reported:\n{log.read_text()}")
    return list(found.values())


def _hang(path: str) -> float:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        client = client_at(path)
        client.start_section("long")
        os.write(writer, f"{time.monotonic()}\n".encode())
        client.start_section("short")
        while True:  # the signal that asks for stacks would end a `pause`
            time.sleep(60)
    os.close(writer)
    with os.fdopen(reader) as file:
        begun = float(file.readline())
    os.waitpid(child, 0)
    return time.monotonic() - begun - _LIMIT_S


# -- cost of a monitor -------------------------------------------------------------------------------------------------


def _idle(folder: str, seconds: float) -> list[float]:
    """The part of a core that a monitor takes whose rank is in a section with a limit of a second."""
    path = f"{folder}/idle"
    limits = {"step": None, "short": 1.0}
    with _monitor([path], rank_section_timeouts=limits, rank_out_of_section_timeout=60.0) as monitor:
        client = client_at(path)
        client.start_section("step")
        shares = _shares(monitor, seconds)
        client.shutdown_workload_monitoring()
    return shares


@dataclass(frozen=True)
class _Load:
    """What one monitor of many busy ranks did: parts of a core, events per second of each rank, how many the ranks made
    and how many of them the monitor had not seen at the end; how late hangs of one more rank were noticed and ended."""

    shares: list[float]
    rates: list[float]
    made: float
    lost: float
    late: list[float]
    dead: list[float]


def _load(folder: str, ranks: int, seconds: float, hangs: int) -> _Load:
    *paths, free = [f"{folder}/{rank}" for rank in range(ranks + 1)]
    limits = {"step": 60.0, **_LONG}
    log = Path(folder, "load.log")
    with _monitor([*paths, free], log, rank_section_timeouts=limits, rank_out_of_section_timeout=60.0) as monitor:
        busy = [BusyRank(path) for path in paths]
        shares = _shares(monitor, seconds)
        dead = [_hang(free) for _ in range(hangs)]
        found = [rank.stop() for rank in busy]
    made = sum(count for count, _, _ in found)
    lost = sum(count for _, count, _ in found)
    return _Load(shares, [rate for _, _, rate in found], made, lost, _noticed(log, hangs), dead)


def _shares(monitor: MonitorHandle, seconds: float) -> list[float]:
    """The part of a core it takes, in several turns."""
    found = []
    for _ in range(_TURNS):
        before, begun = _cpu_s(monitor.pid), time.monotonic()
        time.sleep(seconds / _TURNS)
        found.append((_cpu_s(monitor.pid) - before) / (time.monotonic() - begun))
    return found


def _cpu_s(pid: int) -> float:
    """Processor time of all threads, in nanoseconds where `cpu_times` has hundredths of a second."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) * 1e-9


# -- parts -------------------------------------------------------------------------------------------------------------


@contextmanager
def _monitor(paths: list[str], log: Path = Path(os.devnull), **settings: Any) -> Iterator[MonitorHandle]:
    """A monitor process; what it says of ERROR and above goes to `log`."""
    config = FaultToleranceConfig(**{"log_level": 40, **settings})
    saved = os.dup(2)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        monitor = RankMonitorServer.run_in_subprocess(config, paths)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    with monitor:
        yield monitor


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


if __name__ == "__main__":
    sys.exit(main())
