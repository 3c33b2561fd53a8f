"""Processes, told from all others on any host, and whether they run: by a look into /proc, on this host."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

__all__ = ["Process"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process. `start` is its start time in ticks since the boot; `host` is the boot and the pid namespace."""

    host: str
    pid: int
    start: int

    @classmethod
    def here(cls) -> Process:
        """The calling process."""
        return _this_process(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host, of which `alive` knows."""
        return self.host == _host(os.getpid())

    @property
    def alive(self) -> bool | None:
        """Whether it runs; a zombie does not. None if that cannot be known: it is of another host, or hidden."""
        if not self.is_here:
            return None
        start = _start_of(self.pid)
        return None if start == _HIDDEN else start == self.start


_HIDDEN = -1


def _start_of(pid: int) -> int | None:
    """When a process of this host started; None if there is none, or a zombie. `_HIDDEN` if /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            state, *fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return _HIDDEN if _exists(pid) else None
    return None if state in (b"Z", b"X") else int(fields[18])


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
    """The calling process, which has this `pid`: that tells a fork from its parent."""
    return Process(_host(pid), pid, _start_of(pid) or 0)


@functools.lru_cache(maxsize=2)
def _host(pid: int) -> str:
    """That of the calling process, which has this `pid`."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            boot = stream.read().strip().replace("-", "")
    except OSError:
        boot = os.uname().nodename  # some sandboxes hide it
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino:x}"
