"""Saves of a root that are not published: what is known of them. Used by `ls` and `clean`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.storage.commit import Abandoned, PendingSave
from ckpt.storage.names import SaveId
from ckpt.storage.ownership import OwnerState
from ckpt.storage.root import CheckpointRoot

from .output import duration, plural

__all__ = ["UndecidedSave", "abandoned_saves", "pending_saves", "tree_bytes"]


@dataclass(frozen=True)
class UndecidedSave:
    """A pending or abandoned save. `age_s` is the time since anything in it changed; `in_use`: a writer of
    its job is alive; `complete`: the parts of all ranks are there."""

    id: SaveId
    path: str
    state: str
    age_s: float
    bytes: int
    world_size: int | None
    in_use: bool
    complete: bool
    note: str


def pending_saves(root: CheckpointRoot) -> list[UndecidedSave]:
    """The saves that are not decided, oldest step first."""
    return [save for id_ in root.pending() if (save := _pending(root, id_)) is not None]


def abandoned_saves(root: CheckpointRoot) -> list[UndecidedSave]:
    """The saves that were given up, oldest step first."""
    return [save for id_ in root.abandoned() if (save := _abandoned(root, id_)) is not None]


def tree_bytes(path: str) -> tuple[int, float]:
    """The bytes of all files below `path`, links not followed, and when the newest of all names was changed."""
    total, newest, stack = 0, os.lstat(path).st_mtime, [path]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    newest = max(newest, status.st_mtime)
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        total += status.st_size
        except OSError:
            continue  # somebody is just removing it
    return total, newest


def _pending(root: CheckpointRoot, id_: SaveId) -> UndecidedSave | None:
    pending = PendingSave(root, id_)
    try:
        total, newest = tree_bytes(pending.path)
        in_use = root.ownership.state(id_.owner) is not OwnerState.GONE
    except (OSError, CheckpointError):
        return None  # decided meanwhile
    intent: dict[str, Any] | None = None
    try:
        intent = pending.intent()
        note = "has no intent" if intent is None else ""
    except CheckpointError:
        note = "its intent is damaged"
    complete, world_size = False, None
    if intent is not None:
        world_size = int(intent["world_size"])
        missing = sorted(set(range(world_size)) - pending.parts_present())
        complete = not missing
        note = "all parts are there" if complete else f"{plural(len(missing), 'part')} missing: ranks {_some(missing)}"
    age_s = max(0.0, time.time() - newest)
    note += ", being written" if in_use else f", unchanged for {duration(age_s)}"
    return UndecidedSave(id_, pending.path, "pending", age_s, total, world_size, in_use, complete, note)


def _abandoned(root: CheckpointRoot, id_: SaveId) -> UndecidedSave | None:
    path = os.path.join(root.abandoned_path, id_.name)
    try:
        total, newest = tree_bytes(path)
        outcome = PendingSave(root, id_).outcome()
    except (OSError, CheckpointError) as error:
        return UndecidedSave(id_, path, "abandoned", 0.0, 0, None, False, False, str(error))
    note = ""
    if isinstance(outcome, Abandoned):
        where = "" if outcome.reason.rank is None else f"rank {outcome.reason.rank}: "
        note = f"{where}{outcome.reason.kind}: {outcome.reason.message}"
    return UndecidedSave(id_, path, "abandoned", max(0.0, time.time() - newest), total, None, False, False, note)


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
