"""The only module that writes, syncs and renames files directly.

Durable means: the data survives a loss of power, as far as the file system keeps its promises. POSIX needs an fsync of
the file for its content, and one of each directory in which a name is new. A rename is atomic for other processes, and
after a loss of power it has happened or not. After a failed fsync the kernel may have dropped the data already: it is
never retried, the save fails.

Every failure of the file system is a `StorageError` that names the path and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from ckpt.errors import StorageError

__all__ = [
    "append",
    "create_exclusive",
    "holds",
    "remove",
    "storage_errors",
    "sync_files",
    "touch",
    "under",
    "write_document",
    "write_durable",
    "write_image",
    "write_new",
]

_ALIGNMENT = 4096
_MAXWRITE_BYTES = 1 << 30  # Linux takes a little less than 2 GiB at once
_WRITE, _NEW, _OVER = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, os.O_CREAT | os.O_EXCL, 0

_HINTS = {
    errno.ENOSPC: "the file system is full: free space, or keep fewer steps",
    errno.EDQUOT: "the quota is used up: free space, or keep fewer steps",
    errno.EFBIG: "the file is larger than allowed here: raise the limit (ulimit -f)",
    errno.EACCES: "check the permissions and the owner of the directory",
    errno.EPERM: "check the permissions and the owner of the directory",
    errno.EROFS: "the file system is mounted read-only: remount it or use another checkpoint root",
    errno.ENOTDIR: "a part of the path is a file: remove it or use another checkpoint root",
    errno.ENOENT: "the directory is gone: was the save abandoned or the checkpoint root removed?",
    errno.EEXIST: "something is there already: was this save written twice?",
    errno.EIO: "the device failed: see the kernel log, and verify earlier steps",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ESTALE: "the network file system lost the file: check its server",
}


@contextmanager
def storage_errors(action: str, path: str) -> Iterator[None]:
    """Raise a `StorageError` for an `OSError` that leaves the block."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the file system")
        raise StorageError(f"cannot {action} {path}: {error.strerror or error} ({hint})") from error


def under(root: str, relative: str) -> str:
    """Return the path of `relative` below `root`; `StorageError` if it could lead out of it."""
    if not relative or "\0" in relative or any(part in ("", ".", "..") for part in relative.split("/")):
        raise StorageError(f"{relative!r} is not a path below {root}; the checkpoint or the plan is damaged")
    return os.path.join(root, relative)


def write_durable(path: str, data: bytes) -> None:
    """Make `path` hold `data`, durably: others, and a crash, find what was there before or all of it."""
    with storage_errors("write", path):
        temporary = _write_sibling(path, data)
        try:
            os.rename(temporary, path)
        except BaseException:
            _discard(temporary)
            raise
        fsync(os.path.dirname(path))


def create_exclusive(path: str, data: bytes) -> bool:
    """Make a new file `path` with `data`, durably and at once; False if `path` exists already (its content stays)."""
    with storage_errors("create", path):
        temporary = _write_sibling(path, data)
        try:
            _link(temporary, path)
        except FileExistsError:
            return False
        finally:
            _discard(temporary)
        fsync(os.path.dirname(path))
        return True


def write_document(path: str, data: bytes, scratch: str) -> None:
    """Make `path` hold `data`, for others at once, durably after `sync_files` only.

    It is written in the directory `scratch`, of the same file system, and renamed: so nothing is left beside `path`
    when its directory is renamed meanwhile, and what became of that directory is never touched. `StorageError` then.
    """
    with storage_errors("write", path):
        temporary = _write_sibling(os.path.join(scratch, os.path.basename(path)), data, sync=False)
        try:
            os.rename(temporary, path)
        except BaseException:
            _discard(temporary)
            raise


def write_new(path: str, data: bytes, *, replace: bool = False) -> None:
    """Write a new file. It is durable after `sync_files` only. `StorageError` if it exists, unless it may be
    replaced."""
    with storage_errors("write", path):
        _write(os.open(path, _WRITE | (os.O_CREAT | os.O_TRUNC if replace else _NEW), 0o666), data)


def append(path: str, data: bytes) -> None:
    """Add `data` to the end of a file, in one write; make the file if it is not there. Not durable."""
    with storage_errors("write", path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _write(fd, data)


def touch(path: str) -> None:
    """Set the time of a file to now, by the clock of its file system. It must be there."""
    with storage_errors("renew", path):
        os.utime(path)


def holds(path: str, data: bytes) -> bool:
    """Whether `path` is a file with exactly this content."""
    with storage_errors("read", path):
        try:
            with open(path, "rb") as stream:
                return stream.read(len(data) + 1) == data
        except (FileNotFoundError, NotADirectoryError):
            return False


def write_image(path: str, image: memoryview, size: int, *, direct: bool = True, over: bool = False) -> bool:
    """Write the first `size` bytes of `image` as a new file, or `over` one that is there. It is durable after
    `sync_files` only.

    With `direct` the pages go to the device straight from memory (O_DIRECT): `image` must be whole pages at a page
    boundary, and is written in full; what is after `size` is cut off. Returns whether this was possible: some file
    systems refuse, then the file is written through the page cache, and already synced, for its errors would be
    forgotten with the page cache.
    """
    with storage_errors("write", path):
        if direct and _write_direct(path, image, size, _OVER if over else _NEW):
            return True
        flags = os.O_CREAT | os.O_TRUNC if direct or over else _NEW
        _write(os.open(path, _WRITE | flags, 0o666), image[:size], sync=True)
        return False


def sync_files(files: Iterable[str], directories: Iterable[str], *, threads: int = 8) -> None:
    """Make files and directories durable: first all files, then the directories that name them. `StorageError` if one
    cannot be.

    To be called once, when everything is written: the first sync of a journalling file system then commits all of it,
    and the others find nothing left to do.
    """
    with ThreadPoolExecutor(threads, "ckpt-sync") as pool:
        for paths in (list(files), list(directories)):
            for _ in pool.map(_sync_all, (paths[first::threads] for first in range(threads))):
                pass


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with storage_errors("remove", path), suppress(FileNotFoundError):
        os.unlink(path)


def _write_sibling(path: str, data: bytes, *, sync: bool = True) -> str:
    """Write `data` to a new hidden file beside `path`, synced if so asked, and return its path."""
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


def _write_direct(path: str, image: memoryview, size: int, flags: int) -> bool:
    """Write a file with O_DIRECT; False if the file system refuses, then there may be a file with anything in it."""
    if len(image) % _ALIGNMENT or not 0 <= size <= len(image):
        raise ValueError(f"an image of {len(image)} bytes for a file of {size} is not whole pages")
    try:
        fd = os.open(path, _WRITE | flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    try:
        offset = 0
        while offset < len(image):
            try:
                written = os.pwrite(fd, image[offset : offset + _MAXWRITE_BYTES], offset)
            except OSError as error:
                if offset == 0 and error.errno == errno.EINVAL:
                    return False
                raise
            if written < _ALIGNMENT:
                raise OSError(errno.ENOSPC, "short write")
            offset += written // _ALIGNMENT * _ALIGNMENT  # the rest of a short write goes again, aligned
        os.ftruncate(fd, size)
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
    fd = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not os.path.isdir(path or "."):
            raise  # some network file systems cannot sync directories, and do it by themselves
    finally:
        os.close(fd)


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
    """renameat2(2) with RENAME_NOREPLACE; without it, rename(2), which never replaces a directory that is not empty."""
    at_fdcwd, no_replace = -100, 1
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        number = errno.EINTR
        while number == errno.EINTR:  # Python repeats the calls of `os` only
            if renameat2(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), no_replace) == 0:
                return
            number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), source)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)
