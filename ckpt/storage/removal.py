"""Delete the files of a removed step or an abandoned save, with a callback before each, without following links."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from ckpt.storage.files import storage_errors
from ckpt.storage.names import pack_file, part_name

__all__ = ["remove_contents", "remove_share"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_share(path: str, rank: int, before_each: Callable[[], None]) -> None:
    """Delete what one rank has written in the directory `path`: the files of its pack, and its part manifest."""
    number = 0
    while _remove(path, pack_file(rank, number), before_each):
        number += 1
    _remove(path, part_name(rank), before_each)


def _remove(path: str, name: str, before_each: Callable[[], None]) -> bool:
    """Delete a file if every directory on the way is one, not a link; return whether it was there."""
    before_each()
    *parents, last = name.split("/")
    with storage_errors("remove", os.path.join(path, name)):
        opened: list[int] = []
        try:
            opened.append(os.open(path, _DIRECTORY))
            for parent in parents:
                opened.append(os.open(parent, _DIRECTORY, dir_fd=opened[-1]))
            os.unlink(last, dir_fd=opened[-1])
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise
        finally:
            for descriptor in opened:
                os.close(descriptor)
    return True


def remove_contents(path: str, before_each: Callable[[], None], *, keep_files: bool = False) -> None:
    """Delete a directory; with `keep_files` only the directories in it. Other processes may delete it, too."""
    with storage_errors("remove", path):
        try:
            with os.scandir(path) as entries:
                found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except FileNotFoundError:
            return
        for entry, is_directory in found:
            if is_directory:
                remove_contents(entry, before_each)
            elif not keep_files:
                before_each()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry)
        if not keep_files:
            before_each()
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)
