"""Launchers as processes, forked from one that has imported torch, and workers that are small scripts."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.template import quick_python

REPOSITORY = Path(__file__).resolve().parents[3]
_SERVER = Path(__file__).with_name("launcher_server.py")
_MARKER = "TEST_LAUNCH_ID"
_PROLOGUE = """
import os, signal, subprocess, sys, threading, time
cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
def say(*words):
    line = " ".join(map(str, ("cycle", cycle, "rank", rank, *words))) + "\\n"
    os.write(log, line.encode())
log = os.open(os.environ["TEST_EVENTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def others(name):  # wait until so many have come by, in this cycle
    open(f"{os.environ['TEST_EVENTS']}.{name}.{cycle}.{rank}", "w").close()
    while any(not os.path.exists(f"{os.environ['TEST_EVENTS']}.{name}.{cycle}.{r}")
              for r in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.02)
def monitored():
    from inprocess.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client
def hang():
    threading.Event().wait()
"""


class Launcher:
    """One launcher."""

    def __init__(self, job: "Job", pid: int, log: Path, options: tuple[str, ...]) -> None:
        self.pid = pid
        self.log_file = log
        self.options = options
        self._job = job

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 40.0) -> int:
        return self._job.server.wait(self.pid, timeout, self._job.everything)

    def wait_log(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        return self._job.wait_for(self.log, pattern, timeout)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def monitors(self) -> list[psutil.Process]:
        """Those that it has started itself; wrappers in workers have their own."""
        children = psutil.Process(self.pid).children()
        return [child for child in children if "inprocess.monitor_process" in child.cmdline()]

    def die_with_workers(self) -> None:
        """As when the power of a node fails."""
        victims = [*self.children(), psutil.Process(self.pid)]
        for process in victims:
            process.suspend()
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()


class Job:
    """Launchers that run the same script, and what their workers say."""

    def __init__(self, server: "LauncherServer", folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.events_file = folder / "events"
        self.launchers: list[Launcher] = []
        self._marker = uuid.uuid4().hex
        self._script = folder / "worker.py"

    def launch(self, script: str, *options: str, env: dict[str, str] | None = None) -> Launcher:
        self._script.write_text(_PROLOGUE + textwrap.dedent(script))
        argv = [*options, f"--log-dir={self.folder / 'logs'}", str(self._script)]
        return self._start(argv, env or {}, options)

    def _start(self, argv: list[str], env: dict[str, str], options: tuple[str, ...] = ()) -> Launcher:
        node = len(self.launchers)
        log = self.folder / f"launcher_{node}.log"
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            "TEST_EVENTS": str(self.events_file),
            "OMP_NUM_THREADS": "1",
            _MARKER: self._marker,
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
        }
        pid = self.server.start(argv, variables, log)
        self.launchers.append(Launcher(self, pid, log, options))
        return self.launchers[-1]

    def run_example(self, script: Path, arguments: list[str], *options: str) -> Launcher:
        """Two workers, forked from the launcher: they have imported what it has."""
        common = ["--standalone", "--nproc-per-node=2", "--run-path", "--start-method=fork", *options]
        return self._start([*common, f"--log-dir={self.folder / 'logs'}", str(script), *arguments], {})

    def one_node(
        self, script: str, *options: str, ranks: int = 1, restarts: int = 1, with_torch: bool = False
    ) -> Launcher:
        """A launcher without others. Workers `with_torch` are forked from a process that has imported it.

        Those have another parent and process group than the launcher gives them.
        """
        common = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        env = {"PYTHON_EXEC": quick_python()} if with_torch else {}
        return self.launch(script, *common, *options, env=env)

    def events(self) -> str:
        return self.events_file.read_text() if self.events_file.exists() else ""

    def wait_event(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        return self.wait_for(self.events, pattern, timeout)

    def wait_for(self, text: Callable[[], str], pattern: str, timeout: float) -> re.Match[str]:
        deadline = time.monotonic() + timeout
        while True:
            if found := re.search(pattern, text(), re.MULTILINE):
                return found
            assert time.monotonic() < deadline, f"{pattern!r} does not come\n{self.everything()}"
            time.sleep(0.02)

    def everything(self) -> str:
        logs = [f"---- launcher {node}:\n{each.log()}" for node, each in enumerate(self.launchers)]
        return "\n".join([*logs, f"---- events:\n{self.events()}"])

    def left(self) -> list[psutil.Process]:
        """What launchers have started and still runs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(_MARKER) == self._marker
                    and process.status() != psutil.STATUS_ZOMBIE
                    and process.pid not in [each.pid for each in self.launchers]
                ):
                    found.append(process)
        return found

    def close(self) -> None:
        for launcher in self.launchers:
            if not self.server.has_ended(launcher.pid):
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    launcher.die_with_workers()
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()


class LauncherServer:
    """The warmed process, which has imported these modules, too. `close` ends it."""

    def __init__(self, *modules: str) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [quick_python(), str(_SERVER), *modules],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONFAULTHANDLER": "1"},
                stdin=theirs.fileno(),
                start_new_session=True,
            )

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> int:
        self._end.send(json.dumps({"argv": argv, "env": env, "log": str(log)}).encode())
        while True:
            values = json.loads(self._end.recv(1 << 16))
            if "code" not in values:
                return int(values["pid"])
            self._codes[values["pid"]] = values["code"]

    def has_ended(self, pid: int) -> bool:
        while self._read(0):
            pass
        return pid in self._codes

    def wait(self, pid: int, timeout: float, explain: Callable[[], str]) -> int:
        deadline = time.monotonic() + timeout
        while pid not in self._codes:
            assert self._read(max(0.0, deadline - time.monotonic())), f"launcher {pid} goes on\n{explain()}"
        return self._codes[pid]

    def close(self) -> None:
        self._end.close()
        self._process.wait(30)  # a process with torch takes seconds to end on a busy machine

    def _read(self, timeout: float) -> bool:
        if not select.select([self._end], [], [], timeout)[0]:
            return False
        values = json.loads(self._end.recv(1 << 16))
        self._codes[values["pid"]] = values["code"]
        return True
