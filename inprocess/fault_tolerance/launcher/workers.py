"""The worker processes of a cycle: their ends as events, and the sequence that stops them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Mapping

__all__ = ["WorkerProcesses", "wait_readable"]

_log = logging.getLogger(__name__)
_KILL_WAIT_S = 30.0


class WorkerProcesses:
    """Children of this process, by local rank. They are looked at, not reaped: that is their owner's. One thread.

    Descriptors are open until `close`, so that a signal never reaches another process with the same number.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self.starts = dict.fromkeys(pids, 1)  # how many processes there were, by local rank
        self._running: dict[int, int] = {}  # local rank -> process descriptor
        for local_rank, pid in pids.items():
            with contextlib.suppress(ProcessLookupError):  # reaped already
                self._running[local_rank] = os.pidfd_open(pid)

    @property
    def running(self) -> set[int]:
        """Local ranks of those whose end was not taken yet."""
        return set(self._running)

    def replace(self, local_rank: int, pid: int) -> None:
        """Watch this child in the place of one that has ended."""
        self._running[local_rank] = os.pidfd_open(pid)
        self.pids[local_rank] = pid
        self.starts[local_rank] += 1

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a worker ends."""
        return list(self._running.values())

    def take_ended(self) -> dict[int, int]:
        """Return how workers have ended since the last call: negative for a signal, by local rank."""
        codes = {}
        for local_rank, fd in list(self._running.items()):
            if wait_readable([fd], 0):
                codes[local_rank] = _code(fd)
                del self._running[local_rank]
                os.close(fd)
        return codes

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to those that run: to themselves, not to what they have started."""
        for fd in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)

    def kill(self, local_rank: int) -> None:
        """Kill one, if it runs; its end is still to be taken."""
        fd = self._running.get(local_rank)
        if fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, so many seconds for all together, SIGKILL. When it returns all have ended, or the log says so."""
        self.take_ended()
        if not self._running:
            return
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # one that is stopped can end only when it runs
        if self._wait(timeout_s):
            return
        _log.warning("workers %s do not end in %g s and are killed", self._named(), timeout_s)
        self.signal(signal.SIGKILL)
        if not self._wait(_KILL_WAIT_S):
            _log.error("workers %s cannot be killed: they hang in the kernel", self._named())

    def close(self) -> None:
        """Let go of them. Idempotent."""
        for fd in self._running.values():
            os.close(fd)
        self._running = {}

    def _wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            wait_readable(self.fds, left_s)
            self.take_ended()
        return not self._running

    def _named(self) -> str:
        return ", ".join(f"{local_rank} (pid {self.pids[local_rank]})" for local_rank in sorted(self._running))


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """Return those that are readable, after `timeout_s` (None: no limit) at the latest; negative ones are left out."""
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))]


def _code(fd: int) -> int:
    """How the process has ended, which stays for its parent to be told. 0 if the parent was told already."""
    try:
        found = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
