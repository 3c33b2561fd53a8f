"""Unix sockets between processes of one user: mode 0600, and the kernel reports the user of each peer.

Their paths may have any length: the 107 bytes of the kernel are enough for the name behind a descriptor of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator

_CREDENTIALS = struct.Struct("3i")
_LONGEST_PATH = 107


def listen(path: str) -> socket.socket:
    """Return a non-blocking socket that listens at a path, for this user; a stale socket is removed. OSError."""
    remove_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before it has a name, so that others can never connect
        with short_path(path) as short:
            listener.bind(short)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: str, timeout_s: float) -> socket.socket:
    """Return a connection whose operations take `timeout_s` at most. OSError; PermissionError for another user's."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(timeout_s)
        with short_path(path) as short:
            end.connect(short)
        peer_pid(end)
    except BaseException:
        end.close()
        raise
    return end


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Yield a path of the same socket that is short enough for the kernel, valid while the context lasts. OSError."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{fd}/{name}"
        if len(os.fsencode(short)) > _LONGEST_PATH:
            raise OSError(errno.ENAMETOOLONG, "the name of a unix socket is too long", path)
        yield short
    finally:
        os.close(fd)


def peer_pid(end: socket.socket) -> int:
    """Return the process at the other end, as the kernel knows it. PermissionError if it is another user's."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise PermissionError(f"process {pid} belongs to user {uid}, not {os.geteuid()}")
    return int(pid)


def remove_socket(path: str) -> None:
    """Remove a socket; anything else stays."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def private_directory() -> str:
    """Return a directory that only this user can enter (mode 0700, not a link), created if needed.

    If the usual name (inprocess-UID in the temporary folder) belongs to another user, is a link, or is a directory that
    others could have written to, a directory with a random name is used instead. OSError if the temporary folder cannot
    be written.
    """
    folder, name = tempfile.gettempdir(), f"inprocess-{os.geteuid()}"
    usual = os.path.join(folder, name)
    with contextlib.suppress(OSError):  # it exists, or cannot be created: both are handled below
        os.mkdir(usual, 0o700)
        os.chmod(usual, 0o700)  # whatever the umask is
    for path in (usual, *sorted(glob.glob(f"{glob.escape(usual)}-*"))):
        if _is_private(path):
            return path
    try:
        return tempfile.mkdtemp(prefix=f"{name}-", dir=folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"no private directory can be created in {folder} ({error.strerror}), and {usual} is not a directory of "
            "this user with mode 0700; remove that, or set TMPDIR to a folder of your own",
        ) from error


def _is_private(path: str) -> bool:
    """Return whether this is a directory, not a link, that belongs to this user and that no other user may enter."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
