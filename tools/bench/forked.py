"""Ranks as forked processes, which start in milliseconds, and what they note down, also when they are killed."""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Note", "Notes", "run_forked"]


@dataclass(frozen=True)
class Note:
    """What rank `rank` (the initial one) wrote, and when: seconds since the epoch, one clock for all ranks."""

    rank: int
    time: float
    name: str
    iteration: int
    value: Any = None


class Notes:
    """Appends to the file of a rank. A note is there as soon as `add` has returned."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._fd = os.open(folder / f"notes-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def add(self, name: str, iteration: int, value: Any = None) -> None:
        line = json.dumps([self._rank, time.time(), name, iteration, value])
        os.write(self._fd, f"{line}\n".encode())


def run_forked(
    function: Callable[[int, Notes, Path], Any], world_size: int, timeout_s: float
) -> tuple[list[Note], list[dict[str, Any]]]:
    """Run `function(rank, notes, folder)` on all ranks, with the variables of a job of torch.

    Returns all notes, and the events that the wrapper wrote into the folder. Ranks may end in any way; TimeoutError if
    they do not. The caller has one thread.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        port = _free_port()
        pids = [_fork(function, rank, world_size, port, folder) for rank in range(world_size)]
        _wait(pids, time.monotonic() + timeout_s)
        notes = [
            Note(*json.loads(line)) for file in sorted(folder.glob("notes-*")) for line in file.read_text().splitlines()
        ]
        events = folder / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        return notes, [json.loads(line) for line in lines]


def _fork(function: Callable[[int, Notes, Path], Any], rank: int, world_size: int, port: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _rank_main(function, rank, world_size, port, folder)
    return pid


def _rank_main(
    function: Callable[[int, Notes, Path], Any], rank: int, world_size: int, port: int, folder: Path
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
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
    """Reap all; kill all when time is over."""
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
        raise TimeoutError(f"a job of {len(pids)} ranks did not end")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
