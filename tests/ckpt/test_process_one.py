"""A trainer, or the launcher, that is process 1 of its pid namespace, as the first process of a container is."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import ckpt
from tests.support.leaks import is_gone

pytestmark = pytest.mark.timeout(200)  # each starts Python with torch

REPOSITORY = Path(__file__).resolve().parents[2]
_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
_DEADLINE_S = 90.0

_TRAINER = """
import os, sys, time
import psutil, torch
import ckpt

state = {"weight": torch.zeros(1000)}
with ckpt.Checkpointer(sys.argv[1]) as checkpointer, ckpt.PreemptionWatcher(checkpointer) as watcher:
    if checkpointer.restore(state) is None:
        checkpointer.save(state, 1)
    print("begins as process", os.getppid() if "RANK" in os.environ else os.getpid(), flush=True)
    for step in range(2, 1_000_000):
        if watcher.should_stop(step):
            print("stops after", step, watcher.save(state, step), flush=True)
            break
        time.sleep(0.001)
sys.exit(watcher.exit_code)
"""

_WRAPPED = """
import os, sys, time
import torch
import ckpt, ckpt.restart, inprocess

checkpointer = ckpt.Checkpointer(sys.argv[1], snapshots=ckpt.Snapshots(1, linger=600, linger_id="job"))

@inprocess.Wrapper(abort=ckpt.restart.CheckpointAbort(checkpointer))
def train():
    checkpointer.save({"weight": torch.zeros(1000)}, 1)
    print("begins as process", os.getpid(), flush=True)
    while True:
        time.sleep(0.01)

train()
"""

_KEEPERS = """
import os, sys, time
import psutil, torch
import ckpt

def children(name):
    return [process.pid for process in psutil.process_iter() if process.name() == name]

def zombies():
    return sum(process.status() == psutil.STATUS_ZOMBIE for process in psutil.process_iter())

with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    for step in range(1, 5):
        while checkpointer.latest_step() != step:
            try:
                checkpointer.save({"weight": torch.zeros(1000)}, step)
            except ckpt.WriterError:
                pass  # of the writer that was killed
        for name in ("ckpt-keeper", "ckpt-writer"):
            (pid,) = [pid for pid in children(name) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
            os.kill(pid, 9)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print("begins as process", os.getpid(), "with zombies:", zombies(), flush=True)
"""


class _Container:
    """A program that is process 1 of a namespace, and what it has printed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.printed = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.printed += line

    def wait_for(self, pattern: str, times: int = 1) -> None:
        _wait_until(
            lambda: len(re.findall(pattern, self.printed)) >= times or self._process.poll() is not None, self.printed
        )
        assert len(re.findall(pattern, self.printed)) >= times, self.printed

    def processes(self) -> dict[int, psutil.Process]:
        return {process.pid: process for process in psutil.Process(self._process.pid).children(recursive=True)}

    def first(self) -> int:
        """The pid, seen from here, of process 1."""
        (child,) = psutil.Process(self._process.pid).children()
        return child.pid

    def running(self, script: str) -> set[int]:
        """The pids of processes that have not ended and have this word in their command line."""
        found = set()
        for pid, process in self.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if script in process.cmdline():
                    found.add(pid)
        return found

    def exit_code(self) -> int:
        code = self._process.wait(_DEADLINE_S)
        self._reader.join(_DEADLINE_S)
        return code


@contextlib.contextmanager
def _container(*arguments: str | Path, **variables: str) -> Iterator[_Container]:
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("no pid namespaces here")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
    command = [*_UNSHARE, sys.executable, *map(str, arguments)]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, text=True
    ) as process:
        container = _Container(process)
        try:
            yield container
        finally:
            for each in container.processes().values() if process.poll() is None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            container.exit_code()


def _wait_until(condition: Callable[[], object], *told: object) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, told
        time.sleep(0.02)


def test_a_trainer_saves_and_ends_when_it_gets_sigterm(tmp_path: Path) -> None:
    with _container("-c", _TRAINER, tmp_path / "run") as container:
        container.wait_for("begins as process 1")
        os.kill(container.first(), signal.SIGTERM)
        assert container.exit_code() == os.EX_TEMPFAIL, container.printed
    stopped = re.search(r"stops after (\d+) True", container.printed)
    assert stopped is not None, container.printed
    assert ckpt.Checkpointer(tmp_path / "run", read_only=True).latest_step() == int(stopped[1])


def test_without_a_handler_process_one_is_not_ended_by_sigterm() -> None:
    program = "print('begins'); import sys; sys.stdout.flush(); sys.stdin.readline(); print('goes on')"
    with _container("-u", "-c", program) as container:
        container.wait_for("begins")
        os.kill(container.first(), signal.SIGTERM)
        assert container._process.stdin is not None
        container._process.stdin.write("\n")
        container._process.stdin.flush()
        assert container.exit_code() == 0
    assert "goes on" in container.printed


def test_keeper_writer_and_monitor_end_with_the_container(tmp_path: Path) -> None:
    """Even the keeper that keeps snapshots for ten minutes: memory of a container does not outlive its process 1."""
    with _container("-c", _WRAPPED, tmp_path / "run", RANK="0", WORLD_SIZE="1") as container:
        container.wait_for("begins as process 1")
        processes = container.processes()
        told = "\n".join(f"{process.name()} {process.cmdline()}" for process in processes.values())
        for word in ("ckpt-keeper", "ckpt-writer", "inprocess.monitor_process"):
            assert word in told
        os.kill(container.first(), signal.SIGKILL)
        container.exit_code()
        _wait_until(lambda: all(is_gone(pid) for pid in processes), told)


def test_workers_of_keepers_that_were_killed_do_not_stay_zombies(tmp_path: Path) -> None:
    with _container("-c", _KEEPERS, tmp_path / "run") as container:
        container.wait_for("begins as process 1")
        assert container.exit_code() == 0, container.printed
    found = re.search(r"with zombies: (\d+)", container.printed)
    assert found is not None
    assert int(found[1]) <= 1  # the last writer


def test_the_launcher_passes_sigterm_on_and_reaps_in_each_cycle(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINER)
    launcher = ["-m", "inprocess.fault_tolerance.launcher", "--standalone", "--nproc-per-node=1", "--max-restarts=2"]
    with _container(*launcher, tmp_path / "train.py", tmp_path / "run") as container:
        container.wait_for("begins as process 1")
        left = [pid for pid, each in container.processes().items() if each.name().startswith("ckpt-")]
        assert len(left) == 2  # keeper and writer, which process 1 gets when the worker is killed
        for times in 2, 3:
            (worker,) = container.running(str(tmp_path / "train.py")) - {container.first()}
            if times == 3:
                _wait_until(lambda: all(map(is_gone, left)))
            os.kill(worker, signal.SIGKILL)
            container.wait_for("begins as process 1", times)
        assert not any(map(psutil.pid_exists, left)), "zombies are left of the worker that was killed first"
        os.kill(container.first(), signal.SIGTERM)
        assert container.exit_code() == 128 + signal.SIGTERM, container.printed
    stopped = re.search(r"stops after (\d+) True", container.printed)
    assert stopped is not None, container.printed
    assert ckpt.Checkpointer(tmp_path / "run", read_only=True).latest_step() == int(stopped[1])
