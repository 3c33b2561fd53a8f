"""Names of the kernel objects of a laboratory, and removal of those that a killed test process has left.

A name begins with the process that made it: ``lab-<pid>-<start time of the process>-<number>``. What has such a name of
a process that does not exist any more is stale.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

from tests.inprocess.nodes import cgroups

NETNS_FOLDER = Path("/run/netns")
_NAME = re.compile(r"lab-(\d+)-(\d+)-\d+(-\w+)?")


def fresh_prefix() -> str:
    """Return the prefix of all names of a new laboratory of this process."""
    return f"lab-{os.getpid()}-{_start_time(os.getpid())}-{time.monotonic_ns() // 1000}"


def namespace_path(name: str) -> Path:
    """Return the file by which a network namespace is entered."""
    return NETNS_FOLDER / name


def remove_stale() -> list[str]:
    """Kill and remove what laboratories of dead processes have left; return the names."""
    removed = []
    for group in cgroups.mount_point().glob("lab-*"):
        if _is_stale(group.name):
            with contextlib.suppress(OSError):  # another test process removes it at the same time
                cgroups.Group(group).remove()
            removed.append(group.name)
    if NETNS_FOLDER.exists():
        for namespace in NETNS_FOLDER.glob("lab-*"):
            if _is_stale(namespace.name):
                subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True, check=False)
                removed.append(namespace.name)
    return removed


def _is_stale(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and _start_time(int(match[1])) != int(match[2])


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
