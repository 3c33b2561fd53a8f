"""Recycle the files of a removed step: the next save overwrites them.

Making files and allocating their blocks takes a file system longer than overwriting existing ones. Saves of one plan
have the same files, so the next save can take the directory of a removed step and make none:

    step_00000100/              published
    .retired/step_00000100-..   removed for all readers; the files that identify the step are being deleted
    .retired/<plan>/            only arrays, for the next save of this plan
    .pending/<save>/            a save like any other: it can be published when it has an intent and all of its parts

Each transition is one atomic rename, so a process that deletes recycled files cannot interfere with a save that takes
them. A crash leaves one of these states; the next save takes the directory or deletes it. Run by the coordinator.
"""

from __future__ import annotations

import os
import secrets
import stat

from ckpt.storage import directories, files
from ckpt.storage.commit import PendingSave
from ckpt.storage.directories import Rename
from ckpt.storage.files import storage_errors
from ckpt.storage.root import CheckpointRoot, intent_of_step

__all__ = ["discard_recycled", "recycle_step", "recycled_path", "take_recycled"]


def recycled_path(root: CheckpointRoot) -> str:
    """Return the directory of recycled steps."""
    return os.path.join(root.path, ".retired")


def recycle_step(root: CheckpointRoot, step: int, plan: str, token: int | None = None) -> bool:
    """Remove a published step and keep its files for a save with the digest `plan`; False if the step is being read.

    The files are not kept if others are kept already, or if the step has another plan, links, or files with a second
    name: a file that is linked elsewhere must not change. `token` is the owner's; FencedError if the step was saved by
    a later owner.
    """
    ready = os.path.join(recycled_path(root), plan)
    if os.path.lexists(ready) or (intent_of_step(root.step_path(step)) or {}).get("plan") != plan:
        return root.remove_step(step, token)
    for made in directories.make_directories(root.path, ".retired"):
        directories.fsync_directory(made)
    moved = root.move_step(step, recycled_path(root), token)
    if moved is None:
        return False
    if _is_plain(moved):
        _remove_identity(moved)
        if directories.rename_directory(moved, ready) is Rename.DONE:
            return True
    _discard(root, moved)
    return True


def take_recycled(pending: PendingSave, plan: str) -> bool:
    """Give the recycled files to a save that is about to begin; False if there are none for this plan.

    Files of other plans are deleted: the state has changed.
    """
    pending.root.make()
    taken = directories.rename_directory(os.path.join(recycled_path(pending.root), plan), pending.path) is Rename.DONE
    discard_recycled(pending.root)
    return taken


def discard_recycled(root: CheckpointRoot) -> None:
    """Delete all recycled files."""
    for name in _names(recycled_path(root)):
        _discard(root, os.path.join(recycled_path(root), name))


def _discard(root: CheckpointRoot, path: str) -> None:
    """Delete a directory, under a name that no save takes."""
    if root.undo_move(path):
        return
    target = os.path.join(root.abandoned_path, f"{os.path.basename(path)}-retired-{secrets.token_hex(4)}")
    if directories.rename_directory(path, target) is Rename.DONE:
        directories.remove_tree(target)


def _names(path: str) -> list[str]:
    with storage_errors("list", path):
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []


def _is_plain(path: str) -> bool:
    """Return whether a tree has only directories and files with one name each."""
    with storage_errors("look at", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not _is_plain(entry.path):
                    return False
            else:
                about = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                    return False
    return True


def _remove_identity(path: str) -> None:
    """Delete what identifies a step, durably: its documents and the parts of its ranks."""
    for name in _names(path):
        entry = os.path.join(path, name)
        if name == "parts":
            directories.remove_tree(entry)
        elif not os.path.isdir(entry):
            files.remove(entry)
    directories.fsync_directory(path)
