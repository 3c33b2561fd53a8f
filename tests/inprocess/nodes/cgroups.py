"""Control groups (v2) that stop, continue, kill and list all processes of a node or of a rank together."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path

_TIMEOUT_S = 10.0
_PAUSE_S = 0.005


def mount_point() -> Path:
    """Return where the hierarchy of version 2 is mounted. OSError if it is not."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    raise OSError("no control groups of version 2 are mounted")


class Group:
    """A control group. Any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> Group:
        """Make the group, empty; it may exist."""
        self.path.mkdir(exist_ok=True)
        return self

    def child(self, name: str) -> Group:
        """Return a group inside of this one; it is made if need be."""
        return Group(self.path / name).make()

    def pids(self) -> list[int]:
        """Return the processes in this group and in those inside of it."""
        found = []
        for file in self.path.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found += [int(line) for line in file.read_text().split()]
        return sorted(found)

    def freeze(self) -> None:
        """Stop all processes; returns when they stand still. Processes that are in the kernel do, too."""
        self._write("cgroup.freeze", "1")
        self._wait(lambda: "frozen 1" in (self.path / "cgroup.events").read_text(), "to stand still")

    def thaw(self) -> None:
        """Let all processes go on."""
        self._write("cgroup.freeze", "0")

    def kill(self) -> None:
        """Send SIGKILL to all processes, frozen or not, at once; returns when they are gone or zombies."""
        self._write("cgroup.kill", "1")
        self._wait(lambda: "populated 0" in (self.path / "cgroup.events").read_text(), "to die")

    def remove(self) -> None:
        """Kill all processes and remove the group. It may be removed already."""
        if not self.path.exists():
            return
        self.kill()
        folders = [file.parent for file in self.path.rglob("cgroup.procs")]
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            self._wait(functools.partial(_remove, folder), "to be removed")

    def _write(self, file: str, text: str) -> None:
        (self.path / file).write_text(text)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_TIMEOUT_S:g} s for the control group {self.path} {what}: {self.pids()}")
            time.sleep(_PAUSE_S)


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process that was killed is not quite gone
        return False
    return True
