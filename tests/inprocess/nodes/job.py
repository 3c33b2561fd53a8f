"""A job of a laboratory, seen from outside: its ranks, their progress, their ends, and faults of single ranks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.inprocess.faults.nursery import Nursery
from tests.inprocess.nodes.cgroups import Group
from tests.inprocess.nodes.journal import Line, read_journals

_POLL_S = 0.01
_OUTPUT_CHARACTERS = 3000
_FIRE = signal.SIGUSR1
_SERVER = b"inprocess.coordination.server_process"


@dataclass(frozen=True)
class RankStart:
    """How a rank is started, and the group of it and of all processes that it starts."""

    node: int
    env: dict[str, str]
    group: Group


@dataclass(frozen=True)
class Exit:
    """How a process ended, and when it was noticed: its exit code, or minus the signal; seconds of CLOCK_MONOTONIC."""

    time: float
    code: int


class Job:
    """The ranks of one job. Made by `Lab.start`.

    `pids[rank]` is the process of an initial rank, `exits[rank]` how it has ended, once it has. `server_rank` is the
    one whose processes serve the coordination store; None if none of the job's does.
    """

    def __init__(
        self, nursery: Nursery, folder: Path, program: str, arguments: list[object], starts: Mapping[int, RankStart]
    ) -> None:
        self.folder = folder
        self.server_rank: int | None = 0
        self.started = time.monotonic()
        self.exits: dict[int, Exit] = {}
        self.nodes = {rank: start.node for rank, start in starts.items()}
        self._groups = {rank: start.group for rank, start in starts.items()}
        self._nursery = nursery
        self.pids = {
            rank: nursery.spawn(program, arguments, start.env, folder) for rank, start in sorted(starts.items())
        }
        self._waiter = threading.Thread(target=self._wait_exits, name="lab-exits", daemon=True)
        self._waiter.start()

    # -- observations --------------------------------------------------------------------------------------------------

    def ranks_of(self, node: int) -> list[int]:
        """Return the initial ranks that were started on a node."""
        return [rank for rank, its in self.nodes.items() if its == node]

    def lines(self) -> list[Line]:
        """Return all that the ranks have written so far, in the order of time."""
        return read_journals(self.folder)

    def processes_of(self, rank: int) -> list[int]:
        """Return the live processes of a rank: itself, its monitor process, and all that they have started."""
        return self._groups[rank].pids()

    def running(self) -> list[int]:
        """Return the initial ranks whose process has not ended."""
        return [rank for rank in self.pids if rank not in self.exits]

    def wait_exits(self, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until these ranks have ended; False if they have not in time."""
        wanted = set(ranks)
        return _until(lambda: wanted <= self.exits.keys(), timeout_s)

    def wait_event(self, event: str, ranks: Iterable[int], timeout_s: float, since: float = 0.0) -> float:
        """Wait until each of these ranks has noted an event after the time `since`, and return when the last one did.

        AssertionError, with all that is known of the job, if they do not in time.
        """
        wanted = set(ranks)
        first: dict[int, float] = {}

        def there() -> bool:
            for line in self.lines():
                if line.event == event and line.time > since:
                    first.setdefault(line.process, line.time)
            return wanted <= first.keys()

        if not _until(there, timeout_s):
            missing = sorted(wanted - first.keys())
            raise AssertionError(f"no {event!r} of ranks {missing} in {timeout_s:g} s\n{self.describe()}")
        return max((first[rank] for rank in wanted), default=since)

    def wait_no_process(self, timeout_s: float) -> dict[int, list[int]]:
        """Wait until no process of the job is left; returns, by rank, those that are."""

        def left() -> dict[int, list[int]]:
            return {rank: pids for rank in self._groups if (pids := self.processes_of(rank))}

        _until(lambda: not left(), timeout_s)
        return left()

    def describe(self) -> str:
        """Return all that is known: changes in the journals, exit codes, the last part of the output."""
        parts = [f"---- rank {rank}: {self._summary(rank)}" for rank in self.pids]
        for rank in self.pids:
            for file in (self.folder / f"{rank}.output", self.folder / f"monitor_{rank}.log"):
                if file.exists():
                    parts.append(f"---- {file}\n{file.read_text(errors='replace')[-_OUTPUT_CHARACTERS:]}")
        return "\n".join(parts)

    def summaries(self) -> str:
        """Return a line per rank: what it did when, in seconds since the start of the job."""
        return "\n".join(f"rank {rank}: {self._summary(rank)}" for rank in self.pids)

    def _summary(self, rank: int) -> str:
        parts: list[str] = []
        steps: list[Line] = []

        def flush() -> None:
            if steps:
                first, last = steps[0], steps[-1]
                parts.append(
                    f"{len(steps)} steps as {first.rank} of {first.world_size} in iteration {first.iteration} "
                    f"({first.time - self.started:.2f}-{last.time - self.started:.2f})"
                )
                steps.clear()

        for line in (line for line in self.lines() if line.process == rank):
            if line.event == "step":
                steps.append(line)
            else:
                flush()
                parts.append(f"{line.event} {line.time - self.started:.2f}")
        flush()
        end = self.exits.get(rank)
        parts.append("runs" if end is None else f"exit code {end.code} at {end.time - self.started:.2f}")
        return f"on node {self.nodes[rank]}: " + ", ".join(parts)

    # -- faults --------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the program to end, at a step of its own choice."""
        (self.folder / "stop").touch()

    def fail(self, rank: int) -> None:
        """Let the function of a rank raise an exception in its next step."""
        self._signal(self.pids[rank], _FIRE)

    def kill_rank(self, rank: int) -> None:
        """Kill the process of a rank; its monitor process sees it."""
        if rank not in self.exits:
            self._signal(self.pids[rank], signal.SIGKILL)

    def kill_monitor(self, rank: int) -> None:
        """Kill the monitor process of a rank."""
        pid = int((self.folder / f"monitor_{rank}.pid").read_text())
        self._signal(pid, signal.SIGKILL)

    def kill_server(self) -> None:
        """Kill the process that serves the coordination store."""
        for pid in self._groups[0].pids():
            with contextlib.suppress(OSError):
                if _SERVER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    self._signal(pid, signal.SIGKILL)

    def freeze_rank(self, rank: int) -> None:
        """Stop a rank with its monitor process and all others that it has started."""
        self._groups[rank].freeze()

    def thaw_rank(self, rank: int) -> None:
        """Continue a rank that `freeze_rank` has stopped, with its processes."""
        self._groups[rank].thaw()

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill what still runs, and wait for it. Idempotent."""
        for rank, group in self._groups.items():
            group.kill()
            with contextlib.suppress(OSError):
                self.thaw_rank(rank)
        self._waiter.join(10.0)
        assert not self._waiter.is_alive(), f"ranks {self.running()} do not die"

    def _wait_exits(self) -> None:
        """Note the end of each rank when it comes."""
        poll = select.poll()
        ranks = {}
        for rank, pid in self.pids.items():
            fd = os.pidfd_open(pid)
            poll.register(fd, select.POLLIN)
            ranks[fd] = rank
        while ranks:
            for fd, _ in poll.poll():
                now, rank = time.monotonic(), ranks.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                self.exits[rank] = Exit(now, self._nursery.reap(self.pids[rank]))


def _until(condition: Callable[[], object], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
