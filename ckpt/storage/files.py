"""Write files, durably where that is asked for.

Only this module, `directories` and `stores.directory` change the file system.

Durable means that the data survives a loss of power, as far as the file system keeps its promises. POSIX needs an
fsync of the file for its content, and one of each directory in which a name is new. A rename is atomic for other
processes, and after a loss of power it has happened or not. After a failed fsync the kernel may have dropped the data,
so the fsync of the same file is never retried: `sync_files` fails, and so does the save. `write_pages` syncs the file
itself where O_DIRECT is refused; then its caller may remove the file, and write a new one from memory.

Every failure of the file system is a `StorageError` that names the path and says what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt.errors import CheckpointError, StorageError
from ckpt.storage.attempts import TriesAgain, never, until_written
from ckpt.storage.links import is_link_error, parent_of

_ALIGNMENT = 4096
_MAXWRITE_BYTES = 1 << 30  # Linux writes a little less than 2 GiB at once
_WRITE, _NEW, _OVERWRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, os.O_CREAT | os.O_EXCL, 0

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # the last one: there is only a link that leads to itself
_HINTS = {
    errno.ENOSPC: "the file system is full: free space, or keep fewer steps",
    errno.EDQUOT: "the quota is used up: free space, or keep fewer steps",
    errno.EFBIG: "the file is larger than allowed here: raise the limit (ulimit -f)",
    errno.EACCES: "check the permissions and the owner of the directory",
    errno.EPERM: "check the permissions and the owner of the directory",
    errno.EROFS: "the file system is mounted read-only: remount it or use another checkpoint root",
    errno.ENOTDIR: "a part of the path is a file: remove it or use another checkpoint root",
    errno.ENOENT: "the directory does not exist: was the save abandoned or the checkpoint root removed?",
    errno.EEXIST: "it exists already: was this save written twice?",
    errno.EIO: "the device failed: see the kernel log, and verify earlier steps",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ESTALE: "the network file system lost the file: check its server",
}


@contextmanager
def storage_errors(action: str, path: str) -> Iterator[None]:
    """Raise an `OSError` of the block as a `StorageError`, unless it is an error of `ckpt` already."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the file system")
        raise StorageError(f"cannot {action} {path}: {error.strerror or error} ({hint})") from error


def under(root: str, relative: str) -> str:
    """Return the path of `relative` below `root`; `StorageError` if it could lead out of it."""
    if not relative or "\0" in relative or any(part in ("", ".", "..") for part in relative.split("/")):
        raise StorageError(f"{relative!r} is not a path below {root}; the checkpoint or the plan is damaged")
    return os.path.join(root, relative)


def write_durable(path: str, data: bytes | memoryview, tries_again: TriesAgain = never) -> None:
    """Replace the content of `path` by `data`, durably and atomically for other processes and crashes."""

    def write() -> None:
        with storage_errors("write", path):
            temporary = _write_sibling(path, data)
            try:
                os.rename(temporary, path)
            except BaseException:
                _discard(temporary)
                raise

    until_written(write, tries_again)
    with storage_errors("write", path):
        fsync(os.path.dirname(path))


def create_exclusive(path: str, data: bytes, tries_again: TriesAgain = never) -> bool:
    """Create `path` with `data`, durably and atomically; False if it exists, and then it is not changed.

    What exists is durable, too, when this returns. If it is tried again, a file with the same data counts as created.
    """
    has_failed = False

    def create() -> bool:
        nonlocal has_failed
        before, has_failed = has_failed, True
        with storage_errors("create", path):
            temporary = _write_sibling(path, data)
            try:
                _link(temporary, path)
            except FileExistsError:  # perhaps just now, by a process that has not synced the directory yet
                return before and holds(path, data)  # a server may have done what it reported as an error
            finally:
                _discard(temporary)
        return True

    created = until_written(create, tries_again)
    with storage_errors("create", path):
        fsync(os.path.dirname(path))
    return created


def write_document(path: str, data: bytes, scratch: str) -> None:
    """Replace the content of `path` by `data`, atomically; durable after `sync_files`.

    The file is written in the directory `scratch`, on the same file system, and renamed. If the directory of `path` is
    renamed meanwhile, no temporary file is left in it and it is not changed; that is a `StorageError`.
    """
    with storage_errors("write", path):
        temporary = _write_sibling(os.path.join(scratch, os.path.basename(path)), data, sync=False)
        try:
            os.rename(temporary, path)
        except BaseException:
            _discard(temporary)
            raise


def write_new(path: str, data: bytes, *, replace: bool = False) -> None:
    """Write a new file; durable after `sync_files`. `StorageError` if it exists, unless `replace`."""
    with storage_errors("write", path):
        _write(os.open(path, _WRITE | (os.O_CREAT | os.O_TRUNC if replace else _NEW), 0o666), data)


def append(path: str, data: bytes) -> None:
    """Append `data` to a file, in one write; create the file if it does not exist. Not durable."""
    with storage_errors("write", path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _write(fd, data)


def touch(path: str) -> None:
    """Set the time of an existing file to now, by the clock of its file system."""
    with storage_errors("renew", path):
        os.utime(path, follow_symlinks=False)


def exists(path: str) -> bool:
    """Return whether there is anything at `path`, also a link to nothing.

    StorageError if that cannot be told: `os.path.lexists` returns False then, and files would be deleted for that.
    """
    return _status(path, os.lstat) is not None


def exists_alone(path: str) -> bool:
    """Return whether there is a file at `path` without another name, to write over. One that has others is unlinked."""
    about = _status(path, os.lstat)
    if about is not None and stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
        remove(path)
        return False
    return about is not None


def is_directory(path: str, *, follow: bool = True) -> bool:
    """Return whether there is a directory at `path`, or with `follow` a link to one. StorageError as `exists`."""
    found = _status(path, os.stat if follow else os.lstat)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _status(path: str, look: Callable[[str], os.stat_result]) -> os.stat_result | None:
    with storage_errors("find", path):
        try:
            return look(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise


def holds(path: str, data: bytes) -> bool:
    """Return whether `path` is a regular file with exactly this content."""
    with storage_errors("read", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return False
            raise
        with open(fd, "rb") as stream:
            return stat.S_ISREG(os.fstat(fd).st_mode) and stream.read(len(data) + 1) == data


def write_pages(
    path: str, pages: memoryview, size: int, *, direct: bool = True, overwrite: bool = False, at: int = 0
) -> bool:
    """Write the first `size` bytes of `pages` to a file, a new one unless `overwrite`; durable after `sync_files`.

    With `direct` the data goes to the device straight from memory (O_DIRECT): `pages` must be whole pages at a page
    boundary. They are written in full, and the file is truncated to `size`. Returns whether this was possible. Some
    file systems refuse; then the file is written through the page cache and synced at once, because the kernel may drop
    errors together with the pages.

    A call with `at`, the bytes of some whole pages, continues the file that calls before it have written up to there.
    """
    with storage_errors("write", path):
        if direct and _write_direct(path, pages, size, _OVERWRITE if overwrite or at else _NEW, at):
            return True
        flags = os.O_APPEND if at else os.O_CREAT | os.O_TRUNC if direct or overwrite else _NEW
        _write(os.open(path, _WRITE | flags, 0o666), pages[:size], sync=True)
        return False


def sync_files(files: Iterable[str], directories: Iterable[str], *, threads: int = 8) -> None:
    """Make files and directories durable: first all files, then the directories that name them.

    Call it once, when everything is written: the first sync of a journalling file system then commits all of it, and
    the others have nothing left to do. `StorageError` if a sync fails.
    """
    with ThreadPoolExecutor(threads, "ckpt-sync") as pool:
        for paths in (list(files), list(directories)):
            for _ in pool.map(_sync_all, (paths[first::threads] for first in range(threads))):
                pass


def take(folder: str, name: str, target: str) -> bool:
    """Move a file from one directory to another, if it is a regular file without another name; return whether it was.

    `name` is its path below `folder`, and then below `target`. Anything else that was moved is unlinked: it must not be
    written to. Nothing is moved through a symbolic link.
    """
    with storage_errors("take", os.path.join(folder, name)), parent_of(target, name) as (to, last):
        try:
            with parent_of(folder, name) as (fro, _):
                os.rename(last, last, src_dir_fd=fro, dst_dir_fd=to)
        except OSError as error:
            if error.errno == errno.ENOENT or is_link_error(error):
                return False
            raise
        about = os.stat(last, dir_fd=to, follow_symlinks=False)
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            return True
        if stat.S_ISDIR(about.st_mode):
            raise StorageError(f"{os.path.join(folder, name)} is a directory; remove it (it was made by hand)")
        os.unlink(last, dir_fd=to)
        return False


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The file behind a name, and when its content changed last."""

    device: int
    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, about: os.stat_result) -> FileIdentity | None:
        """Return the identity of a regular file; None for anything else."""
        if not stat.S_ISREG(about.st_mode):
            return None
        return cls(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


def identity(path: str) -> FileIdentity | None:
    """Return the identity of a file; None if it does not exist, or is no regular file."""
    about = _status(path, os.lstat)
    return None if about is None else FileIdentity.of(about)


def link(folder: str, name: str, target: str, expected: FileIdentity) -> bool:
    """Give a file of one directory a second name in another, and return whether it has it.

    `name` is its path below `folder`, and then below `target`, where it replaces a file. False if it is not the
    `expected` file any more, or if the file system makes no link, for whatever reason; then the name in `target` is
    free, or has the file from before. StorageError if that is not certain. The name is durable after `sync_files`.
    """
    with storage_errors("link", os.path.join(target, name)), parent_of(target, name) as (to, last):
        try:
            with parent_of(folder, name) as (fro, _):
                if FileIdentity.of(os.stat(last, dir_fd=fro, follow_symlinks=False)) != expected:
                    return False
                _unlink_in(to, last)
                os.link(last, last, src_dir_fd=fro, dst_dir_fd=to, follow_symlinks=False)
            if FileIdentity.of(os.stat(last, dir_fd=to, follow_symlinks=False)) == expected:
                return True
        except OSError:
            pass  # the step was removed, or the file system makes no links, or no more of this file
        # It may be there, after a repeated request to a server; what is written must be a file of its own.
        _unlink_in(to, last)
        return False


def _unlink_in(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    with storage_errors("remove", path), suppress(FileNotFoundError):
        os.unlink(path)


def _write_sibling(path: str, data: bytes | memoryview, *, sync: bool = True) -> str:
    """Write `data` to a new hidden file next to `path` and return its path."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    fd = os.open(temporary, _WRITE | _NEW, 0o666)
    try:
        _write(fd, data, sync=sync)
    except BaseException:
        _discard(temporary)
        raise
    return temporary


def _write(fd: int, data: bytes | memoryview, *, sync: bool = False) -> None:
    """Write all of `data` and close `fd`."""
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view[:_MAXWRITE_BYTES]) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_direct(path: str, pages: memoryview, size: int, flags: int, at: int) -> bool:
    """Write a file with O_DIRECT; False if the file system refuses, and then the file may have any content."""
    if len(pages) % _ALIGNMENT or not 0 <= size <= len(pages):
        raise ValueError(f"a buffer of {len(pages)} bytes for a file of {size} is not whole pages")
    try:
        fd = os.open(path, _WRITE | flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    try:
        offset = 0
        while offset < len(pages):
            try:
                written = os.pwrite(fd, pages[offset : offset + _MAXWRITE_BYTES], at + offset)
            except OSError as error:
                if at + offset == 0 and error.errno == errno.EINVAL:
                    return False
                raise
            if written < _ALIGNMENT:
                raise OSError(errno.ENOSPC, "short write")
            offset += written // _ALIGNMENT * _ALIGNMENT  # after a short write, continue at a page boundary
        os.ftruncate(fd, at + size)
        return True
    finally:
        os.close(fd)


def _sync_all(paths: Iterable[str]) -> None:
    for path in paths:
        _sync(path)


def _sync(path: str) -> None:
    with storage_errors("sync", path):
        fsync(path)


def fsync(path: str) -> None:
    """Sync a file or directory. Raises `OSError`, not `StorageError`."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync_open(fd)
    finally:
        os.close(fd)


def fsync_open(fd: int) -> None:
    """Sync an open file or directory. Raises `OSError`, not `StorageError`."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise  # else a network file system that cannot sync directories, and does it by itself


def _discard(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        rename_no_replace(source, target)  # a file system without hard links


def rename_no_replace(source: str, target: str) -> None:
    """Rename without replacing: renameat2(2), or rename(2), which replaces no directory that is not empty."""
    at_fdcwd, no_replace = -100, 1
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        number = errno.EINTR
        while number == errno.EINTR:  # Python repeats only calls through `os`
            if renameat2(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), no_replace) == 0:
                return
            number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), source)
    if exists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)
