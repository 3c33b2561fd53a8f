"""A monitor and the worker processes it watches."""

import json
import os
import re
import selectors
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from inprocess.fault_tolerance import FaultToleranceConfig
from inprocess.fault_tolerance.rank_monitor_server import RankMonitorServer
from inprocess.monitor_process.start import MonitorHandle

REPOSITORY = Path(__file__).resolve().parents[3]
_PROLOGUE = """
import ctypes, os, signal, sys, threading, time
from inprocess.fault_tolerance import RankMonitorClient, RankMonitorClientError
def say(*words):
    print(*words, flush=True)
def wait():
    sys.stdin.readline()
client = RankMonitorClient()
"""


class Worker:
    """A process with a client, which runs a script. Its `wait()` returns at each `go()`."""

    def __init__(self, script: str, path: str, env: dict[str, str], python: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", _PROLOGUE + textwrap.dedent(script)],
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "RANK": "0",
                "FT_RANK_MONITOR_IPC_SOCKET": path,
                **env,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self.process.pid

    def line(self, timeout: float = 30.0) -> str:
        """The next line it says."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout), "the worker says nothing"
        return self.process.stdout.readline().decode().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def wait(self, timeout: float = 30.0) -> int:
        return self.process.wait(timeout)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what a worker that has died was told
                    pipe.close()


class Node:
    """Monitors and workers; ended with the context."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "monitor.sock")
        self._log = folder / "monitor.log"
        self._stack = ExitStack()

    def monitor(
        self,
        slot_wait_s: float = 30.0,
        is_restarter_logger: bool = False,
        peers: Sequence[str] = (),
        **settings: Any,
    ) -> MonitorHandle:
        saved = os.dup(2)
        with open(self._log, "ab") as file:
            os.dup2(file.fileno(), 2)
            try:
                handle = RankMonitorServer.run_in_subprocess(
                    FaultToleranceConfig(**settings),
                    self.path,
                    is_restarter_logger,
                    slot_wait_s=slot_wait_s,
                    peers=peers,
                )
            finally:
                os.dup2(saved, 2)
                os.close(saved)
        self._stack.callback(handle.close)
        return handle

    def worker(self, script: str, *, python: str = sys.executable, **env: str) -> Worker:
        worker = Worker(script, self.path, env, python)
        self._stack.callback(worker.close)
        return worker

    def log(self) -> str:
        return self._log.read_text()

    def wait_log(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout
        while True:
            if found := re.search(pattern, self.log()):
                return found
            assert time.monotonic() < deadline, f"{pattern!r} is not in\n{self.log()}"
            time.sleep(0.02)

    def reports(self) -> list[dict[str, Any]]:
        """What the monitor has reported of ranks that were late."""
        lines = [line.split(" | ")[-1] for line in self.log().splitlines() if '"section_timeout"' in line]
        return [json.loads(line) for line in lines]

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
