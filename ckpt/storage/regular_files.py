"""Open and read files of a published step: regular files below its directory, and nothing else.

A step may come from an untrusted source. A link could lead out of it, and opening a pipe could block indefinitely.
"""

from __future__ import annotations

import errno
import os
import stat

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.files import storage_errors, under

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class DamagedFileError(Exception):
    """A file is damaged. The message is the end of a sentence that begins with its path."""


class MissingFileError(DamagedFileError):
    """The file does not exist."""


def open_regular(step: str, name: str) -> int:
    """Open the regular file `name` below the directory `step` for reading, and return its descriptor. Never waits.

    DamagedFileError if it is no regular file, or there is a symbolic link on the way; MissingFileError if it does not
    exist; StorageError if `name` leads out of the step; OSError if it cannot be opened.
    """
    under(step, name)
    *folders, last = name.split("/")
    fd = _open(step, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, None)
    try:
        for folder in folders:
            inner = _open(folder, _DIRECTORY, fd)
            os.close(fd)
            fd = inner
        file = _open(last, _FILE, fd)
    finally:
        os.close(fd)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DamagedFileError("is not a regular file")
    except BaseException:
        os.close(file)
        raise
    return file


def read_regular(step: str, name: str, max_bytes: int) -> bytes:
    """Return the content of the file `name` below the directory `step`; raises as `open_regular`.

    DamagedFileError also if it has more than `max_bytes`; nothing is read then.
    """
    with open(open_regular(step, name), "rb", buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise DamagedFileError("is larger than any document of a checkpoint")
        return stream.read()


def read_document_at(path: str, max_bytes: int) -> bytes | None:
    """Return the content of the file at `path`; None if it does not exist.

    CheckpointCorruptError if it is no regular file or larger than `max_bytes`; StorageError if it cannot be read.
    """
    directory, name = os.path.split(path)
    with storage_errors("read", path):
        try:
            return read_regular(directory, name, max_bytes)
        except MissingFileError:
            return None
        except DamagedFileError as damage:
            raise CheckpointCorruptError(f"{path} {damage}; restore from another step or copy") from None


def _open(name: str, flags: int, folder: int | None) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except (UnicodeEncodeError, FileNotFoundError):
        raise MissingFileError("is missing") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise MissingFileError("is missing") from None
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise DamagedFileError("is not a regular file") from None
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        if folder is not None and _is_link(name, folder):
            raise DamagedFileError("is a symbolic link, or below one; no file of a checkpoint is one") from None
        raise MissingFileError("is missing") from None


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
