"""The process a monitor watches. Its death is an event: a process file descriptor becomes readable."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

__all__ = ["Target"]

_KILL_PAUSE_S = 0.1


class Target:
    """A process, by process file descriptor: a pid that is used again is never confused with it.

    ProcessLookupError if there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def wait_gone(self, timeout_s: float) -> bool:
        """Return whether the process has ended (a zombie has), within `timeout_s`."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self.wait_gone(0)

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._fd, number)

    def kill(self, grace_s: float) -> None:
        """End the process: ask it, wait `grace_s`, then force it, until it is gone. A stopped one is continued."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        while not self.wait_gone(min(_KILL_PAUSE_S, max(0.0, deadline - time.monotonic()))):
            self.send(signal.SIGCONT)
            if time.monotonic() >= deadline:
                self.send(signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
