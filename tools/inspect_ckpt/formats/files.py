"""Files of other formats: boxes of tensors read from them, and new ones that appear together or not at all.

Files are read, not mapped: memory is what a read asks for, and a file that gets shorter meanwhile is an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.planning.boxes import Box
from ckpt.storage.files import fsync_directory, storage_errors, sync_files

from ..output import CannotReadError
from .state import Bytes

__all__ = ["NewDirectory", "check_outside", "file_in", "file_size", "read_box", "read_bytes"]

_MOST_AT_ONCE = 1 << 30  # Linux reads a little less than 2 GiB at once


def file_in(directory: str, name: str, follow_links: bool) -> str:
    """Return the path of the regular file `name` that a document in `directory` names.

    CheckpointCorruptError for a name that leads out of the directory and for a missing file. CannotReadError for a link
    out of it, unless such links may be followed, and for anything but a regular file.
    """
    where = os.path.join(directory, name)
    parts = name.split("/")
    if not name or "\0" in name or os.path.isabs(name) or any(part in ("", ".", "..") for part in parts):
        raise CheckpointCorruptError(f"{directory} names the file {name!r}, which is not inside it")
    real = os.path.realpath(where)
    if not follow_links and os.path.commonpath([real, os.path.realpath(directory)]) != os.path.realpath(directory):
        raise CannotReadError(f"{where} is a link to {real}, out of the directory; --follow-links reads it anyway")
    file_size(where)
    return where


def file_size(path: str) -> int:
    """Return the bytes of a regular file. CheckpointCorruptError if it is missing, CannotReadError if not regular."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise CannotReadError(f"{path} is not a regular file")
    return status.st_size


def read_bytes(path: str, offset: int, count: int) -> bytes:
    """Read `count` bytes from `offset` of a file.

    CheckpointCorruptError, before any memory is allocated, if the file is shorter.
    """
    if offset < 0 or count < 0 or offset + count > file_size(path):
        raise CheckpointCorruptError(f"{path} is truncated: it does not have {count} bytes at offset {offset}")
    result = bytearray(count)
    with _opened(path) as fd:
        _fill(fd, path, offset, memoryview(result))
    return bytes(result)


def read_box(path: str, offset: int, shape: tuple[int, ...], box: Box, out: Bytes) -> None:
    """Fill `out` with a box of the tensor of `shape` whose elements lie in C order from `offset` of the file.

    CheckpointCorruptError if the file is shorter.
    """
    if box.elements == 0:
        return
    with _opened(path) as fd:
        _read_box(fd, path, offset, shape, box, out)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_box(fd: int, path: str, offset: int, shape: tuple[int, ...], box: Box, out: Bytes) -> None:
    row_bytes = math.prod(shape[1:]) * out.shape[-1]
    if _is_contiguous(box.shape, shape):
        strides = [math.prod(shape[dim + 1 :]) * out.shape[-1] for dim in range(len(shape))]
        start = offset + sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
        target = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        _fill(fd, path, start, target.data.cast("B"))
        if target is not out:
            out[...] = target
        return
    rest = Box(box.offset[1:], box.shape[1:])
    for row in range(box.shape[0]):
        _read_box(fd, path, offset + (box.offset[0] + row) * row_bytes, shape[1:], rest, out[row])


def _is_contiguous(box: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box is one range of bytes of the tensor: after its first dimension of several elements it has all."""
    several = next((dim for dim, size in enumerate(box) if size > 1), len(box))
    return box[several + 1 :] == shape[several + 1 :]


def _fill(fd: int, path: str, offset: int, target: memoryview) -> None:
    while target:
        count = os.preadv(fd, [target[:_MOST_AT_ONCE]], offset)
        if count == 0:
            raise CheckpointCorruptError(f"{path} is truncated: it ends before byte {offset + len(target)}")
        target = target[count:]
        offset += count


# -- writing -----------------------------------------------------------------------------------------------------------


def check_outside(target: str, source: str) -> None:
    """CannotReadError if `target` is inside the directory `source`, which is only read, or has no parent directory."""
    try:
        inner, outer = os.path.realpath(target), os.path.realpath(source)
    except ValueError as error:
        raise CannotReadError(f"{target!r}: {error}") from None
    if os.path.isdir(outer) and os.path.commonpath([inner, outer]) == outer:
        raise CannotReadError(f"{target} is inside {source}; give a directory outside of it")
    parent = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(parent):
        raise CannotReadError(f"{parent}: there is no such directory to create {os.path.basename(target)} in")


class NewDirectory:
    """A directory, new or empty, whose files appear together. A context manager: an error removes what was written.

    Each file is written under a temporary name. At the end all are made durable and then renamed; the file that others
    look for first is renamed last. A crash before that leaves files with names that no program reads.
    """

    def __init__(self, path: str) -> None:
        """CannotReadError if there is something at `path` that must not be touched. StorageError."""
        self.path = path
        self._created = False
        self._files: list[tuple[str, str]] = []
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CannotReadError(f"{path} exists already and is not a directory")
        if os.path.isdir(path) and os.listdir(path):
            raise CannotReadError(f"{path} is not empty; give a new or an empty directory")
        if not os.path.isdir(path):
            with storage_errors("make directory", path):
                os.mkdir(path)
            self._created = True

    def create(self, name: str) -> BinaryIO:
        """Create a file that will be called `name`. The file that is created last is renamed last."""
        temporary = os.path.join(self.path, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
        with storage_errors("write", temporary):
            stream = open(temporary, "xb")  # noqa: SIM115
        self._files.append((temporary, name))
        return stream

    def commit(self) -> None:
        """Make all files durable, then rename them. All of them must be closed. StorageError."""
        sync_files([path for path, _ in self._files], [self.path])
        for path, name in self._files:
            with storage_errors("rename", path):
                os.rename(path, os.path.join(self.path, name))
        self._files.clear()
        fsync_directory(self.path)
        fsync_directory(os.path.dirname(os.path.abspath(self.path)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
            return
        for path, _ in self._files:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if self._created:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
