"""Boxes of tensors that lie in C order in files, read without mapping the files: memory is what is asked for.

Also: which files may be read at all.
"""

from __future__ import annotations

import math
import os
import stat

import numpy as np

from ckpt.errors import CheckpointCorruptError
from ckpt.planning.boxes import Box

from ..opening import CannotReadError
from .state import Bytes

__all__ = ["file_in", "file_size", "read_box", "read_bytes"]

_MOST_AT_ONCE = 1 << 30  # Linux takes a little less than 2 GiB


def file_in(directory: str, name: str, follow_links: bool) -> str:
    """The path of the regular file `name`, which a document in `directory` names.

    CheckpointCorruptError for a name that leads out of the directory and for a file that is missing; CannotReadError
    for one that is a link out of it, unless those may be followed, and for what is no file.
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
    """The bytes of a regular file. CheckpointCorruptError if it is missing, CannotReadError if it is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise CannotReadError(f"{path} is not a regular file")
    return status.st_size


def read_bytes(path: str, offset: int, count: int) -> bytes:
    """`count` bytes from `offset` of a file. CheckpointCorruptError if it ends before; nothing is allocated then."""
    if offset < 0 or count < 0 or offset + count > file_size(path):
        raise CheckpointCorruptError(f"{path} is truncated: it has no {count} bytes from {offset} on")
    result = bytearray(count)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _fill(fd, path, offset, memoryview(result))
    finally:
        os.close(fd)
    return bytes(result)


def read_box(path: str, offset: int, shape: tuple[int, ...], box: Box, out: Bytes) -> None:
    """Fill `out` with a box of the tensor of `shape` whose first byte is at `offset` of the file.

    CheckpointCorruptError if the file ends before.
    """
    if box.elements == 0:
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _read(fd, path, offset, shape, box, out)
    finally:
        os.close(fd)


def _read(fd: int, path: str, offset: int, shape: tuple[int, ...], box: Box, out: Bytes) -> None:
    row_bytes = math.prod(shape[1:]) * out.shape[-1]
    if _is_run(box.shape, shape):
        strides = [math.prod(shape[dim + 1 :]) * out.shape[-1] for dim in range(len(shape))]
        start = offset + sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
        target = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        _fill(fd, path, start, target.data.cast("B"))
        if target is not out:
            out[...] = target
        return
    rest = Box(box.offset[1:], box.shape[1:])
    for row in range(box.shape[0]):
        _read(fd, path, offset + (box.offset[0] + row) * row_bytes, shape[1:], rest, out[row])


def _is_run(box: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box of a tensor is one run of memory: behind its first dimension of several elements it has all."""
    several = next((dim for dim, size in enumerate(box) if size > 1), len(box))
    return box[several + 1 :] == shape[several + 1 :]


def _fill(fd: int, path: str, offset: int, target: memoryview) -> None:
    while target:
        count = os.preadv(fd, [target[:_MOST_AT_ONCE]], offset)
        if count == 0:
            raise CheckpointCorruptError(f"{path} is truncated: it ends before byte {offset + len(target)}")
        target = target[count:]
        offset += count
