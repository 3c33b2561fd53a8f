"""What this process holds that a test could leave behind: descriptors, threads, children, shared memory."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.quick_keepers import descendants


@dataclass(frozen=True)
class _Holdings:
    fds: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    children: dict[int, str] = field(default_factory=dict)
    mappings: dict[str, int] = field(default_factory=dict)  # inode of a shared memory file -> number of mappings
    shm_files: frozenset[str] = frozenset()


def _file_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(f"/proc/{os.getpid()}/fd"):  # the descriptor of this very listing
                found[int(name)] = target
    return found


def _children() -> dict[int, str]:
    found = {}
    for child in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = f"{child.status()}: {child.name()}"
    return found


def _shared_mappings() -> dict[str, int]:
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/")):
            key = f"{fields[5]} inode {fields[4]}"
            found[key] = found.get(key, 0) + 1
    return found


def _shm_files(shm: Path) -> Iterator[str]:
    """Yield the names of shared memory.

    Not of semaphores of `multiprocessing`, which come and go with other test processes; nothing here makes any. Nor of
    directories: shared memory is a file, and a directory belongs to a program that uses this as a fast disk.
    """
    with os.scandir(shm) as entries:
        for entry in entries:
            if not entry.name.startswith("sem.mp-") and entry.is_file(follow_symlinks=False):
                yield entry.name


def _holdings() -> _Holdings:
    gc.collect()
    shm = Path("/dev/shm")
    return _Holdings(
        fds=_file_descriptors(),
        threads={thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None},
        children=_children(),
        mappings=_shared_mappings(),
        shm_files=frozenset(_shm_files(shm)) if shm.is_dir() else frozenset(),
    )


def _new(kind: str, before: dict[int, str], after: dict[int, str]) -> list[str]:
    return [f"{kind} {key}: {name}" for key, name in after.items() if before.get(key) != name]


def _difference(before: _Holdings, after: _Holdings) -> list[str]:
    return [
        *_new("file descriptor", before.fds, after.fds),
        *_new("thread", before.threads, after.threads),
        *_new("child process", {pid: after.children.get(pid, "") for pid in before.children}, after.children),
        *(
            f"shared memory {name}: {count} mappings, {before.mappings.get(name, 0)} before"
            for name, count in after.mappings.items()
            if count > before.mappings.get(name, 0)
        ),
        *(f"/dev/shm/{name}" for name in sorted(after.shm_files - before.shm_files)),
    ]


def is_gone(pid: int) -> bool:
    """Whether the process has ended, also if nobody has waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class LeakCheck:
    """Compares what this process holds with what it held at the start, or at the last `rebase()`.

    Threads are Python threads: the pools of torch and tensorstore start on first use and stay for good. Descriptors
    that a library opens on first use and keeps would count as a leak: use it once, then `rebase()`.
    """

    def __init__(self) -> None:
        self._before = _holdings()

    def rebase(self) -> None:
        """From here on, compare with now."""
        self._before = _holdings()

    def difference(self) -> list[str]:
        """What is there now and was not before, one line each."""
        return _difference(self._before, _holdings())

    def check(self, timeout: float = 20.0) -> None:
        """Fail when something is still left after `timeout` seconds: processes may need a moment to end."""
        deadline = time.monotonic() + timeout
        while left := self.difference():
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind after {timeout:g} s:\n  " + "\n  ".join(left))
            time.sleep(0.05)
