"""Leases: which processes of a job are alive, on any POSIX file system and from any host.

    <directory>/<host>-<device>     one file for each host; its time is renewed while a process there is alive
        {"rank": 0, "writer": [71, 512], "trainer": [70, 500]}     a writer process registered (pid, start time)
        {"rank": 0, "left": [70, 500], "done": false}              its trainer has ended, or has left;
                                                                   done: its writers have left, too

Processes of the same host (boot id and pid namespace) are looked up in /proc, so their death is known at once, on
every file system. Of another host only the time of its file is known: all its processes count as dead when that is
older than `EXPIRY_S` by the clock of the file system. A lease does not protect data, because a process may be slow and
not dead; it only tells for which processes to wait. The token protects data (see `ownership`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.regular_files import read_document_at
from inprocess.ipc.process import Process

__all__ = ["EXPIRY_S", "RENEW_S", "Lease", "Leases", "Writer", "is_fresh"]

EXPIRY_S = 15.0
RENEW_S = 4.0
_POLL_S = 0.5
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Writer:
    """A registered writer process. `has_trainer`: its trainer is alive and has not left."""

    rank: int
    process: Process
    alive: bool
    has_trainer: bool


class Leases:
    """The lease files in one directory. Any process; registering needs write permission."""

    def __init__(self, path: str) -> None:
        self.path = path

    def register(self, rank: int, trainer: Process, trainer_gone: Callable[[], bool]) -> Lease:
        """Register this process as a writer of `rank` and renew its lease until `close` or the end of the process.

        `trainer_gone` is called about twice a second, in a thread. StorageError if the directory does not exist.
        """
        lease = Lease(self, rank, trainer, trainer_gone)
        lease.ensure()
        return lease

    def enter(self, rank: int, writer: Process, trainer: Process) -> None:
        """Add a writer of this host, unless it is there. StorageError if the directory does not exist."""
        line = {"rank": rank, "writer": [writer.pid, writer.start], "trainer": [trainer.pid, trainer.start]}
        if line not in self._lines(os.path.basename(self._own_file())):
            self._append(line)

    def leave(self, rank: int, trainer: Process, *, done: bool) -> None:
        """Record that a trainer of this host has left; with `done`, its writers have, too.

        StorageError if the directory does not exist.
        """
        self._append({"rank": rank, "left": [trainer.pid, trainer.start], "done": done})

    def writers(self) -> list[Writer]:
        """Return all registered writers. StorageError if they cannot be read."""
        names = directories.names_in(self.path)
        now = directories.server_time(self.path) if names else 0.0
        return [writer for name in names for writer in self._writers_of(name, now)]

    def alive_ranks(self) -> set[int]:
        """Return the ranks with a live writer."""
        return {writer.rank for writer in self.writers() if writer.alive}

    def has_left(self, trainer: Process) -> bool:
        """Return whether this trainer has left."""
        lines = (line for name in directories.names_in(self.path) for line in self._lines(name))
        return any(line.get("left") == [trainer.pid, trainer.start] for line in lines)

    def renew(self) -> None:
        """Renew the lease of this host. StorageError if the directory does not exist."""
        files.touch(self._own_file())

    def _writers_of(self, name: str, now: float) -> Iterable[Writer]:
        fresh = is_fresh(os.path.join(self.path, name), now)
        lines = self._lines(name)
        left = {tuple(line["left"]) for line in lines if "left" in line}
        done = {tuple(line["left"]) for line in lines if "left" in line and line.get("done")}
        for line in lines:
            if "writer" not in line:
                continue
            process, trainer = (Process(_host_of(name), *line[key]) for key in ("writer", "trainer"))
            has_trainer = tuple(line["trainer"]) not in left and _is_alive(trainer, fresh)
            is_done = tuple(line["trainer"]) in (left if process == trainer else done)
            yield Writer(int(line["rank"]), process, not is_done and _is_alive(process, fresh), has_trainer)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Return the entries of a file, without a last line that is incomplete."""
        try:
            data = read_document_at(os.path.join(self.path, name), _MAX_FILE_BYTES) or b""
        except CheckpointCorruptError:
            return []
        lines = []
        for line in data.split(b"\n")[:-1]:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict) and _well_formed(document):
                lines.append(document)
        return lines

    def _own_file(self) -> str:
        with files.storage_errors("find", self.path):
            return os.path.join(self.path, f"{Process.here().host}-{os.stat(self.path).st_dev:x}")

    def _append(self, line: dict[str, Any]) -> None:
        with files.storage_errors("register in", self.path):
            files.append(self._own_file(), json.dumps(line).encode() + b"\n")


class Lease:
    """The registration of this process as a writer. A thread renews the host's lease if no other process does."""

    def __init__(self, leases: Leases, rank: int, trainer: Process, trainer_gone: Callable[[], bool]) -> None:
        self._leases = leases
        self._own = Process.here()
        self._rank = rank
        self._trainer = trainer  # may live on after its connection has ended
        self._trainer_gone = trainer_gone
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure(self) -> None:
        """Register, unless that is done; also again after the root was removed. StorageError if it does not exist."""
        self._leases.enter(self._rank, self._own, self._trainer)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="ckpt-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop renewing. Idempotent. On its host the process still counts as alive until it ends."""
        self._closed.set()

    def _keep(self) -> None:
        renewed = time.monotonic()
        recorded = False
        while not self._closed.wait(_POLL_S):
            try:
                if not recorded and self._trainer_gone():
                    self._leases.leave(self._rank, self._trainer, done=False)
                    recorded = True
                if time.monotonic() - renewed >= RENEW_S:
                    renewed = time.monotonic()
                    if self._is_first():
                        self._leases.renew()
            except (OSError, ValueError, StorageError):  # ValueError: the socket is closed, the process ends
                if not os.path.isdir(self._leases.path):
                    return  # there is a later owner, or the root was removed

    def _is_first(self) -> bool:
        """Return whether this process has to renew: the first live one of the host does."""
        here = [writer for writer in self._leases.writers() if writer.process.is_here and writer.alive]
        return not here or here[0].process == self._own


def _is_alive(process: Process, fresh: bool) -> bool:
    """Return whether a process is alive; that of another host is if its lease is `fresh`."""
    alive = process.alive
    return fresh if alive is None else alive


def is_fresh(path: str, now: float) -> bool:
    """Return whether a lease file was renewed within `EXPIRY_S` of `now`, a time of its file system."""
    try:
        return abs(now - os.stat(path).st_mtime) < EXPIRY_S  # if in the future, the clock was set back
    except OSError:
        return False


def _well_formed(line: dict[str, Any]) -> bool:
    def is_process(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)

    if "left" in line:
        return is_process(line["left"])
    return type(line.get("rank")) is int and is_process(line.get("writer")) and is_process(line.get("trainer"))


def _host_of(name: str) -> str:
    return name.rpartition("-")[0]
