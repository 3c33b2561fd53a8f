"""One job, seen from outside: start its ranks, read its store, wait for its end, and check that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from inprocess.coordination import Access, StoreClient
from tests.inprocess.faults.events import Event, read_events, wait_until
from tests.inprocess.faults.nursery import Nursery
from tests.support import free_port

_MARKER = "FAULT_JOB_ID"
_HOST = "127.0.0.1"


class Job:
    """`world_size` ranks that run `program` with these arguments, see `rank.live`. A context manager: none survives."""

    def __init__(self, nursery: Nursery, folder: Path, program: str, arguments: Sequence[Any], world_size: int) -> None:
        self.folder = folder
        self.world_size = world_size
        self.started = time.monotonic()
        self.exit_codes: dict[int, int] = {}
        self._nursery = nursery
        self._marker = uuid.uuid4().hex
        self._port = free_port()
        self._pidfds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        common = {
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._port),
            "WORLD_SIZE": str(world_size),
            "GLOO_SOCKET_IFNAME": "lo",
            _MARKER: self._marker,
        }
        for rank in range(world_size):
            self._pids[rank] = nursery.spawn(program, arguments, {**common, "RANK": str(rank)}, folder)
            self._pidfds[rank] = os.pidfd_open(self._pids[rank])

    def events(self, rank: int) -> list[Event]:
        """Return what a rank has written so far."""
        return read_events(self.folder, rank)

    def all_events(self) -> list[Event]:
        """Return what all ranks have written, in the order of time."""
        return sorted((event for rank in range(self.world_size) for event in self.events(rank)), key=lambda e: e.time)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def replace_monitor(self, rank: int) -> None:
        """Kill the monitor process of a rank, and wait until another one has taken its place."""
        file = self.folder / f"monitor_{rank}.pid"
        pid = file.read_text()
        os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: file.read_text() not in ("", pid), f"another monitor process of rank {rank}")

    def wait(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Wait until these ranks have ended. AssertionError, with where they are, if they do not in time."""
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            left = max(0.0, deadline - time.monotonic())
            if rank in self.exit_codes:
                continue
            if not select.select([self._pidfds[rank]], [], [], left)[0]:
                raise AssertionError(f"rank {rank} still runs after {timeout_s:g} s\n{self.describe(dump=True)}")
            self.exit_codes[rank] = self._nursery.reap(self._pids[rank])

    @contextlib.contextmanager
    def store(self) -> Iterator[StoreClient]:
        """Return a client of the coordination store of the job."""
        wait_until((self.folder / "access").exists, "rank 0 to say where the store is")
        access = Access.from_document(json.loads((self.folder / "access").read_text()))
        with StoreClient(access, timeout=timedelta(seconds=10)) as client:
            yield client

    def wait_members(self, name: str, ranks: Iterable[int], timeout_s: float = 20.0) -> None:
        """Wait until these initial ranks are in a set of the store: have arrived at a barrier."""
        wanted = {str(rank) for rank in ranks}
        with self.store() as store:
            wait_until(lambda: store.members(name) >= wanted, f"{wanted} to arrive at {name}", timeout_s)

    def monitors(self) -> list[psutil.Process]:
        """Return all live processes that ranks have started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARKER) == self._marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def check_no_process_left(self, timeout_s: float = 10.0) -> None:
        """AssertionError if a monitor process outlives the job."""
        wait_until(lambda: not self.monitors(), f"the end of the monitor processes\n{self.describe()}", timeout_s)

    def describe(self, dump: bool = False) -> str:
        """Return everything the ranks and their monitors have written. With `dump`, running ranks add their stacks."""
        if dump:
            for rank in set(self._pids) - set(self.exit_codes):
                with contextlib.suppress(ProcessLookupError):
                    self.kill(rank, signal.SIGABRT)
            time.sleep(0.3)
        parts = [f"exit codes {self.exit_codes}"]
        for rank in range(min(self.world_size, 8)):
            parts.append(f"---- rank {rank}")
            for e in self.events(rank):
                at = f"{e.time - self.started:7.3f}"
                parts.append(f"  {at} {e.name}: iteration {e.iteration}, {e.rank} of {e.world_size} {e.details}")
            for name in (f"{rank}.output", f"monitor_{rank}.log"):
                file = self.folder / name
                if file.exists():
                    parts.append(f"---- {name}\n{file.read_text(errors='replace')[-5000:]}")
        return "\n".join(parts)

    def close(self) -> None:
        """Kill what still runs. Idempotent."""
        for rank, pidfd in self._pidfds.items():
            if rank not in self.exit_codes:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [], 10)
                self.exit_codes[rank] = self._nursery.reap(self._pids[rank])
            os.close(pidfd)
        self._pidfds.clear()
        for process in self.monitors():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
