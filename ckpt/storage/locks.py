"""Locks, gone with the process that holds them.

DirectoryLock   flock(2) on a step's directory: between those who read or write it and those who remove it
ByteLock        a lock on one byte of a file: "I work on this as number N"; anybody can ask which numbers are held
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable

from ckpt.storage.files import storage_errors

__all__ = ["ByteLock", "DirectoryLock", "locked_bytes", "lock_shared", "try_lock_byte", "try_lock_exclusive"]

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


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


class ByteLock:
    """A lock on one byte of a file, held until `close` or the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def try_lock_byte(path: str, number: int) -> ByteLock | None:
    """Lock byte `number` of a file, which need not be there; None if somebody holds it. Never waits.

    On a file system without such locks it keeps nobody out.
    """
    with storage_errors("lock", path):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(fd)
                return None
        return ByteLock(fd)


def locked_bytes(path: str, numbers: Iterable[int]) -> set[int] | None:
    """Return which of these bytes of a file are locked by others; None where that cannot be known."""
    held: set[int] = set()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for number in numbers:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
            if kind != fcntl.F_UNLCK:
                held.add(number)
    except OSError:
        return None
    finally:
        os.close(fd)
    return held
