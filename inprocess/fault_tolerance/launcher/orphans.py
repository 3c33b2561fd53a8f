"""Processes and GPU memory that workers leave behind when they have ended.

Every worker leads a session of its own. Processes that are still in that session after the worker has ended (data
loaders, shells, other forks) would disturb the next cycle and are ended. A process with a session of its own outlives
its parent on purpose, like the writers of checkpoints, which finish a staged save and then end by themselves. Such
processes are only named in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from inprocess.fault_tolerance.config import FaultToleranceConfig
from inprocess.fault_tolerance.launcher.workers import wait_readable
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.process import end_process

_log = logging.getLogger(__name__)
_GRACE_S = 1.0
_KILL_S = 10.0
_QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class _Process:
    pid: int
    session: int
    name: str
    is_zombie: bool


def end_orphans(sessions: Collection[int], grace_s: float = _GRACE_S) -> list[str]:
    """End all processes of these sessions: SIGTERM, `grace_s`, SIGKILL. Returns their names and ids.

    The leaders must have ended. Returns when the processes have ended, or after 10 s, with an error in the log.
    """
    found = _members(sessions)
    if not found:
        return []
    names = [f"{process.name} ({process.pid})" for process in found]
    _log.warning("ending processes that workers have left behind: %s", ", ".join(names))
    _signal_and_wait(sessions, signal.SIGTERM, grace_s)
    _signal_and_wait(sessions, signal.SIGKILL, _KILL_S)
    remaining = _members(sessions)
    if remaining:
        _log.error("these processes cannot be ended: %s", ", ".join(f"{p.name} ({p.pid})" for p in remaining))
    return names


def log_survivors(marker: str) -> list[str]:
    """Log the processes that still run and were started with this NAME=VALUE in their environment."""
    found = []
    wanted = marker.encode()
    for process in _processes():
        with contextlib.suppress(OSError):
            if not process.is_zombie and wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(f"{process.name} ({process.pid})")
    if found:
        _log.info("processes of ended workers that still run: %s", ", ".join(found))
    return found


def _signal_and_wait(sessions: Collection[int], number: signal.Signals, timeout_s: float) -> None:
    """Send a signal to all members, and to those forked meanwhile, until there are none or the time is over."""
    deadline = time.monotonic() + timeout_s
    signalled: set[int] = set()
    while (members := _members(sessions)) and (left_s := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as stack:
            fds = []
            for process in members:
                fd = _open(process)
                if fd is None:
                    continue
                stack.callback(os.close, fd)
                fds.append(fd)
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(fd, number)
                        signal.pidfd_send_signal(fd, signal.SIGCONT)
            wait_readable(fds, left_s)


def _open(process: _Process) -> int | None:
    """Return a descriptor of this process, not of a later one with the same id."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    now = _read(process.pid)
    if now is not None and now.session == process.session:
        return fd
    os.close(fd)
    return None


def _members(sessions: Collection[int]) -> list[_Process]:
    return [p for p in _processes() if p.session in sessions and not p.is_zombie and p.pid != os.getpid()]


def _processes() -> list[_Process]:
    found = [_read(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [process for process in found if process is not None]


def _read(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition(" (")[2].rpartition(") ")  # the name may contain anything, also parentheses
    values = rest.split()
    return _Process(pid, int(values[3]), name, values[0] in "ZX")


class GpuMemory:
    """Waits until the driver has freed the memory of ended processes: what was in use before the first workers counts.

    For the GPUs in CUDA_VISIBLE_DEVICES, or all, by nvidia-smi. Without it, or without a GPU, it never waits.
    """

    def __init__(self, config: FaultToleranceConfig) -> None:
        self._timeout_s = config.gpu_memory_reclaim_timeout
        self._tolerance_mb = config.gpu_memory_tolerance_mb
        self._interval_s = config.gpu_memory_poll_interval
        self._tool = shutil.which("nvidia-smi")
        self._before = self._used_mb()

    def wait_free(self) -> bool:
        """Wait until no GPU has more memory in use than before, plus the tolerance. False, with a warning, on timeout.

        Blocks the calling thread. The driver has no event for this, so it polls every `gpu_memory_poll_interval`.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._before:
            used = self._used_mb()
            full = {gpu: mb for gpu, mb in used.items() if mb > self._before.get(gpu, 0.0) + self._tolerance_mb}
            if not full:
                return True
            if time.monotonic() >= deadline:
                _log.warning("after %g s there is still GPU memory in use, in MiB: %s", self._timeout_s, full)
                return False
            threading.Event().wait(min(self._interval_s, max(0.0, deadline - time.monotonic())))
        return True

    def _used_mb(self) -> dict[str, float]:
        if self._tool is None:
            return {}
        command = [self._tool, "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            if not visible.strip():
                return {}
            command.append(f"--id={visible}")
        try:
            pairs = [line.split(",") for line in _output_of(command).splitlines() if line.strip()]
            return {gpu.strip(): float(used) for gpu, used in pairs}
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _log.debug("the memory in use on GPUs is unknown: %s", error)
            return {}


def _output_of(command: list[str]) -> str:
    """Return the output of a command. OSError, ValueError, SubprocessError.

    `subprocess.run` waits without limit for a command that it has killed. One that waits for a defective GPU in the
    kernel does not end then.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    try:
        output, _ = process.communicate(timeout=_QUERY_TIMEOUT_S)
    finally:
        end_process(process, Deadline(0.0))
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output.decode()
