"""Pinned steps: retention keeps them, and no command removes them before they are unpinned.

    <root>/pins/step_00000100    an empty file: this step is pinned

Anybody who may write to the root can pin a step; it need not be owned. A pin belongs to the number: a step of another
branch that is published under the same number later is pinned as well.
"""

from __future__ import annotations

import os

from ckpt.errors import CheckpointNotFoundError
from ckpt.storage import files
from ckpt.storage.directories import fresh_names_below, fsync_directory, make_directories, names_in
from ckpt.storage.names import PUBLISHED_STEP, step_name
from ckpt.storage.step_reader import hold_directory

__all__ = ["pin_step", "pinned_steps", "unpin_step"]

_PINNED = "pins"


def pinned_steps(root: str, *, fresh: bool = False) -> set[int]:
    """Return the numbers of the pinned steps of a root; with `fresh` as its server has them, not a cache of this host.

    StorageError if that cannot be read, or is a symbolic link.
    """
    names = fresh_names_below(root, _PINNED) if fresh else names_in(os.path.join(root, _PINNED))
    return {int(match[1]) for name in names if (match := PUBLISHED_STEP.fullmatch(name))}


def pin_step(root: str, step: int) -> None:
    """Pin a published step, durably. CheckpointNotFoundError if it is not there, or is being removed. Idempotent."""
    path = os.path.join(root, step_name(step))
    directory = os.path.join(root, _PINNED)
    reader = hold_directory(path, root)  # it is not removed meanwhile, as far as leases and locks reach
    try:
        for made in make_directories(root, _PINNED)[:-1]:
            fsync_directory(made)
        files.create_exclusive(os.path.join(directory, step_name(step)), b"")
        try:
            reader.check()
        except CheckpointNotFoundError:
            unpin_step(root, step)
            raise
    finally:
        reader.close()


def unpin_step(root: str, step: int) -> bool:
    """Let a step be removed again; False if it was not pinned."""
    if step not in pinned_steps(root):
        return False
    directory = os.path.join(root, _PINNED)
    files.remove(os.path.join(directory, step_name(step)))
    fsync_directory(directory)
    return True
