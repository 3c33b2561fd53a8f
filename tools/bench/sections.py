"""Cost of sections for a rank (limits, stragglers), delay until a monitor detects a hang, cost of a monitor."""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inprocess.fault_tolerance import FaultToleranceConfig, RankMonitorClient
from inprocess.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR
from inprocess.fault_tolerance.link import LinkError
from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer
from inprocess.monitor_process import messages
from inprocess.monitor_process.start import MonitorHandle
from inprocess.store import TCPStore
from inprocess.straggler import Detector
from tools.bench.harness import (
    Row,
    at_least,
    milliseconds,
    percent,
    percentile,
    positive,
    print_report,
    write_json,
)
from tools.bench.processes import cpu_seconds

_TURNS = 9
_EVENTS_PER_S = 100  # of a busy rank
_LIMIT_S = 0.5  # of the section that hangs
_LIMITS = {"long": 600.0, "short": _LIMIT_S}
_TARGET_LATE_S = 0.05 + 0.01 * _LIMIT_S
_TARGET_IDLE = 0.001  # of a core
_STEP_S = 0.1
_SECTIONS = 10  # in a step
_TARGET_STEP = 0.001  # of a step


# -- cost of events ----------------------------------------------------------------------------------------------------


def _pairs(folder: str, count: int, skip_response: bool) -> list[float]:
    """Return the seconds per start and end, in several turns."""
    with _monitor([f"{folder}/pairs"], skip_section_response=skip_response, rank_section_timeouts={"step": 600.0}):
        client = _client_at(f"{folder}/pairs")

        def pair() -> None:
            client.start_section("step")
            client.end_section("step")

        found = [_seconds_per_call(pair, count) for _ in range(_TURNS)]
        client.shutdown_workload_monitoring()
    return found


def _datagrams(count: int) -> list[float]:
    """Return the same for two messages over a socket, without an answer."""
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


def _detector(count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a section of a detector of stragglers, and the share of a step that all of it takes.

    The latter is processor time: sections and the end of a step, and a publication with its report once a minute.
    """
    sections, shares = [], []
    store = TCPStore("127.0.0.1", 0, world_size=1)
    detector = Detector(store, rank=0, world_size=1, interval=None)

    def section() -> None:
        with detector.section("forward"):
            pass

    def step() -> None:
        for _ in range(_SECTIONS):
            section()
        detector.step()

    for _ in range(_TURNS):
        sections.append(_seconds_per_call(section, count))
        begun = time.process_time()
        for _ in range(count // _SECTIONS or 1):
            step()
        per_step = (time.process_time() - begun) / (count // _SECTIONS or 1)
        begun = time.process_time()
        detector.publish()
        detector.report()
        shares.append((per_step + (time.process_time() - begun) * _STEP_S / 60) / _STEP_S)
    detector.close()
    store.close()
    return sections, shares


# -- detection ---------------------------------------------------------------------------------------------------------


def _hangs(folder: str, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds from a deadline to its detection, and to the end of the rank, for each hang."""
    path, log = f"{folder}/hangs", Path(folder, "hangs.log")
    with _monitor([path], log, rank_section_timeouts=_LIMITS):
        dead = [_hang(path) for _ in range(count)]
    return _noticed(log, count), dead


def _noticed(log: Path, count: int) -> list[float]:
    """Return what the monitor has reported: the time of its check, less the deadline."""
    lines = [line[line.index("{") :] for line in log.read_text().splitlines() if '"section_timeout"' in line]
    found = {report["pid"]: report["late_s"] for report in map(json.loads, reversed(lines))}  # the first of each rank
    if len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} hangs were reported:\n{log.read_text()}")
    return list(found.values())


def _hang(path: str) -> float:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        client = _client_at(path)
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
    """Return the share of a core of a monitor whose rank is in a section with a limit of a second."""
    path = f"{folder}/idle"
    limits = {"step": None, "short": 1.0}
    with _monitor([path], rank_section_timeouts=limits, rank_out_of_section_timeout=60.0) as monitor:
        client = _client_at(path)
        client.start_section("step")
        shares = _shares(monitor, seconds)
        client.shutdown_workload_monitoring()
    return shares


@dataclass(frozen=True)
class _Load:
    """One monitor of many busy ranks.

    `shares` of a core, `rates` of events per second and rank, events that the ranks made, and those of them `lost`,
    which the monitor had not seen at the end; how `late` hangs of one more rank were detected, and the rank was `dead`.
    """

    shares: list[float]
    rates: list[float]
    made: float
    lost: float
    late: list[float]
    dead: list[float]


def _load(folder: str, ranks: int, seconds: float, hangs: int) -> _Load:
    *paths, free = [f"{folder}/{rank}" for rank in range(ranks + 1)]
    limits = {"step": 60.0, **_LIMITS}
    log = Path(folder, "load.log")
    with _monitor([*paths, free], log, rank_section_timeouts=limits, rank_out_of_section_timeout=60.0) as monitor:
        busy = [_BusyRank(path) for path in paths]
        shares = _shares(monitor, seconds)
        dead = [_hang(free) for _ in range(hangs)]
        found = [rank.stop() for rank in busy]
    made = sum(count for count, _, _ in found)
    lost = sum(count for _, count, _ in found)
    return _Load(shares, [rate for _, _, rate in found], made, lost, _noticed(log, hangs), dead)


def _shares(monitor: MonitorHandle, seconds: float) -> list[float]:
    """Return the share of a core that it takes, in several turns."""
    found = []
    for _ in range(_TURNS):
        before, begun = cpu_seconds(monitor.pid), time.monotonic()
        time.sleep(seconds / _TURNS)
        found.append((cpu_seconds(monitor.pid) - before) / (time.monotonic() - begun))
    return found


# -- monitors and ranks ------------------------------------------------------------------------------------------------


@contextmanager
def _monitor(paths: list[str], log: Path = Path(os.devnull), **settings: Any) -> Iterator[MonitorHandle]:
    """Run a monitor process that logs errors to `log`."""
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


def _client_at(path: str) -> RankMonitorClient:
    """Return a client of the monitor at this socket."""
    os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR] = path
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


class _BusyRank:
    """A process that opens and closes a section, until `stop`."""

    def __init__(self, path: str) -> None:
        self._reader, writer = os.pipe()
        stop, self._stop = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self._stop)
            _be_busy(path, stop, writer)
            os._exit(0)
        os.close(writer)
        os.close(stop)
        os.read(self._reader, 1)  # it has begun

    def stop(self) -> tuple[int, int, float]:
        """Return the events it made, how many of them its monitor has not seen, and how many it made per second."""
        os.write(self._stop, b"\n")
        os.close(self._stop)
        with os.fdopen(self._reader) as file:
            text = file.read()
        if os.waitpid(self._child, 0)[1] or not text:
            raise RuntimeError("a simulated rank has failed")
        made, lost, rate = text.split()
        return int(made), int(lost), float(rate)


def _be_busy(path: str, stop: int, tell: int) -> None:
    client = _client_at(path)
    assert client._recorder is not None
    earlier = client._recorder.events()
    os.write(tell, b"\n")
    made, begun = 0, time.monotonic()
    while not select.select([stop], [], [], 1 / _EVENTS_PER_S)[0]:
        if made % 2:
            client.end_section("step")
        else:
            client.start_section("step")
        made += 1
    rate = made / (time.monotonic() - begun)
    os.write(tell, f"{made} {0 if _all_seen(client, earlier + made) else made} {rate}".encode())


def _all_seen(client: RankMonitorClient, events: int) -> bool:
    """Whether the monitor says that it has seen so many events."""
    assert client._connection is not None
    assert client._connection.link is not None
    try:
        return client._connection.link.request(messages.Confirm(events))
    except LinkError:
        return False


# -- report ------------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--pairs", type=at_least(1), default=20_000, help="of events in a turn (default: 20000)")
    parser.add_argument("--hangs", type=at_least(1), default=50, help="alone, and beside busy ranks (default: 50)")
    parser.add_argument(
        "--seconds", type=positive, default=45.0, help="of an idle, and of a busy monitor (default: 45)"
    )
    parser.add_argument("--ranks", type=at_least(1), default=64, help="of the busy monitor (default: 64)")


def run(options: argparse.Namespace) -> None:
    """Measure, and print a table."""
    os.environ.setdefault("RANK", "0")
    os.environ.pop("LOCAL_RANK", None)
    with tempfile.TemporaryDirectory() as folder:
        pairs = _pairs(folder, options.pairs, True)
        acknowledged = _pairs(folder, options.pairs // 20 or 1, False)
        datagrams = _datagrams(options.pairs)
        measured, shares = _detector(options.pairs)
        late, dead = _hangs(folder, options.hangs)
        idle = _idle(folder, options.seconds)
        load = _load(folder, options.ranks, options.seconds, options.hangs)
    micro, fine = (lambda s: f"{1e6 * s:.1f} µs"), (lambda share: f"{100 * share:.3f} %")
    milli = partial(milliseconds, digits=1)
    rows = [
        Row("start and end, shared memory", pairs, show=micro),
        Row("start and end, acknowledged", acknowledged, show=micro),
        Row("the same as two datagrams of JSON", datagrams, show=micro),
        Row("a section of a detector of stragglers", measured, show=micro),
        Row(f"  {_SECTIONS} of them, of a step of {_STEP_S:g} s", shares, [_TARGET_STEP] * len(shares), 1.0, fine),
        Row("hang noticed late by", late, show=milli),
        Row("  95 of 100 within", [percentile(late, 0.95)], [_TARGET_LATE_S], 1.0, milli),
        Row("  the rank has ended after", dead, show=milli),
        Row("idle monitor, of a core", idle, [_TARGET_IDLE] * len(idle), 1.0, percent),
        Row(f"monitor of {options.ranks} busy ranks, of a core", load.shares, show=percent),
        Row("  events of each rank", load.rates, show=lambda rate: f"{rate:.0f} /s"),
        Row("  events lost", [load.lost], show=lambda lost: f"{lost:.0f} of {load.made:.0f}"),
        Row("  hang noticed late by, beside them", load.late, show=milli),
        Row("    95 of 100 within", [percentile(load.late, 0.95)], [_TARGET_LATE_S], 1.0, milli),
        Row("    the rank has ended after", load.dead, show=milli),
    ]
    print_report(f"Section monitoring; limit of the hangs: {_LIMIT_S:g} s", rows)
    write_json(options.json, {"rows": rows})
