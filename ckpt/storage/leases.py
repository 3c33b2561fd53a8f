"""Leases: which processes of a job are alive, on any POSIX file system and from any host.

    <directory>/<host>-<device>     one file for each host; its time is renewed while a process there is alive
        {"rank": 0, "writer": [71, 512], "trainer": [70, 500]}     a writer process registered (pid, start time)
        {"rank": 0, "left": [70, 500], "done": false}              its trainer is gone, or has left the root to writers;
                                                                   done: there is nothing left to do for these, either

A process of the same host (boot id and pid namespace) is looked up in /proc, so its death is known at once, whatever
the file system. Of other hosts only the time of their file is known: all on it are taken for dead when that is older
than `EXPIRY_S` by the clock of the file system. Nothing is kept safe by a lease (a process can be slow, not dead): it
says whom to wait for. What keeps data safe is the token (see `ownership`).
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
_LOOK_S = 0.5
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer process that registered. `has_trainer`: its trainer is alive and has not left."""

    rank: int
    process: Process
    alive: bool
    has_trainer: bool


class Leases:
    """The lease files in one directory. Any process that can read it; registering needs write permission."""

    def __init__(self, path: str) -> None:
        self.path = path

    def register(self, rank: int, trainer: Process, trainer_gone: Callable[[], bool]) -> Lease:
        """Enter this process as a writer of `rank` and keep its lease until `close`, or the end of the process.

        `trainer_gone` is asked about twice a second, in a thread. StorageError when the directory is gone.
        """
        lease = Lease(self, rank, trainer, trainer_gone)
        lease.ensure()
        return lease

    def enter(self, rank: int, writer: Process, trainer: Process) -> None:
        """Enter `writer`, of this host, unless it is entered. StorageError when the directory is gone."""
        line = {"rank": rank, "writer": [writer.pid, writer.start], "trainer": [trainer.pid, trainer.start]}
        if line not in self._lines(os.path.basename(self._own_file())):
            self._append(line)

    def leave(self, rank: int, trainer: Process, *, done: bool) -> None:
        """Note that a trainer of this host does nothing more here; if all is `done`, nor do its writers.

        StorageError when the directory is gone.
        """
        self._append({"rank": rank, "left": [trainer.pid, trainer.start], "done": done})

    def writers(self) -> list[Writer]:
        """All writers that registered. StorageError when they cannot be read."""
        names = directories.names_in(self.path)
        now = directories.server_time(self.path) if names else 0.0
        return [writer for name in names for writer in self._writers_of(name, now)]

    def alive_ranks(self) -> set[int]:
        """The ranks that have a writer alive."""
        return {writer.rank for writer in self.writers() if writer.alive}

    def has_left(self, trainer: Process) -> bool:
        """Whether this trainer has left."""
        lines = (line for name in directories.names_in(self.path) for line in self._lines(name))
        return any(line.get("left") == [trainer.pid, trainer.start] for line in lines)

    def renew(self) -> None:
        """Renew the lease of this host. StorageError when the directory is gone."""
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
            has_trainer = tuple(line["trainer"]) not in left and _lives(trainer, fresh)
            is_done = tuple(line["trainer"]) in (left if process == trainer else done)
            yield Writer(int(line["rank"]), process, not is_done and _lives(process, fresh), has_trainer)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """What is registered. A line that is being written, or was never finished, is not there yet."""
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
    """This process is registered as a writer. A thread renews the lease of the host, if no other process does."""

    def __init__(self, leases: Leases, rank: int, trainer: Process, trainer_gone: Callable[[], bool]) -> None:
        self._leases = leases
        self._own = Process.here()
        self._rank = rank
        self._trainer = trainer  # the end of its connection is not always that of the process
        self._trainer_gone = trainer_gone
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure(self) -> None:
        """Register, unless that is done; also again after the root was removed. StorageError when it is not there."""
        self._leases.enter(self._rank, self._own, self._trainer)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="ckpt-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop renewing. Idempotent. The process still counts as alive on its host while it is."""
        self._over.set()

    def _keep(self) -> None:
        renewed = time.monotonic()
        said = False
        while not self._over.wait(_LOOK_S):
            try:
                if not said and self._trainer_gone():
                    self._leases.leave(self._rank, self._trainer, done=False)
                    said = True
                if time.monotonic() - renewed >= RENEW_S:
                    renewed = time.monotonic()
                    if self._is_first():
                        self._leases.renew()
            except (OSError, ValueError, StorageError):  # a ValueError of a socket that is closed: the process ends
                if not os.path.isdir(self._leases.path):
                    return  # there is a later owner, or the root is gone

    def _is_first(self) -> bool:
        """Whether no other process of this host renews: the first that is alive does."""
        here = [writer for writer in self._leases.writers() if writer.process.is_here and writer.alive]
        return not here or here[0].process == self._own


def _lives(process: Process, fresh: bool) -> bool:
    """Whether it is alive; of one that cannot be looked up its lease tells, `fresh` or not."""
    alive = process.alive
    return fresh if alive is None else alive


def is_fresh(path: str, now: float) -> bool:
    """Whether a lease file was renewed within `EXPIRY_S` of `now`, a time of its file system."""
    try:
        return abs(now - os.stat(path).st_mtime) < EXPIRY_S  # of a time to come, the clock was set back
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
