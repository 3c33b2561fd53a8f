"""A directory as a store: each object is a file, and each folder of a key a directory.

    <path>/records/step_00000010-o17-8f0c.../000.json     an object
    <path>/.incomplete/<random>                           a file that is being written

A file is written and synced in `.incomplete`, and gets its name when it is whole: by link(2), which replaces nothing,
or by rename(2). So no process reads a part of it, and after a crash it is there or not. The directories are opened one
by one without following links: nothing is read, written or deleted through a link below the root, nor outside of it.
The root itself may be a link. Names that begin with a dot are no keys.

The client of a network file system answers lists from its cache for seconds. Making a name in a directory ends that, so
each list does so, where this host may write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence

from ckpt.errors import StorageError
from ckpt.storage.directories import make_with_parents, server_time
from ckpt.storage.files import fsync_open, is_directory, storage_errors
from ckpt.storage.regular_files import DamagedFileError, MissingFileError, open_regular
from ckpt.storage.stores.interface import About, Store, is_key

_INCOMPLETE = ".incomplete"
_INCOMPLETE_S = 3600.0  # older files there are of processes that have ended, or fail when they are given their names
_SWEEP_S = 600.0
_ATTEMPTS = 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MAXWRITE_BYTES = 1 << 30
_PROBE = re.compile(r"\.probe\.[0-9a-f]{16}\.tmp")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTSUP)


class DirectoryStore(Store):
    """The files below a directory, which is made with the first of them. See `Store`."""

    def __init__(self, path: str, url: str | None = None) -> None:
        """`url` names the directory in messages, if not its path."""
        self._path = os.path.abspath(path)
        self.url = self._path if url is None else url
        self._swept = time.monotonic()

    def create(self, key: str, data: bytes) -> About | None:
        """See `Store.create`."""
        with self._errors("create", key), self._incomplete(key, data) as (scratch, temporary):
            for folder, name in self._folders(key):
                try:
                    os.link(temporary, name, src_dir_fd=scratch, dst_dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    os.stat(temporary, dir_fd=scratch)  # else it took so long that the file was removed
                    continue  # the folder was empty, and was removed just now
                except FileExistsError:  # perhaps by this call, which a network file system has repeated
                    fsync_open(folder)  # or just now by a process that has not synced it yet
                    found = self.read(key, 0, len(data) + 1)
                    return self.about(key) if found is not None and bytes(found) == data else None
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    raise StorageError(
                        f"{self.url}: the file system has no hard links, so two jobs could both publish a step; use "
                        "another one"
                    ) from error
                fsync_open(folder)
                return _about(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
        raise self._busy("create", key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Store.put`."""
        with self._errors("write", key), self._incomplete(key, data) as (scratch, temporary):
            for folder, name in self._folders(key):
                try:
                    os.rename(temporary, name, src_dir_fd=scratch, dst_dir_fd=folder)
                except FileNotFoundError:
                    os.stat(temporary, dir_fd=scratch)  # else it took so long that the file was removed
                    continue
                fsync_open(folder)
                return
        raise self._busy("write", key)

    def read(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        """See `Store.read`."""
        with self._errors("read", key), self._opened(key) as fd:
            if fd is None:
                return None
            data = bytearray(max(0, min(nbytes, os.fstat(fd).st_size - offset)))
            done = 0
            while done < len(data) and (count := os.preadv(fd, [memoryview(data)[done:]], offset + done)):
                done += count
            return memoryview(data)[:done].toreadonly()

    def about(self, key: str) -> About | None:
        """See `Store.about`."""
        with self._errors("find", key), self._opened(key) as fd:
            return None if fd is None else _about(key, os.fstat(fd))

    def below(self, prefix: str) -> Iterator[About]:
        """See `Store.below`. Links are left out."""
        found: list[About] = []
        with self._errors("list", prefix):
            self._walk(prefix, found)
        return iter(sorted(found, key=lambda each: each.key))

    def _walk(self, prefix: str, found: list[About]) -> None:
        folders, objects = self._scan(prefix)
        found += objects
        for name in folders:
            self._walk(f"{prefix}{name}/", found)

    def names(self, prefix: str) -> tuple[list[str], list[About]]:
        """See `Store.names`. Links are left out."""
        with self._errors("list", prefix):
            folders, objects = self._scan(prefix)
            return sorted(name for name in folders if self._has_objects(f"{prefix}{name}/")), objects

    def _has_objects(self, prefix: str) -> bool:
        folders, objects = self._scan(prefix)
        return bool(objects) or any(self._has_objects(f"{prefix}{name}/") for name in folders)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`. Folders in which nothing is left go with them."""
        for prefix in dict.fromkeys(key.rpartition("/")[0] for key in keys):
            with self._errors("delete", prefix):
                folder = self._open(_parts(prefix))
                if folder is None:
                    continue
                try:
                    for key in keys:
                        if key.rpartition("/")[0] == prefix:
                            self._check(key)
                            with contextlib.suppress(FileNotFoundError):
                                os.unlink(key.rpartition("/")[2], dir_fd=folder)
                    fsync_open(folder)
                finally:
                    os.close(folder)
                self._prune(_parts(prefix))
        if time.monotonic() - self._swept > _SWEEP_S:
            self._swept = time.monotonic()
            with contextlib.suppress(StorageError):  # the keys are deleted
                self.sweep()

    def sync(self, key: str) -> None:
        """See `Store.sync`: a name is there before its folder is synced."""
        *names, _ = key.split("/")
        with self._errors("sync", key):
            for depth in range(len(names), -1, -1):
                folder = self._open(names[:depth])
                if folder is not None:
                    try:
                        fsync_open(folder)
                    finally:
                        os.close(folder)

    def now(self) -> float:
        """See `Store.now`."""
        return server_time(self._path)

    def sweep(self) -> None:
        """Delete files that dead processes have not completed."""
        before = self.now() - _INCOMPLETE_S
        with self._errors("clean up", _INCOMPLETE):
            folder = self._open([_INCOMPLETE])
            if folder is None:
                return
            try:
                for name in os.listdir(folder):
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # not ours
                        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < before:
                            os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

    # -- directories, by descriptors ---------------------------------------------------------------------------------

    def _open(self, names: Sequence[str], *, make: bool = False) -> int | None:
        """Open the folder that names lead to from the root, and return its descriptor; None if it is not there.

        With `make` it is made, durably. OSError also if one of the names is a link.
        """
        if make:
            make_with_parents(self._path)
        try:
            fd = os.open(self._path, _FOLDER)
        except FileNotFoundError:
            return None
        for name in names:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):  # made by a process that may not have synced it yet
                        os.mkdir(name, dir_fd=fd)
                    fsync_open(fd)
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except FileNotFoundError:
                return None
            finally:
                os.close(fd)
            fd = inner
        return fd

    def _open_unseen(self, names: Sequence[str]) -> int | None:
        """Open a folder as `_open` does, for a client that remembers that it is not there, although another made it.

        That ends when this client tries to make it, which it does if the folder that it is in lists it.
        """
        for depth, name in enumerate(names):
            parent = self._open(names[:depth])
            if parent is None:
                return None
            try:
                _end_caching(parent)
                if name not in os.listdir(parent):
                    return None
                os.mkdir(name, dir_fd=parent)
            except OSError as error:
                if error.errno not in (*_REFUSED, errno.EEXIST):
                    raise
            finally:
                os.close(parent)
        return self._open(names)

    def _folders(self, key: str) -> Iterator[tuple[int, str]]:
        """Yield the folder of a key, made anew each time, and the name there, until the caller has used it."""
        *names, last = key.split("/")
        for _ in range(_ATTEMPTS):
            folder = self._open(names, make=True)
            if folder is not None:
                try:
                    yield folder, last
                finally:
                    os.close(folder)

    @contextlib.contextmanager
    def _incomplete(self, key: str, data: bytes | memoryview) -> Iterator[tuple[int, str]]:
        """Give a folder, and the name of a new file there with this content, which is removed afterwards."""
        self._check(key)
        scratch = self._open([_INCOMPLETE], make=True)
        if scratch is None:
            raise self._busy("write", key)
        temporary = secrets.token_hex(8)
        try:
            try:
                _write(os.open(temporary, _NEW, 0o666, dir_fd=scratch), data)
                yield scratch, temporary
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=scratch)
        finally:
            os.close(scratch)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int | None]:
        """Give the descriptor of the file of a key; None if it does not exist."""
        self._check(key)
        try:
            fd = open_regular(self._path, key)
        except MissingFileError:
            yield None
            return
        except DamagedFileError as damage:
            if is_directory(os.path.join(self._path, key), follow=False):
                yield None
                return
            raise StorageError(f"{self.place(key)} {damage}; remove it") from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _scan(self, prefix: str) -> tuple[list[str], list[About]]:
        """Return the names of the folders in a folder, also of those that are empty, and the objects there. Sorted."""
        names = _parts(prefix.removesuffix("/"))
        if (fd := self._open(names)) is None and (fd := self._open_unseen(names)) is None:
            return [], []
        try:
            _end_caching(fd)
            folders, objects = [], []
            for name in sorted(os.listdir(fd)):
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if name.startswith("."):
                    continue
                if stat.S_ISDIR(status.st_mode):
                    folders.append(name)
                elif stat.S_ISREG(status.st_mode):
                    objects.append(_about(f"{prefix}{name}", status))
            return folders, objects
        finally:
            os.close(fd)

    def _prune(self, names: list[str]) -> None:
        """Remove a folder, and those that it is in, as far as they are empty."""
        attempts = _ATTEMPTS
        while names:
            fd = self._open(names[:-1])
            if fd is None:
                return
            try:
                os.rmdir(names[-1], dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    attempts -= 1
                    if attempts and self._remove_probes(names):
                        continue
                    return
                if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # what it was for is deleted
                    return
                if error.errno != errno.ENOENT:
                    raise
            finally:
                os.close(fd)
            names = names[:-1]

    def _remove_probes(self, names: list[str]) -> bool:
        """Remove what lists have made in a folder and not removed, if nothing else is there; return whether it was so.

        Those of processes that died would keep it. Others are in the middle of a list: what they made may be gone.
        """
        fd = self._open(names)
        if fd is None:
            return False
        try:
            found = os.listdir(fd)
            if not found or not all(_PROBE.fullmatch(name) for name in found):
                return False
            for name in found:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
            return True
        finally:
            os.close(fd)

    def _check(self, key: str) -> None:
        if not is_key(key) or any(part.startswith(".") for part in key.split("/")):
            raise StorageError(f"{key!r} is not a key of {self.url}; the checkpoint or the plan is damaged")

    @contextlib.contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        with storage_errors(action, self.place(key)):
            try:
                yield
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise StorageError(
                    f"cannot {action} {self.place(key)}: a part of the path is a file or a symbolic link, and nothing "
                    "is read, written or deleted through a link; remove it"
                ) from error

    def _busy(self, action: str, key: str) -> StorageError:
        return StorageError(f"cannot {action} {self.place(key)}: its folder is removed again and again; was the root?")


def _parts(prefix: str) -> list[str]:
    if prefix and not is_key(prefix):
        raise StorageError(f"{prefix!r} is not a prefix of keys")
    return prefix.split("/") if prefix else []


def _about(key: str, status: os.stat_result) -> About:
    return About(key, status.st_size, status.st_mtime, f"{status.st_ino:x}-{status.st_mtime_ns:x}")


def _write(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, durably, and close `fd`."""
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view[:_MAXWRITE_BYTES]) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _end_caching(folder: int) -> None:
    """Make a client that answers from its cache for a folder ask the server, if this host may write there."""
    name = f".probe.{secrets.token_hex(8)}.tmp"
    try:
        os.close(os.open(name, _NEW, 0o666, dir_fd=folder))
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (*_REFUSED, errno.ENOENT, errno.ESTALE):
            raise
