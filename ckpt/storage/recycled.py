"""The files of a step that retention removes, kept for the next save to write over.

To make files and give them blocks takes a file system longer than to fill those that are there. Saves of one plan have
the same files, so that the next one can take the directory of a removed step and make none:

    step_00000100/              published
    .retired/step_00000100-..   gone for all readers; what says which step it was is being removed
    .retired/<plan>/            nothing but arrays, for whatever save of this plan comes next
    .pending/<save>/            one like any other: it can be published when it has an intent and all of its parts

Each name is taken by one atomic rename, so whoever removes what is retired cannot meet a save that takes it. A crash
leaves one of these; the next save takes it or removes it. Run by the coordinator.
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

__all__ = ["discard_retired", "retire_step", "retired_path", "take_retired"]


def retired_path(root: CheckpointRoot) -> str:
    """The directory of what is retired."""
    return os.path.join(root.path, ".retired")


def retire_step(root: CheckpointRoot, step: int, plan: str, token: int | None = None) -> bool:
    """Remove a published step, and keep its files if a save with the digest `plan` can write over them; False if it is
    being read.

    They are not kept if there are some already, or if the step has another plan, links, or files with a second name:
    what is linked elsewhere must not change. `token` is that of the owner; FencedError if the step is of a
    later one.
    """
    ready = os.path.join(retired_path(root), plan)
    if os.path.lexists(ready) or (intent_of_step(root.step_path(step)) or {}).get("plan") != plan:
        return root.remove_step(step, token)
    for made in directories.make_directories(root.path, ".retired"):
        directories.fsync_directory(made)
    unready = root.take_step(step, retired_path(root), token)
    if unready is None:
        return False
    if _is_plain(unready):
        _forget_step(unready)
        if directories.rename_directory(unready, ready) is Rename.DONE:
            return True
    _discard(root, unready)
    return True


def take_retired(pending: PendingSave, plan: str) -> bool:
    """Make the files of a removed step those of a save that is about to begin; False if there are none for it.

    What is kept for other plans is removed: the state has changed.
    """
    pending.root.make()
    taken = directories.rename_directory(os.path.join(retired_path(pending.root), plan), pending.path) is Rename.DONE
    discard_retired(pending.root)
    return taken


def discard_retired(root: CheckpointRoot) -> None:
    """Free the space of all that is retired."""
    for name in _names(retired_path(root)):
        _discard(root, os.path.join(retired_path(root), name))


def _discard(root: CheckpointRoot, path: str) -> None:
    """Only what has a name that no save takes is removed."""
    if root.give_back(path):
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
    """Whether there are only directories and files, each with one name."""
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


def _forget_step(path: str) -> None:
    """Remove all that says which step it was, durably: the documents of the step, and the parts of its ranks."""
    for name in _names(path):
        entry = os.path.join(path, name)
        if name == "parts":
            directories.remove_tree(entry)
        elif not os.path.isdir(entry):
            files.remove(entry)
    directories.fsync_directory(path)
