"""The process a monitor watches. Its death is an event: a process file descriptor becomes readable."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

__all__ = ["Target"]

_KILL_PAUSE_S = 0.1
_UNKILLABLE_S = 10.0  # after SIGKILL: a core dump or much memory takes a while


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

    def kill(self, grace_s: float) -> bool:
        """End the process: ask it, wait `grace_s`, then force it. A stopped one is continued.

        Returns whether it is gone; False for one that the kernel does not let go of (a driver or a file system hangs).
        """
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        while not self.wait_gone(min(_KILL_PAUSE_S, max(0.0, deadline + _UNKILLABLE_S - time.monotonic()))):
            now = time.monotonic()
            if now >= deadline + _UNKILLABLE_S:
                return False
            self.send(signal.SIGKILL if now >= deadline else signal.SIGCONT)
        return True

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
