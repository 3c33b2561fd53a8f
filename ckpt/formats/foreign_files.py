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
from types import MappingProxyType, TracebackType
from typing import BinaryIO, Literal, Self

import numpy as np

from ckpt.errors import CheckpointCorruptError, ConversionError, StorageError
from ckpt.formats.lazy_state import Bytes
from ckpt.planning.boxes import Box
from ckpt.storage.directories import Rename, fsync_directory, remove_tree, rename_directory
from ckpt.storage.files import rename_no_replace, storage_errors, sync_files
from inprocess.ipc.process import Process

_POINTER = b"version https://git-lfs"
_FOREIGN = MappingProxyType(
    {
        _POINTER: "a git-lfs pointer, not the file itself; fetch the file with `git lfs pull`",
        b"<!doctype html": "an HTML page, perhaps the answer of a download that failed; download the file again",
        b"<html": "an HTML page, perhaps the answer of a download that failed; download the file again",
        b"\x1f\x8b": "compressed with gzip; unpack it first",
        b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it first",
        b"\x89hdf\r\n": "an HDF5 file, which is not supported",
        b"gguf": "a GGUF file, which is not supported",
        b"\x93numpy": "a numpy file, which is not supported",
    }
)
"""Files that take the place of a checkpoint, by their first bytes in lower case."""

_LONGEST_START = max(map(len, _FOREIGN))
_MOST_AT_ONCE = 1 << 30  # Linux reads a little less than 2 GiB at once


def file_in(directory: str, name: str, follow_links: bool) -> str:
    """Return the path of the regular file `name` that a document in `directory` names.

    CheckpointCorruptError for a name that leads out of the directory and for a missing file. ConversionError for a link
    out of it, unless such links may be followed, for a git-lfs pointer, and for anything but a regular file.
    """
    where = os.path.join(directory, name)
    parts = name.split("/")
    if not name or "\0" in name or os.path.isabs(name) or any(part in ("", ".", "..") for part in parts):
        raise CheckpointCorruptError(f"{directory} names the file {name!r}, which is not inside it")
    check_link(where, directory, follow_links)
    if read_bytes(where, 0, min(len(_POINTER), file_size(where))) == _POINTER:
        raise ConversionError(f"{where} is {_FOREIGN[_POINTER]}")
    return where


def check_link(path: str, directory: str, follow_links: bool) -> None:
    """ConversionError for a path that leads out of the directory, unless such links may be followed."""
    real, top = os.path.realpath(path), os.path.realpath(directory)
    if not follow_links and os.path.commonpath([real, top]) != top:
        raise ConversionError(f"{path} is a link to {real}, out of the directory; --follow-links reads it anyway")


def file_size(path: str) -> int:
    """Return the bytes of a regular file. CheckpointCorruptError if it is missing, ConversionError if not regular."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConversionError(f"{path} is not a regular file")
    return status.st_size


def foreign_file(path: str) -> str | None:
    """Return the kind of a regular file by its first bytes, with a remedy; None for formats that are read here.

    The text is the end of a sentence that begins with the path and "is". Raises as `file_size`.
    """
    start = read_bytes(path, 0, min(_LONGEST_START, file_size(path)))
    return next((what for begin, what in _FOREIGN.items() if start.lower().startswith(begin)), None)


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
    """StorageError if `target` is inside the directory `source`, which is only read, or has no parent directory."""
    try:
        inner, outer = os.path.realpath(target), os.path.realpath(source)
    except ValueError as error:
        raise StorageError(f"{target!r}: {error}") from None
    if os.path.isdir(outer) and os.path.commonpath([inner, outer]) == outer:
        raise StorageError(f"{target} is inside {source}; give a directory outside of it")
    parent = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(parent):
        raise StorageError(f"{parent}: there is no such directory to create {os.path.basename(target)} in")


def check_new(path: str, what: Literal["directory", "file"]) -> None:
    """StorageError if there is something at `path` already, unless it is an empty directory and one is wanted."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise StorageError(f"{path} exists already and is not a directory; give another name")
    if not os.path.isdir(path):
        return
    if what == "file":
        raise StorageError(f"{path} is a directory; give the name of a new file")
    remove_left(path)
    with storage_errors("list", path):
        if os.listdir(path):
            raise StorageError(f"{path} is not empty; give a new or an empty directory")


class NewDirectory:
    """A directory, new or empty, whose files appear together. A context manager: an error removes what was written.

    A new directory is written under a hidden name beside its own, and renamed when it is durable. In an empty one each
    file has a hidden name until all are durable; the file that others look for first is renamed last. What a killed
    process leaves has only hidden names, and the next export to the same place on that host removes it.
    """

    def __init__(self, path: str) -> None:
        """StorageError if there is something at `path` that must not be touched, or it cannot be created."""
        self.path = path
        self._files: list[tuple[str, str]] = []
        check_new(path, "directory")
        self._is_new = not os.path.isdir(path)
        self._folder = path
        if self._is_new:
            self._folder = hidden_name(_parent(path))
            with storage_errors("make directory", path):
                os.mkdir(self._folder)

    def create(self, name: str) -> BinaryIO:
        """Create a file that will be called `name`. The file that is created last appears last."""
        path = os.path.join(self._folder, name) if self._is_new else hidden_name(self._folder)
        with storage_errors("write", os.path.join(self.path, name)):
            stream = open(path, "xb")  # noqa: SIM115
        self._files.append((path, name))
        return stream

    def commit(self) -> None:
        """Make all files durable, then let them appear. All of them must be closed. StorageError."""
        sync_files([path for path, _ in self._files], [self._folder])
        if self._is_new:
            if rename_directory(self._folder, os.path.abspath(self.path)) is not Rename.DONE:
                raise StorageError(f"{self.path} was created by another process meanwhile; give another name")
            return
        for path, name in self._files:
            with storage_errors("rename", path):
                os.rename(path, os.path.join(self._folder, name))
        fsync_directory(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
                return
        except BaseException:
            self._discard()
            raise
        self._discard()

    def _discard(self) -> None:
        for path in [self._folder] if self._is_new else [path for path, _ in self._files]:
            discard(path)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Give a new file that appears at `path` when the block ends, durable and whole. An error removes it.

    StorageError if there is something at `path`.
    """
    check_new(path, "file")
    folder = _parent(path)
    hidden = hidden_name(folder)
    try:
        with storage_errors("write", path):
            with open(hidden, "xb") as stream:
                yield stream
            sync_files([hidden], [])
            rename_no_replace(hidden, path)
        fsync_directory(folder)
    except BaseException:
        discard(hidden)
        raise


def _parent(path: str) -> str:
    """Return the directory that will hold `path`, without what killed exports have left in it."""
    parent = os.path.dirname(os.path.abspath(path))
    remove_left(parent)
    return parent


_HIDDEN = ".export-"


def hidden_name(folder: str) -> str:
    """Return a new name in `folder` that says which process makes it."""
    own = Process.here()
    return os.path.join(folder, f"{_HIDDEN}{own.host}-{own.pid}-{own.start}-{secrets.token_hex(8)}")


def remove_left(folder: str) -> None:
    """Remove what processes of this host that have ended left under hidden names in `folder`, if that is possible."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            parts = name.removeprefix(_HIDDEN).rsplit("-", 3)
            if not name.startswith(_HIDDEN) or len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
                continue
            if Process(parts[0], int(parts[1]), int(parts[2])).alive is False:
                discard(os.path.join(folder, name))


def discard(path: str) -> None:
    """Remove a file or a directory, if there is one and that is possible."""
    with contextlib.suppress(StorageError, OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            remove_tree(path)
        else:
            os.unlink(path)
