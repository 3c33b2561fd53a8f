"""The identity of a process, whether it runs, and how a child process is started."""

from __future__ import annotations

import functools
import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from inprocess.ipc.deadline import Deadline
from inprocess.ipc.interpreter import command_of

if TYPE_CHECKING:
    import subprocess


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinct from all others on any host.

    `start` is its start time in ticks since the boot; `host` names the boot and the pid namespace.
    """

    host: str
    pid: int
    start: int

    @classmethod
    def here(cls) -> Process:
        """The calling process."""
        return _this_process(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host, so that `alive` can tell."""
        return self.host == _host(os.getpid())

    @property
    def alive(self) -> bool | None:
        """Whether it runs, according to /proc; a zombie does not. None if unknown: it is on another host, or hidden."""
        if not self.is_here:
            return None
        start = _start_of(self.pid)
        return None if start == _HIDDEN else start == self.start

    @property
    def activity(self) -> str | None:
        """What it does, according to /proc, as the end of a sentence; None if unknown."""
        alive = self.alive
        return "has ended" if alive is False else None if alive is None else _ACTIVITIES.get(_stat_of(self.pid)[:1])


_ACTIVITIES = {
    b"R": "is running",
    b"S": "is waiting, in a call that can be interrupted",
    b"D": "is waiting for a device or a file system",
    b"T": "is stopped by a signal",
    b"t": "is stopped by a debugger",
}
_HIDDEN = -1
_KILLED_WAIT_S = 0.5


def _start_of(pid: int) -> int | None:
    """Return when a process of this host started; None for a zombie or no process; `_HIDDEN` if /proc hides it."""
    state, *fields = _stat_of(pid).split() or [b""]
    if not state:
        return _HIDDEN if _exists(pid) else None
    return None if state in (b"Z", b"X") else int(fields[18])


def _stat_of(pid: int) -> bytes:
    """Return /proc/PID/stat from the state on; nothing if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].strip()
    except OSError:
        return b""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


@functools.lru_cache(maxsize=2)
def _this_process(pid: int) -> Process:
    """Return the calling process. `pid` is its own: the cached answer of a parent must not serve a forked child."""
    return Process(_host(pid), pid, _start_of(pid) or 0)


@functools.lru_cache(maxsize=2)
def _host(pid: int) -> str:
    """Return the host of the calling process, whose id is `pid`."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            boot = stream.read().strip().replace("-", "")
    except OSError:
        boot = os.uname().nodename  # some sandboxes hide it
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino:x}"


def start_module(
    module: str,
    *arguments: str,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | None = "/",
    **pipes: Any,
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments...` in a session of its own, in "/", with `env` added to its environment.

    Its import path is that of this process; see `interpreter`. Standard streams that `pipes` does not name are
    connected to /dev/null. `cwd` None leaves it in the current directory. OSError if it cannot be started,
    RuntimeError if no interpreter is known.
    """
    import subprocess  # here: most processes that import this module, as a keeper and its workers, start none

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process: Any = subprocess.Popen(
        command_of(module, arguments),
        start_new_session=True,
        pass_fds=pass_fds,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        **(streams | pipes),
    )
    return cast("subprocess.Popen[bytes]", process)


def end_process(process: subprocess.Popen[bytes], deadline: Deadline) -> None:
    """Wait until a child process has ended, and kill it at the deadline.

    One that waits in the kernel for a file system that does not answer is left: it ends with that wait.
    """
    import subprocess

    try:
        process.wait(deadline.left_s)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(_KILLED_WAIT_S)
        except subprocess.TimeoutExpired:
            process.returncode = -signal.SIGKILL


def has_ended(pidfd: int, deadline: Deadline | None = None) -> bool:
    """Return whether the process of a pidfd has ended, now or until the deadline."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0 if deadline is None else deadline.poll_ms()))
