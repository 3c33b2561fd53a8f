"""Leases: which processes of a job are alive, on any POSIX file system and from any host.

    <directory>/<host>-<device>     one file for each host; its time is renewed while a process there is alive
        {"rank": 0, "writer": [71, 512], "trainer": [70, 500]}     a writer process registered (pid, start time)
        {"rank": 0, "left": [70, 500], "done": false}              its trainer has ended, or has left;
                                                                   done: its writers have left, too
        {"renew_s": 34.0}                                          it is renewed so often, if not every `RENEW_S`

One process of each host renews its file: the one that holds a `NodeLock`. All hosts together do so at most
`RENEWALS_PER_S` times a second, so in a job of many hosts each does so less often, and counts as dead later.

Processes of the same host (boot id and pid namespace) are looked up in /proc, so their death is known at once, on
every file system. Of another host only the time of its file is known: all its processes count as dead when that is
older than `EXPIRY_S`, or several times `renew_s`, by the clock of the file system. A lease does not protect data,
because a process may be slow and not dead; it only tells for which processes to wait. The token protects data (see
`ownership`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.documents import parse_json
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.regular_files import read_document_at
from inprocess.ipc.process import Process
from inprocess.ipc.uncopied import Uncopied

EXPIRY_S = 15.0
RENEW_S = 4.0
RENEWALS_PER_S = 60.0
_ALONE_PER_S = 10.0  # renewals by processes that never get the lock of their host
_COUNTED_RENEWALS = 4  # until then all ranks of a host have registered
_POLL_S = 0.5
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RegisteredWriter:
    """A registered writer process. `has_trainer`: its trainer is alive and has not left."""

    rank: int
    process: Process
    alive: bool
    has_trainer: bool


class Leases:
    """The lease files in one directory. Any process; registering needs write permission."""

    def __init__(self, path: str) -> None:
        self.path = path

    def register(self, rank: int, trainer: Process, trainer_gone: Callable[[], bool], world_size: int = 1) -> Lease:
        """Register this process as a writer of `rank` and renew its lease until `close` or the end of the process.

        `trainer_gone` is called about twice a second, in a thread. StorageError if the directory does not exist.
        """
        lease = Lease(self, rank, trainer, trainer_gone, world_size)
        lease.ensure()
        return lease

    def enter(self, rank: int, writer: Process, trainer: Process) -> None:
        """Add a writer of this host, unless it is there. StorageError if the directory does not exist."""
        line = {"rank": rank, "writer": [writer.pid, writer.start], "trainer": [trainer.pid, trainer.start]}
        if line not in self._lines(os.path.basename(self.own_file())):
            self._append(line)

    def leave(self, rank: int, trainer: Process, *, done: bool) -> None:
        """Record that a trainer of this host has left; with `done`, its writers have, too.

        StorageError if the directory does not exist.
        """
        self._append({"rank": rank, "left": [trainer.pid, trainer.start], "done": done})

    def writers(self) -> list[RegisteredWriter]:
        """Return all registered writers. StorageError if they cannot be read."""
        names = directories.names_in(self.path)
        now = directories.server_time(self.path) if names else 0.0

        return [
            writer
            for name in names
            for writer in self._writers_of(name, functools.partial(is_fresh, os.path.join(self.path, name), now))
        ]

    def alive_ranks(self) -> set[int]:
        """Return the ranks with a live writer. Reads the files of all hosts."""
        return {writer.rank for writer in self.writers() if writer.alive}

    def ranks_here(self) -> int:
        """Return how many ranks have registered on this host and file system, at least 1. Reads one file."""
        ranks = {line["rank"] for line in self._lines(os.path.basename(self.own_file())) if "writer" in line}
        return max(1, len(ranks))

    def watch_host(self, host: str) -> HostWatch:
        """Return what tells which ranks have live writers on a host, for a process that asks again and again."""
        return HostWatch(self, host)

    def announce(self, renew_s: float) -> None:
        """Record how often this host renews. StorageError if the directory does not exist."""
        self._append({"renew_s": renew_s})

    def of_host(self, name: str, fresh: Callable[[float], bool]) -> list[RegisteredWriter]:
        """Return the writers in the file `name`; `fresh` says whether it was renewed within so many seconds."""
        return list(self._writers_of(name, fresh))

    def has_left(self, trainer: Process) -> bool:
        """Return whether this trainer has left."""
        lines = (line for name in directories.names_in(self.path) for line in self._lines(name))
        return any(line.get("left") == [trainer.pid, trainer.start] for line in lines)

    def renew(self) -> None:
        """Renew the lease of this host. StorageError if the directory does not exist."""
        files.touch(self.own_file())

    def _writers_of(self, name: str, fresh_within: Callable[[float], bool]) -> Iterable[RegisteredWriter]:
        lines = self._lines(name)
        announced = [line["renew_s"] for line in lines if "renew_s" in line]
        fresh = fresh_within(EXPIRY_S * max(1.0, announced[-1] / RENEW_S if announced else 1.0))
        left = {tuple(line["left"]) for line in lines if "left" in line}
        done = {tuple(line["left"]) for line in lines if "left" in line and line.get("done")}
        for line in lines:
            if "writer" not in line:
                continue
            process, trainer = (Process(_host_of(name), *line[key]) for key in ("writer", "trainer"))
            has_trainer = tuple(line["trainer"]) not in left and _is_alive(trainer, fresh)
            is_done = tuple(line["trainer"]) in (left if process == trainer else done)
            yield RegisteredWriter(int(line["rank"]), process, not is_done and _is_alive(process, fresh), has_trainer)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Return the entries of a file, without a last line that is incomplete. StorageError if they cannot be read."""
        try:
            data = read_document_at(os.path.join(self.path, name), _MAX_FILE_BYTES) or b""
        except CheckpointCorruptError as damage:
            raise StorageError(f"it is not known which writers are alive: {damage}") from damage
        lines = []
        for line in data.split(b"\n")[:-1]:
            try:
                document = parse_json(line)
            except ValueError:
                continue
            if isinstance(document, dict) and _well_formed(document):
                lines.append(document)
        return lines

    def are_gone(self) -> bool:
        """Return whether the directory does not exist any more; False if that cannot be told."""
        try:
            return not files.is_directory(self.path)
        except StorageError:
            return False

    def own_file(self) -> str:
        """Return the file of this host. StorageError if the directory does not exist."""
        with files.storage_errors("find", self.path):
            return os.path.join(self.path, f"{Process.here().host}-{os.stat(self.path).st_dev:x}")

    def _append(self, line: dict[str, Any]) -> None:
        with files.storage_errors("register in", self.path):
            files.append(self.own_file(), json.dumps(line).encode() + b"\n")


class Lease:
    """The registration of this process as a writer. A thread renews the host's lease if no other process does."""

    def __init__(
        self, leases: Leases, rank: int, trainer: Process, trainer_gone: Callable[[], bool], world_size: int
    ) -> None:
        self._leases = leases
        self._own = Process.here()
        self._rank = rank
        self._trainer = trainer  # may live on after its connection has ended
        self._trainer_gone = trainer_gone
        self._world_size = world_size
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure(self) -> None:
        """Register, unless that is done; also again after the root was removed. StorageError if it does not exist."""
        self._leases.enter(self._rank, self._own, self._trainer)
        self._start()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="ckpt-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop renewing. Idempotent. On its host the process still counts as alive until it ends."""
        self._closed.set()

    def _keep(self) -> None:
        lock: NodeLock | None = None
        renewed, renewals, renew_s = time.monotonic(), 0, RENEW_S
        alone_s = max(2 * RENEW_S, self._world_size / _ALONE_PER_S)
        recorded = False
        try:
            while not self._closed.wait(_POLL_S):
                try:
                    if not recorded and self._trainer_gone():
                        self._leases.leave(self._rank, self._trainer, done=False)
                        recorded = True
                    lock = lock or NodeLock(self._leases.own_file())
                    if time.monotonic() - renewed < (renew_s if lock.take() else alone_s):
                        continue
                    renewed = time.monotonic()
                    if lock.held and renewals < _COUNTED_RENEWALS:
                        renewals += 1
                        renew_s = self._paced(renew_s)
                    self._leases.renew()
                except (OSError, ValueError, StorageError):  # ValueError: the socket is closed, the process ends
                    if self._leases.are_gone():
                        return  # there is a later owner, or the root was removed
        finally:
            if lock is not None:
                lock.release()

    def _paced(self, announced_s: float) -> float:
        """Return how often this host is to renew, and record it if that has changed."""
        hosts = self._world_size / self._leases.ranks_here()
        renew_s = max(RENEW_S, round(hosts / RENEWALS_PER_S, 1))
        if renew_s != announced_s:
            self._leases.announce(renew_s)
        return renew_s


class HostWatch:
    """Which ranks have live writers on one host, for a process that asks again and again.

    The age of its lease is told by the times at which this process sees it change. One thread.
    """

    def __init__(self, leases: Leases, host: str) -> None:
        self._leases = leases
        self._host = host
        self._names: list[str] = []
        self._changed: dict[str, tuple[float, float]] = {}  # name -> its time, and when that was seen to change

    def alive_ranks(self) -> set[int]:
        """Return the ranks; none if the host has no lease. StorageError if it cannot be read. Reads the host's file."""
        if not self._names:
            names = directories.names_in(self._leases.path)
            self._names = [name for name in names if _host_of(name) == self._host]
        found: set[int] = set()
        for name in self._names:
            writers = self._leases.of_host(name, functools.partial(operator.lt, self._age_s(name)))
            found |= {writer.rank for writer in writers if writer.alive}
        return found

    def _age_s(self, name: str) -> float:
        now = time.monotonic()
        changed = changed_s(os.path.join(self._leases.path, name))
        if changed is None:
            return EXPIRY_S * 1000
        if name not in self._changed:
            self._changed[name] = changed, now - abs(directories.server_time(self._leases.path) - changed)
        elif self._changed[name][0] != changed:
            self._changed[name] = changed, now
        return now - self._changed[name][1]


def _is_alive(process: Process, fresh: bool) -> bool:
    """Return whether a process is alive; that of another host is if its lease is `fresh`."""
    alive = process.alive
    return fresh if alive is None else alive


def is_fresh(path: str, now: float, expiry_s: float = EXPIRY_S) -> bool:
    """Return whether a lease file was renewed within `expiry_s` of `now`, a time of its file system.

    StorageError if that cannot be told.
    """
    changed = changed_s(path)
    return changed is not None and abs(now - changed) < expiry_s  # if in the future, the clock was set back


def changed_s(path: str) -> float | None:
    """Return when a file was changed last, as its server has it; None if it does not exist.

    StorageError if that cannot be told.
    """
    with files.storage_errors("find", path):
        try:
            return directories.fresh_time(path)
        except (FileNotFoundError, NotADirectoryError):
            return None


class ReadLease(Uncopied):
    """The lease of this process on a step that it reads. A forked child neither renews nor releases it."""

    def __init__(
        self, renew: Callable[[], None], release: Callable[[], None], renew_s: float, *, renewing: bool
    ) -> None:
        """With `renewing` a thread renews it, until this is released or dropped; otherwise `renew_if_due` does."""
        self._renew_now = renew
        self._release_now = release
        self._renew_s = renew_s
        self._pid = os.getpid()
        self._renewed = time.monotonic()
        self._closed = threading.Event()
        if renewing:
            keep = functools.partial(_keep_read_lease, weakref.ref(self), self._closed, renew_s)
            threading.Thread(target=keep, name="ckpt-reader", daemon=True).start()

    def renew_if_due(self) -> None:
        """Renew the lease if that is due; does nothing most times."""
        if time.monotonic() - self._renewed >= self._renew_s:
            self.renew()

    def renew(self) -> None:
        """Renew the lease, as far as that is possible."""
        self._renewed = time.monotonic()
        if os.getpid() == self._pid and not self._closed.is_set():
            with contextlib.suppress(StorageError):
                self._renew_now()
            if self._closed.is_set():  # it was released meanwhile, and the request may have made it again
                with contextlib.suppress(OSError, StorageError):
                    self._release_now()

    def release(self) -> None:
        """Remove the lease, as far as that is possible. Idempotent."""
        if not self._closed.is_set() and os.getpid() == self._pid:
            self._closed.set()
            with contextlib.suppress(OSError, StorageError):
                self._release_now()


def _keep_read_lease(lease: weakref.ref[ReadLease], closed: threading.Event, renew_s: float) -> None:
    while not closed.wait(renew_s):
        held = lease()
        if held is None:
            return
        held.renew()
        del held


def reader_name() -> str:
    """Return a new name for the lease of this process on a step that it reads."""
    own = Process.here()
    return f"{own.host}-{own.pid}-{own.start}-{secrets.token_hex(4)}"


def is_reader_alive(name: str, is_renewed: Callable[[], bool]) -> bool:
    """Return whether the process whose lease has this name is alive; one of another host is if it `is_renewed`."""
    try:
        host, pid, start, _ = name.rsplit("-", 3)
        process = Process(host, int(pid), int(start))
    except ValueError:
        return False
    alive = process.alive
    return is_renewed() if alive is None else alive


def _well_formed(line: dict[str, Any]) -> bool:
    def is_process(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)

    if "left" in line:
        return is_process(line["left"])
    if "renew_s" in line:
        return type(line["renew_s"]) in (int, float)
    return type(line.get("rank")) is int and is_process(line.get("writer")) and is_process(line.get("trainer"))


def _host_of(name: str) -> str:
    return name.rpartition("-")[0]
