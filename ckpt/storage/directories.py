"""List, make, sync, rename, remove and lock directories.

Failures are `StorageError`s, and durable means the same, as in `files`.

The files of removed steps and abandoned saves are deleted with a callback before each, without following links.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Container
from enum import Enum

from ckpt.errors import StorageError
from ckpt.storage.files import exists, fsync, is_directory, rename_no_replace, storage_errors, under
from ckpt.storage.links import is_link_error, open_directory, parent_of, refuse_link
from ckpt.storage.names import pack_file, part_name
from inprocess.ipc.uncopied import Uncopied

_REMOVE_ATTEMPTS = 5
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_REFUSED = (*_ABSENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTSUP)
_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_MTIME = -100, 0x2000, 0x40
_MTIME_AT = 14  # in words of 64 bits: seconds, then nanoseconds in 32
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Rename(Enum):
    """The outcome of a rename that never overwrites."""

    DONE = "done"
    SOURCE_GONE = "source gone"
    TARGET_EXISTS = "target exists"


def server_time(path: str) -> float:
    """Return the time of the file system of directory `path`, in seconds; that of this host if it is not writable.

    StorageError if the file system failed: by another clock, processes of other hosts would seem to be dead.
    """
    with storage_errors("find the time of", path):
        try:
            _probe(path)
            return os.stat(path).st_mtime
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return time.time()


def names_in(path: str) -> list[str]:
    """Return the names in a directory, sorted, without hidden ones; none if it does not exist.

    StorageError if it is a symbolic link.
    """
    with storage_errors("list", path):
        try:
            fd = open_directory(path)
        except OSError as error:
            if error.errno != errno.ENOENT and not is_link_error(error):
                raise
            refuse_link(path)
            return []
        try:
            return sorted(name for name in os.listdir(fd) if not name.startswith("."))
        finally:
            os.close(fd)


def fresh_names(path: str) -> list[str]:
    """Return the names in a directory as `names_in`, bypassing the client's cache if this host may write there.

    The client of a network file system answers from its cache for seconds; making a name in the directory ends that.
    """
    _end_caching(path)
    return names_in(path)


def fresh_names_below(root: str, relative: str) -> list[str]:
    """Return the `fresh_names` of directory `relative` below `root`, even if it was not there a moment ago.

    A client may also remember for seconds that there is no such directory, although another one has made it. That ends
    when this one tries to make it, which it does if its parent lists it. StorageError if it is a symbolic link.
    """
    path = root
    for name in relative.split("/"):
        _end_caching(path)
        with storage_errors("list", path):
            try:
                if name not in os.listdir(path):
                    return []
            except FileNotFoundError:
                return []
        path = os.path.join(path, name)
        with storage_errors("look at", path):
            try:
                os.mkdir(path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, *_REFUSED):
                    raise
        refuse_link(path)
    return fresh_names(path)


def _end_caching(path: str) -> None:
    """Make a client that answers from its cache for directory `path` ask the server, if this host may write there."""
    with storage_errors("list", path):
        try:
            _probe(path)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise


def fresh_time(path: str) -> float:
    """Return when a file was changed last, in seconds since 1970, as its server has it. OSError."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return os.stat(path).st_mtime
    about = (ctypes.c_uint64 * 32)()  # struct statx
    if statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_MTIME, about) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.EPERM):  # a kernel, or a sandbox, without the call
            return os.stat(path).st_mtime
        raise OSError(number, os.strerror(number), path)
    nanoseconds = about[_MTIME_AT + 1] & 0xFFFFFFFF
    return ctypes.c_int64(about[_MTIME_AT]).value + nanoseconds / 1e9


def check_writable(path: str) -> None:
    """Raise StorageError if no file can be made in directory `path`."""
    with storage_errors("write", path):
        _probe(path)


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    with storage_errors("sync", path):
        fsync(path)


def make_directories(root: str, relative: str, made: Container[str] = ()) -> list[str]:
    """Make directory `relative` below `root`, which exists, and return the paths from `root` to it, both included.

    Never makes `root`: the directory of an abandoned save must not come back. Paths in `made` are known to exist. The
    directory is durable after a sync of all returned paths. StorageError if one of them but `root` is a symbolic link.
    """
    paths = [root]
    if relative:
        under(root, relative)
        for part in relative.split("/"):
            paths.append(os.path.join(paths[-1], part))
            if paths[-1] not in made:
                with storage_errors("make directory", paths[-1]):
                    try:
                        os.mkdir(paths[-1])
                    except FileExistsError:
                        refuse_link(paths[-1])
    return paths


def make_with_parents(path: str) -> None:
    """Make a directory, and those it is in, durably, unless it is there. StorageError if a file has its name."""
    missing = []
    path = os.path.abspath(path)
    while not is_directory(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        with storage_errors("make directory", path):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not is_directory(path):
                    raise StorageError(f"{path} is a file; choose another checkpoint root") from None
            fsync(os.path.dirname(path))


def rename_directory(source: str, target: str) -> Rename:
    """Rename a directory, durably and atomically, without overwriting.

    Exactly one of several processes that rename the same directory, or to the same target, succeeds. Where the system
    cannot promise that in one step, only an *empty* directory can be overwritten. Look at what is there afterwards: a
    network file system may report `SOURCE_GONE` for its own rename that it repeated, and after a `StorageError` of the
    final sync the rename is done, but perhaps not durable.
    """
    with storage_errors("rename", source):
        try:
            rename_no_replace(source, target)
        except FileNotFoundError:
            if exists(source):
                raise  # the directory of the target is missing
            return Rename.SOURCE_GONE
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return Rename.TARGET_EXISTS
            raise
        for parent in dict.fromkeys((os.path.dirname(target), os.path.dirname(source))):
            fsync(parent)
        return Rename.DONE


def remove_tree(path: str) -> None:
    """Remove a directory tree, or only the link if it is one, even while other processes remove it or write to it."""
    for attempt in range(_REMOVE_ATTEMPTS):
        with storage_errors("remove", path):
            try:
                if os.path.islink(path):
                    os.unlink(path)
                else:
                    shutil.rmtree(path)
            except OSError as error:
                if not exists(path):
                    return
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or attempt == _REMOVE_ATTEMPTS - 1:
                    raise
            else:
                return


def remove_subdirectories(path: str) -> None:
    """Remove all directories in `path`, even if a process still writes there; or `path` itself if it is a link."""
    if os.path.islink(path):
        remove_tree(path)
        return
    with storage_errors("clean up", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)


def _probe(path: str) -> None:
    """Make and remove a hidden file in directory `path`. OSError also if that is a symbolic link."""
    with parent_of(path, f".probe.{secrets.token_hex(8)}.tmp") as (folder, probe):
        os.close(os.open(probe, _NEW_FILE, 0o666, dir_fd=folder))
        os.unlink(probe, dir_fd=folder)


class DirectoryLock(Uncopied):
    """A lock on a directory by flock(2), held until `close` or the end of the process. A context manager."""

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
    """Lock a directory against removal, shared with other readers; None if it is being removed. Never waits.

    It saves work on one host and decides nothing: a network file system may keep locks on its client, or have none.
    """
    return _lock(path, fcntl.LOCK_SH)


def try_lock_exclusive(path: str) -> DirectoryLock | None:
    """Lock a directory for removal; None if another process holds a lock on it. Never waits."""
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
            pass  # the file system has no locks, or none for directories: go on without
        return DirectoryLock(fd)


# -- removed steps -----------------------------------------------------------------------------------------------------


def remove_share(path: str, rank: int, before_each: Callable[[], None]) -> None:
    """Delete what one rank has written in the directory `path`: the files of its pack, and its part manifest."""
    number = 0
    while _remove(path, pack_file(rank, number), before_each):
        number += 1
    _remove(path, part_name(rank), before_each)


def _remove(path: str, name: str, before_each: Callable[[], None]) -> bool:
    """Delete a file if every directory on the way is one, not a link; return whether it was there."""
    before_each()
    with storage_errors("remove", os.path.join(path, name)):
        try:
            with parent_of(path, name) as (folder, last):
                os.unlink(last, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ENOENT or is_link_error(error):
                return False
            raise
    return True


def remove_contents(path: str, before_each: Callable[[], None], *, keep_files: bool = False) -> None:
    """Delete a directory; with `keep_files` only the directories in it. Other processes may delete it, too.

    Of what is no directory, such as a symbolic link, only its name is deleted. What cannot be deleted stays, and is a
    StorageError when the rest is gone.
    """
    parent, name = os.path.split(path)
    errors: list[OSError] = []
    with storage_errors("remove", path), contextlib.suppress(FileNotFoundError), parent_of(parent, name) as (folder, _):
        _remove_tree(name, folder, before_each, errors, keep_files=keep_files)
        if errors:
            raise errors[0]


def _remove_tree(
    name: str, folder: int, before_each: Callable[[], None], errors: list[OSError], *, keep_files: bool = False
) -> None:
    """Delete what has this name in the directory with the descriptor `folder`; append the errors of what stays."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if is_link_error(error):
            _call(os.unlink, name, folder, before_each, errors)
        else:
            errors.append(error)
        return
    try:
        with os.scandir(fd) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_directory in found:
            if is_directory:
                _remove_tree(entry, fd, before_each, errors)
            elif not keep_files:
                _call(os.unlink, entry, fd, before_each, errors)
    finally:
        os.close(fd)
    if not keep_files:
        _call(os.rmdir, name, folder, before_each, errors)


def _call(
    remove: Callable[..., None], name: str, folder: int, before_each: Callable[[], None], errors: list[OSError]
) -> None:
    before_each()
    try:
        remove(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)
