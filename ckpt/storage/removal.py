"""Delete the files of a removed step or an abandoned save, with a callback before each, without following links."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from ckpt.storage.files import storage_errors
from ckpt.storage.links import is_link_error, parent_of
from ckpt.storage.names import pack_file, part_name

__all__ = ["remove_contents", "remove_share"]


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
