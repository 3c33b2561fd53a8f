"""A flag that any thread sets to interrupt another thread's `poll`."""

from __future__ import annotations

import contextlib
import os

from inprocess.ipc.uncopied import Uncopied


class Wakeup(Uncopied):
    """An eventfd. Its descriptor is readable while the flag is set, so it can be polled together with others."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 after `close`."""
        return self._fd

    def set(self) -> None:
        """Set the flag, from any thread or signal handler. Does nothing after `close`."""
        fd = self._fd
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(fd, 1)

    def clear(self) -> None:
        """Clear the flag. Does nothing if it is not set."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent. No thread may be about to call `set`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()
