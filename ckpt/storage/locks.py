"""flock(2) on directories, gone with the process that holds it.

It spares work on one host, and decides nothing: a network file system may keep locks on its client, or have none.
"""

from __future__ import annotations

import fcntl
import os

from ckpt.storage.files import storage_errors

__all__ = ["DirectoryLock", "lock_shared", "try_lock_exclusive"]


class DirectoryLock:
    """A lock on a directory, held until `close` or the end of the process. Use as a context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def lock_shared(path: str) -> DirectoryLock | None:
    """Lock the directory against removal, together with other readers; None if it is being removed. Never waits."""
    return _lock(path, fcntl.LOCK_SH)


def try_lock_exclusive(path: str) -> DirectoryLock | None:
    """Lock the directory for removal; None if another process holds a lock on it. Never waits."""
    return _lock(path, fcntl.LOCK_EX)


def _lock(path: str, operation: int) -> DirectoryLock | None:
    with storage_errors("lock", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            pass  # the file system has no locks, or none for directories: it keeps no process out
        return DirectoryLock(fd)
