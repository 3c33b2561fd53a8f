"""One process of a node gets the events of all, for a sink that exists once on a node.

    rank 1 ──┐ datagrams of JSON, through a socket in a directory that only this user can enter
    rank 2 ──┼──────────▶ the leader: the process that holds the lock beside the socket
    rank 3 ──┘            if it dies, the next process that has an event for it takes the lock, and leads

Who leads is decided by the lock alone, which the kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from typing import Any

from inprocess.ipc.threads import JoinableThread

__all__ = ["Leadership", "NodeSocket", "private_directory"]

_log = logging.getLogger("ckpt")
_MAX_BYTES = 64 << 10
_PAUSE_S = 0.02
_CLOSE_S = 5.0
_TOUCH_S = 3600.0  # much less than the age at which systemd-tmpfiles removes temporary files


def private_directory(name: str) -> str:
    """Make a directory of this user in the directory for temporary files, and return its path.

    OSError if it belongs to another user, or others can enter it.
    """
    path = os.path.join(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a directory of user {os.getuid()} alone (mode 0700): remove it, or name another directory"
        )
    return path


class NodeSocket:
    """The address of the leader. For one thread of a process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder_fd = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def try_lead(self) -> Leadership | None:
        """Become the leader; None if a process is, also if it is this one. One thread of a process at a time."""
        if self._is_led():  # this process would lose its lock with the first descriptor of it that it closes
            return None
        fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return Leadership(self._path, self._short_path, fd)

    def _is_led(self) -> bool:
        """Return whether a process receives."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._short_path)
            except OSError:
                return False
            return True

    @property
    def _short_path(self) -> str:
        """The same file, by a path that is short enough for a socket (108 bytes)."""
        return f"/proc/self/fd/{self._folder_fd}/{os.path.basename(self._path)}"

    def send(self, document: dict[str, Any]) -> None:
        """Send a document to the leader.

        ConnectionRefusedError or FileNotFoundError if there is none; BlockingIOError if it does not receive.
        """
        self._socket.sendto(json.dumps(document).encode(), self._short_path)

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for the leader, at most `timeout_s`."""
        time.sleep(min(timeout_s, _PAUSE_S))

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


class Leadership:
    """The lock, and the socket that receives what other processes send."""

    def __init__(self, path: str, address: str, lock_fd: int) -> None:
        self._path = path
        self._address = address
        self._lock_fd = lock_fd
        self._thread: JoinableThread | None = None
        self._wake_fd, self._woken_fd = -1, -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def receive(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Call ``take(document)`` with what is sent from now on, in a thread of its own. OSError if it cannot."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # of a leader that died
        self._socket.bind(self._address)
        self._woken_fd, self._wake_fd = os.pipe2(os.O_CLOEXEC)
        self._thread = JoinableThread(self._run, "ckpt-sink-node", (take,))
        self._thread.start()

    def close(self) -> None:
        """Take what was sent, then lead no more. Idempotent."""
        if self._lock_fd < 0:
            return
        if self._thread is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # nothing more is sent to it
            os.close(self._wake_fd)
            self._thread.join(_CLOSE_S)
            os.close(self._woken_fd)
        self._socket.close()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def close_in_child(self) -> None:
        """Close the socket in a forked process, which would keep it alive. The lock is not inherited."""
        self._socket.close()

    def _run(self, take: Callable[[dict[str, Any]], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken_fd, select.POLLHUP)
        failed = False
        touched = time.monotonic()
        while True:
            ready = {fd for fd, _ in poll.poll(1000 * _TOUCH_S)}
            if time.monotonic() - touched >= _TOUCH_S:
                touched = time.monotonic()
                self._touch()
            if not ready:
                continue
            if self._socket.fileno() not in ready:
                return
            try:
                take(json.loads(self._socket.recv(_MAX_BYTES)))
            except Exception as error:
                if not failed:
                    _log.warning("an event of another process of this node was not understood: %s", error)
                failed = True

    def _touch(self) -> None:
        """Make the files new, so that nothing removes them because they are old."""
        for file in (self._lock_fd, self._path, os.path.dirname(self._path)):
            with contextlib.suppress(OSError):
                os.utime(file)
