"""A flag that one thread polls for, together with other descriptors, and any thread may set."""

from __future__ import annotations

import contextlib
import os

__all__ = ["Wakeup"]


class Wakeup:
    """An eventfd, made when somebody first waits for it."""

    def __init__(self) -> None:
        self._fd = -1

    def fileno(self) -> int:
        """The descriptor: readable while the flag is set."""
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self._fd

    def set(self) -> None:
        """Wake whoever waits, now or next time; nothing happens if nobody ever has. From any thread."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take the flag down."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
