"""A cluster of Slurm with one node, this host, for a test. Needs root and Debian's packages slurm-wlm and munge."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.ranks import free_port

_START_S = 30.0


def missing_for_slurm() -> str | None:
    """Return what a cluster lacks here; None if it can be run."""
    missing = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """The commands of a running cluster."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {**os.environ, **env}

    def run(self, *command: str, env: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
        """Run a command of Slurm, with more variables for a job if given, and return what it prints."""
        variables = {**self.env, **(env or {})}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, env=variables, cwd=folder)
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
        return answer.stdout

    def wait_for_state(self, job: str, state: str, timeout: float = 60.0) -> None:
        """Wait until a job has this state, such as COMPLETED."""
        deadline = time.monotonic() + timeout
        while f"JobState={state}" not in (shown := self.run("scontrol", "show", "job", job)):
            assert time.monotonic() < deadline, shown
            time.sleep(0.2)


@contextlib.contextmanager
def run_slurm(folder: Path) -> Iterator[Slurm]:
    """Run a cluster that keeps its files in `folder`; kill it, and its jobs, in the end."""
    with contextlib.ExitStack() as stack:
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key, munge = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(os.urandom(256))
        key.chmod(0o600)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        _start(stack, folder, "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={munge}", *files)
        _wait_for(munge.exists, "munged has no socket", folder)
        conf = folder / "slurm.conf"
        conf.write_text(_configuration(folder, munge))
        slurm = Slurm({"SLURM_CONF": str(conf)})
        _start(stack, folder, "slurmctld", "-D", "-f", str(conf))
        _start(stack, folder, "slurmd", "-D", "-f", str(conf))
        stack.callback(_cancel_all, slurm)
        _wait_for(lambda: _is_idle(slurm), "the node did not become idle", folder)
        yield slurm


def _configuration(folder: Path, munge: Path) -> str:
    host = socket.gethostname()
    lines = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": free_port(),
        "SlurmdPort": free_port(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={munge},cred_expire=5",  # the least; a job that is requeued waits so long
        "CredType": "cred/munge",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=2,bf_interval=2",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "ReturnToService": 2,
        "KillWait": 5,
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
        "PartitionName": "main Nodes=ALL Default=YES MaxTime=300 State=UP",
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def _start(stack: contextlib.ExitStack, folder: Path, *command: str) -> None:
    with open(folder / f"{command[0]}.out", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


def _is_idle(slurm: Slurm) -> bool:
    answer = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, timeout=30, env=slurm.env)
    return answer.stdout.strip() == "idle"


def _cancel_all(slurm: Slurm) -> None:
    subprocess.run(["scancel", "--user=root", "--full"], capture_output=True, timeout=30, env=slurm.env)
    deadline = time.monotonic() + 15
    with contextlib.suppress(AssertionError):
        while slurm.run("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)


def _wait_for(condition: Callable[[], bool], problem: str, folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() >= deadline:
            logs = [f"{log.name}:\n{log.read_text(errors='replace')[-1000:]}" for log in folder.glob("*.out")]
            raise AssertionError("\n".join([problem, *logs]))
        time.sleep(0.1)
