"""What workers leave running when they have ended.

Every worker leads a session of its own. What belongs to that session when the worker is gone (processes of data
loaders, shells, whatever else was forked) is in the way of the next cycle and is ended. A process that has begun a
session of its own outlives its parent on purpose: writers of checkpoints, which finish a save that was staged and then
end by themselves. Those are only named in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from inprocess.fault_tolerance.launcher.workers import wait_readable

__all__ = ["end_leftovers", "log_survivors"]

_log = logging.getLogger(__name__)
_GRACE_S = 1.0
_KILL_S = 10.0


@dataclass(frozen=True)
class _Process:
    pid: int
    session: int
    name: str
    is_zombie: bool


def end_leftovers(sessions: Collection[int], grace_s: float = _GRACE_S) -> list[str]:
    """End all processes of these sessions: SIGTERM, `grace_s`, SIGKILL. Returns their names and numbers.

    The leaders must have ended. Returns when the processes are gone; after 10 s in any case, then the log says so.
    """
    found = _members(sessions)
    if not found:
        return []
    names = [f"{process.name} ({process.pid})" for process in found]
    _log.warning("left behind by workers, and ended now: %s", ", ".join(names))
    _signal_and_wait(sessions, signal.SIGTERM, grace_s)
    _signal_and_wait(sessions, signal.SIGKILL, _KILL_S)
    remaining = _members(sessions)
    if remaining:
        _log.error("cannot be ended: %s", ", ".join(f"{p.name} ({p.pid})" for p in remaining))
    return names


def log_survivors(marker: str) -> list[str]:
    """Name in the log what still runs and was started with this NAME=VALUE in its environment."""
    found = []
    wanted = marker.encode()
    for process in _processes():
        with contextlib.suppress(OSError):
            if not process.is_zombie and wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(f"{process.name} ({process.pid})")
    if found:
        _log.info("of the workers that have ended, these processes go on: %s", ", ".join(found))
    return found


def _signal_and_wait(sessions: Collection[int], number: signal.Signals, timeout_s: float) -> None:
    """Send a signal to the members, and again to those forked in between for SIGKILL, until there are none."""
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
    """Return a descriptor of the process that was seen, not of a later one with its number."""
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
    name, _, rest = text.partition(" (")[2].rpartition(") ")  # the name may hold anything, also parentheses
    values = rest.split()
    return _Process(pid, int(values[3]), name, values[0] in "ZX")
