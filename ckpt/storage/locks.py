"""Locks between those who read a step and those who remove it: flock(2) on its directory, gone with the process."""

from __future__ import annotations

import fcntl
import os

from ckpt.storage.files import storage_errors

__all__ = ["DirectoryLock", "lock_shared", "try_lock_exclusive"]


class DirectoryLock:
    """A lock on a directory, held until `close` or the end of the process. Use as a context manager.

    `enforced` is False on a file system without locks: then it keeps nobody out.
    """

    def __init__(self, fd: int, enforced: bool) -> None:
        self._fd = fd
        self.enforced = enforced

    @property
    def shared_with_others(self) -> bool:
        """Whether somebody else holds a lock on the directory; True where that cannot be known.

        For holders of a shared lock only. It is exclusive for a moment while this looks.
        """
        if not self.enforced:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # a conversion that fails loses the lock, too

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
    """Lock the directory for removal; None if somebody holds a lock on it. Never waits."""
    return _lock(path, fcntl.LOCK_EX)


def _lock(path: str, operation: int) -> DirectoryLock | None:
    with storage_errors("lock", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:  # the file system has no locks, or none for directories
            return DirectoryLock(fd, enforced=False)
        return DirectoryLock(fd, enforced=True)
