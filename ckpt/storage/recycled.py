"""Recycle the files of a removed step: the next save overwrites them.

Making files and allocating their blocks takes a file system longer than overwriting existing ones. Saves of one plan
have the same files, so each rank of the next save can take those that it wrote in a removed step, and make none:

    step_00000100/              published
    .retired/step_00000100-..   removed for all readers; the files that identify the step are being deleted
    .retired/<plan>/            only data and parts, for the next save of this plan
    .pending/<save>/            a save like any other: it can be published when it has an intent and all of its parts

Each transition is one atomic rename: of the directory by the coordinator, of a file by the rank that takes it. So a
process that deletes recycled files cannot interfere with a save that takes them, and of two saves only one has a file.
A crash leaves one of these states; a later save takes the files or deletes them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable

from ckpt.errors import StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import Rename
from ckpt.storage.directory_root import DirectoryRoot
from ckpt.storage.files import storage_errors
from ckpt.storage.interface import Pending
from ckpt.storage.links import refuse_link
from ckpt.storage.step_documents import intent_of_step
from ckpt.storage.step_moves import StepMoves

__all__ = ["discard_recycled", "recycle_step", "recycled_path", "take_recycled"]


def recycled_path(root: DirectoryRoot) -> str:
    """Return the directory of recycled steps. StorageError if it is a symbolic link."""
    return refuse_link(os.path.join(root.path, ".retired"))


def recycle_step(root: DirectoryRoot, moves: StepMoves, step: int, plan: str, token: int | None = None) -> bool:
    """Remove a published step and keep its files for a save with the digest `plan`; False if the step is being read.

    They are to be deleted instead if others are kept already, or if the step has another plan or links for directories.
    `token` is the owner's; FencedError if the step was saved by a later owner. For the coordinator. Deletes only what
    identifies the step.
    """
    ready = os.path.join(recycled_path(root), plan)
    if files.exists(ready) or (intent_of_step(root.step_path(step)) or {}).get("plan") != plan:
        return moves.away(step, root.abandoned_path, token) is not None
    for made in directories.make_directories(root.path, ".retired"):
        directories.fsync_directory(made)
    moved = moves.away(step, recycled_path(root), token)
    if moved is None:
        return False
    if _is_plain(moved):
        _remove_identity(moved)
        if directories.rename_directory(moved, ready) is Rename.DONE:
            return True
    _discard(root, moved)
    return True


def take_recycled(pending: Pending, root: DirectoryRoot, plan: str, names: Iterable[str]) -> None:
    """Give the recycled files with these names to a save, by a rank that is about to write them. Others are made new.

    Never a link, nor a file with a second name: what is linked elsewhere must not change; nor one that cannot be moved.
    """
    source = os.path.join(recycled_path(root), plan)
    if not files.is_directory(source):
        return
    made: set[str] = set()
    for name in names:
        made.update(directories.make_directories(pending.path, os.path.dirname(name), made))
        with contextlib.suppress(StorageError):
            files.take(source, name, pending.path)


def discard_recycled(root: DirectoryRoot, keep: str | None = None) -> list[str]:
    """Let no save take recycled files any more, but those of the plan `keep`, and return the directories to delete.

    One that cannot be renamed stays where it is, and is tried again with the next save.
    """
    folder, moved = recycled_path(root), []
    for name in _names(folder):
        if name != keep:
            with contextlib.suppress(StorageError):
                moved.append(_discard(root, os.path.join(folder, name)))
    return [path for path in moved if path is not None]


def _discard(root: DirectoryRoot, path: str) -> str | None:
    """Give a directory a name that no save takes, and return it; None if it is not there any more."""
    target = os.path.join(root.abandoned_path, f"{os.path.basename(path)}-retired-{secrets.token_hex(4)}")
    return target if directories.rename_directory(path, target) is Rename.DONE else None


def _names(path: str) -> list[str]:
    with storage_errors("list", path):
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []


def _is_plain(path: str) -> bool:
    """Return whether all directories in a tree are directories, and not links."""
    if os.path.islink(path):
        return False
    with storage_errors("look at", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not _is_plain(entry.path):
                    return False
            elif entry.is_dir():
                return False
    return True


def _remove_identity(path: str) -> None:
    """Delete the documents that identify a step, durably."""
    for name in _names(path):
        entry = os.path.join(path, name)
        if not files.is_directory(entry):
            files.remove(entry)
    directories.fsync_directory(path)
