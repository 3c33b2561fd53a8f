"""Refuse symbolic links below a root.

A root may come from elsewhere: a link in it could lead anywhere. The root itself may be a link, and so may a published
step, which people move to an archive: both are read through it. Nothing is written, renamed or removed through a link
below the root: where a step or a save is to be removed, the link in its place is removed instead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import StorageError

SERVICE_DIRECTORIES = (
    ".owner",
    ".pending",
    ".abandoned",
    ".retired",
    ".readers",
    "pins",
    ".superseded",
    ".damaged",
)
"""The directories of a root beside its steps."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def refuse_link(path: str) -> str:
    """Return `path`; StorageError if it is a symbolic link."""
    if os.path.islink(path):
        raise StorageError(
            f"{path} is a symbolic link: nothing is read, written or removed through it, because it may lead out of "
            "the checkpoint root. Remove the link, or put the directory that it names in its place"
        )
    return path


def refuse_links(root: str) -> None:
    """Raise StorageError if a service directory of a root is a symbolic link."""
    for name in SERVICE_DIRECTORIES:
        refuse_link(os.path.join(root, name))


def is_link_error(error: OSError) -> bool:
    """Return whether `open_directory` may have failed because of a link, or of what is no directory."""
    return error.errno in (errno.ELOOP, errno.ENOTDIR)


def open_directory(path: str, *names: str) -> int:
    """Open the directory `path`, or the one that `names` lead to from there, and return its descriptor.

    OSError also if one of them is a symbolic link.
    """
    fd = os.open(path, _DIRECTORY)
    for name in names:
        try:
            inner = os.open(name, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


@contextmanager
def parent_of(path: str, name: str) -> Iterator[tuple[int, str]]:
    """Give the descriptor of the directory of the file `name` below the directory `path`, and its name there.

    OSError if it does not exist, or if one of the directories is a symbolic link.
    """
    *folders, last = name.split("/")
    fd = open_directory(path, *folders)
    try:
        yield fd, last
    finally:
        os.close(fd)
