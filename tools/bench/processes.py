"""Processes of a measurement: start ranks, limit their time, and measure the memory and processor time they use."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]


# -- ranks -------------------------------------------------------------------------------------------------------------


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torch reads in a rank of a job on this machine."""
    job = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", **job}


def free_port() -> int:
    """Return the number of a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Note:
    """What a rank, named by its initial number, wrote, and when: seconds since the epoch, one clock for all ranks."""

    rank: int
    time: float
    name: str
    iteration: int
    value: Any = None


class Notes:
    """The notes of one rank, in a file. They survive `kill -9`: a note is in the file when `add` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._fd = os.open(folder / f"notes-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def add(self, name: str, iteration: int, value: Any = None) -> None:
        """Append a note with the time of now."""
        line = json.dumps([self._rank, time.time(), name, iteration, value])
        os.write(self._fd, f"{line}\n".encode())


RankFunction = Callable[[int, Notes, Path], Any]


def run_forked(function: RankFunction, world_size: int, timeout_s: float) -> tuple[list[Note], list[dict[str, Any]]]:
    """Run `function(rank, notes, folder)` in forked ranks, which start in milliseconds, as a job of torch.

    Returns all notes, and the events that the wrapper wrote to the folder. Ranks may end in any way; TimeoutError if
    they do not. The caller must have only one thread.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        port = free_port()
        pids = [_fork(function, rank, world_size, port, folder) for rank in range(world_size)]
        _wait(pids, time.monotonic() + timeout_s)
        notes = [
            Note(*json.loads(line)) for file in sorted(folder.glob("notes-*")) for line in file.read_text().splitlines()
        ]
        events = folder / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        return notes, [json.loads(line) for line in lines]


def _fork(function: RankFunction, rank: int, world_size: int, port: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _rank_main(function, rank, world_size, port, folder)
    return pid


def _rank_main(function: RankFunction, rank: int, world_size: int, port: int, folder: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.environ |= rank_environment(rank, world_size, port)
        function(rank, Notes(folder, rank), folder)
        code = 0
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], deadline: float) -> None:
    """Reap all processes; kill all of them at the deadline, and raise TimeoutError."""
    late = False
    for pid in pids:
        pidfd = os.pidfd_open(pid)
        if not late and not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            late = True
            for other in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(pid, 0)
    if late:
        raise TimeoutError(f"a job of {len(pids)} ranks did not end in time")


@contextmanager
def killing_after(limit_s: float, processes: Iterable[subprocess.Popen[str]]) -> Iterator[None]:
    """Kill the processes if the block takes longer."""
    doomed = list(processes)

    def kill() -> None:
        for process in doomed:
            process.kill()

    timer = threading.Timer(limit_s, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# -- what they use -----------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads that live, to the nanosecond; `times` has hundredths of a second."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started, and that live."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(text) for file in files for text in file.read_text().split()]


@dataclass(frozen=True)
class Memory:
    """Bytes of this process and of all below it.

    `total` counts memory that several of them share once. `background` has the resident bytes of each process below
    this one, without shared memory: the fork server and the writers.
    """

    total: int
    background: list[int]


def measure_memory() -> Memory:
    """Return the memory of now."""
    this = psutil.Process()
    below = [process.pid for process in this.children(recursive=True)]
    total = sum(proportional_bytes(pid) for pid in (this.pid, *below))
    return Memory(total, [_private_bytes(pid) for pid in below])


def proportional_bytes(pid: int) -> int:
    """Return the resident bytes, of which a page of n processes counts 1/n in each; 0 if the process has just ended."""
    return _sizes(pid, "smaps_rollup").get("Pss", 0)


def _private_bytes(pid: int) -> int:
    """Return the resident bytes without shared memory; 0 if the process has just ended."""
    sizes = _sizes(pid, "status")
    return sizes.get("RssAnon", 0) + sizes.get("RssFile", 0)


def _sizes(pid: int, name: str) -> dict[str, int]:
    """Return the bytes by name in a file of /proc; none if the process has just ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
        fields = [line.split() for line in lines if line.endswith(" kB")]
        return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}
    return {}
