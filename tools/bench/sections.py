"""What section monitoring costs a rank, how exactly a monitor notices a hang, and what a monitor costs the node.

python -m tools.bench.sections [--pairs 20000] [--hangs 50] [--seconds 20] [--ranks 64] [--json FILE]

Slow figures never make it fail.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient
from inprocess.fault_tolerance.data import MONITOR_SOCKET_ENV
from inprocess.fault_tolerance.rank_monitor_server import MonitorHandle, RankMonitorServer
from tools.bench.report import Row, environment, print_table

__all__ = ["main"]

_TURNS = 9
_LIMIT_S = 0.5
_EVENTS_PER_S = 100


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--hangs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    os.environ.setdefault("RANK", "0")
    os.environ.pop("LOCAL_RANK", None)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            Row("start and end, shared memory", _pairs(folder, options.pairs, True), show=_us),
            Row("start and end, acknowledged", _pairs(folder, options.pairs // 20 or 1, False), show=_us),
            Row("the same as two datagrams of JSON", _datagrams(options.pairs), show=_us),
            Row("hang noticed late by", _hangs(folder, options.hangs), show=_ms),
            Row("idle monitor", [_idle(folder, options.seconds)], show=_percent),
            Row(
                f"monitor of {options.ranks} busy ranks", [_many(folder, options.ranks, options.seconds)], show=_percent
            ),
        ]
    late = rows[3].values
    p95 = statistics.quantiles(late, n=20)[-1] if len(late) > 1 else late[0]
    print_table("Section monitoring", rows)
    print(f"hang noticed late by, 95th percentile: {_ms(p95)} (limit {_LIMIT_S:g} s; bar {50 + 10 * _LIMIT_S:g} ms)")
    if options.json is not None:
        document = {"environment": environment(), "rows": [row.document() for row in rows], "late_p95_s": p95}
        options.json.write_text(json.dumps(document, indent=1))
    return 0


# -- cost of events ----------------------------------------------------------------------------------------------------


def _pairs(folder: str, count: int, skip_response: bool) -> list[float]:
    """Seconds per start and end, of several turns."""
    with _monitor([f"{folder}/pairs"], skip_section_response=skip_response, rank_section_timeouts={"step": 600.0}):
        client = _client(f"{folder}/pairs")

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


def _hangs(folder: str, count: int) -> list[float]:
    """Seconds between a deadline and the death of the rank, once per hang."""
    path = f"{folder}/hangs"
    found = []
    with _monitor([path], rank_section_timeouts={"short": _LIMIT_S, "long": 600.0}):
        for _ in range(count):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                client = _client(path)
                client.start_section("long")
                os.write(writer, f"{time.monotonic()}\n".encode())
                client.start_section("short")
                while True:  # the signal that asks for stacks would end a `pause`
                    time.sleep(60)
            os.close(writer)
            with os.fdopen(reader) as file:
                begun = float(file.readline())
            os.waitpid(child, 0)
            found.append(time.monotonic() - begun - _LIMIT_S)
    return found


# -- cost of a monitor -------------------------------------------------------------------------------------------------


def _idle(folder: str, seconds: float) -> float:
    """The part of a core that a monitor takes whose rank is in a section with a limit of a second."""
    path = f"{folder}/idle"
    settings = {"rank_section_timeouts": {"step": None, "short": 1.0}, "rank_out_of_section_timeout": 60.0}
    with _monitor([path], **settings) as monitor:
        client = _client(path)
        client.start_section("step")
        share = _share(monitor, seconds)
        client.shutdown_workload_monitoring()
    return share


def _many(folder: str, ranks: int, seconds: float) -> float:
    """The part of a core one monitor takes for many ranks that open and close sections."""
    paths = [f"{folder}/{rank}" for rank in range(ranks)]
    with _monitor(paths, rank_section_timeouts={"step": 1.0}, rank_out_of_section_timeout=1.0) as monitor:
        children = [_busy_rank(path) for path in paths]
        try:
            return _share(monitor, seconds)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            alive = [child for child in children if os.waitpid(child, 0)[1] != signal.SIGKILL]
            if alive:
                print(f"{len(alive)} ranks ended by themselves", file=sys.stderr)


def _busy_rank(path: str) -> int:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        client = _client(path)
        os.write(writer, b"\n")
        while True:
            with client.section("step"):
                time.sleep(1 / _EVENTS_PER_S)
            time.sleep(1 / _EVENTS_PER_S)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


def _share(monitor: MonitorHandle, seconds: float) -> float:
    process = psutil.Process(monitor.pid)
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return max(0.0, float(after.user - before.user + after.system - before.system)) / seconds


# -- parts -------------------------------------------------------------------------------------------------------------


@contextmanager
def _monitor(paths: list[str], **settings: Any) -> Iterator[MonitorHandle]:
    config = FaultToleranceConfig(**{"log_level": 50, **settings})
    with RankMonitorServer.run_in_subprocess(config, paths) as monitor:
        yield monitor


def _client(path: str) -> RankMonitorClient:
    os.environ[MONITOR_SOCKET_ENV] = path
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} % of a core"


if __name__ == "__main__":
    sys.exit(main())
