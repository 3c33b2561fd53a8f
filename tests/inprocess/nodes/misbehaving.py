"""Programs without the protection of the wrapper: the laboratory and the judge are tested with them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from tests.inprocess.nodes.journal import Journal

_STEP_S = 0.05
_SILENT_S = 0.6
_PORT = 6000


def count(journal: Journal, seconds: float = 30.0) -> None:
    """Make steps that need no other rank, with a child process that a monitor process could be."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", f"import time; time.sleep({seconds})"])
    (journal.folder / f"monitor_{rank}.pid").write_text(str(child.pid))
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (journal.folder / "stop").exists():
        journal.note("step", 0, rank, world_size)
        time.sleep(_STEP_S)
    child.kill()
    child.wait()


def split(journal: Journal, _: object = None) -> None:
    """Go on with all ranks that send heartbeats: shows the defect of restarts decided by heartbeats alone."""
    process, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heard = dict.fromkeys(range(world_size), time.monotonic() + 5.0)  # at the start all count as there
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heartbeats:
        heartbeats.bind(("", _PORT + process))
        heartbeats.setblocking(False)
        view, iteration = list(range(world_size)), 0
        while not (journal.folder / "stop").exists():
            _send(heartbeats, process, world_size)
            _receive(heartbeats, heard)
            now = time.monotonic()
            there = [other for other, at in heard.items() if other == process or now - at < _SILENT_S]
            if there != view:
                view, iteration = there, iteration + 1
            journal.note("step", iteration, view.index(process), len(view), sum(1 << member for member in view))
            time.sleep(_STEP_S)


def _send(heartbeats: socket.socket, process: int, world_size: int) -> None:
    for node in _addresses():
        for other in range(world_size):
            try:
                heartbeats.sendto(str(process).encode(), (node, _PORT + other))
            except OSError:  # no such process on that node, or no way to it
                continue


def _receive(heartbeats: socket.socket, heard: dict[int, float]) -> None:
    while True:
        try:
            other = int(heartbeats.recv(64))
        except BlockingIOError:
            return
        except ConnectionRefusedError:  # the answer to an earlier heartbeat
            continue
        heard[other] = time.monotonic()


def _addresses() -> list[str]:
    with open("/etc/hosts") as hosts:
        return [line.split()[0] for line in hosts if "node" in line]
