"""A checkpoint root: its published steps, its other saves and steps, and the ownership that changing it needs.

A save that is not published is pending or abandoned. A step that is not published any more was superseded by another
branch, or found damaged; such steps are kept in directories of their own.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.formats.detection import DESCRIPTIONS, kind_of
from ckpt.storage.commit import Abandoned, PendingSave
from ckpt.storage.names import SaveId
from ckpt.storage.ownership import OwnerState
from ckpt.storage.root import CheckpointRoot, intent_of_step
from ckpt.storage.roots import is_object_url

from .output import CannotReadError, Output, duration, plural

__all__ = [
    "MovedStep",
    "UnpublishedSave",
    "abandoned_saves",
    "branch_of",
    "check_directory",
    "check_root",
    "confirmed",
    "find_moved_step",
    "looks_like_step",
    "moved_steps",
    "owned",
    "pending_saves",
    "root_of",
    "steps_of",
    "tree_bytes",
    "why_abandoned",
]

_STEP_NAME = re.compile(r"step_(\d{8,18})(?:-.*)?")


def root_of(path: str) -> CheckpointRoot:
    """Return the checkpoint root at `path`. CannotReadError if it is not one, with a hint if it is a step."""
    check_directory(path)
    if os.path.lexists(os.path.join(path, "zarr.json")) or looks_like_step(path):
        raise CannotReadError(f"{path} is a step, not a checkpoint root; give {os.path.dirname(os.path.abspath(path))}")
    check_root(path)
    return CheckpointRoot(path)


def steps_of(path: str) -> list[int]:
    """Return the published steps of a root, ascending. Steps that are symbolic links are left out."""
    root = CheckpointRoot(path)
    return [step for step in root.steps() if _is_own_directory(root.step_path(step))]


def check_directory(path: str) -> None:
    """CannotReadError if `path` is not a directory that can be listed."""
    if is_object_url(path):
        raise CannotReadError(f"{path}: this command takes directories only; ls, show and validate take URLs, too")
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CannotReadError(f"{path}: there is no such directory") from None
    except (OSError, ValueError) as error:
        raise CannotReadError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISDIR(status.st_mode):
        _refuse_other_format(path)
        raise CannotReadError(f"{path} is a file; give the directory of a step, or a checkpoint root")
    try:
        os.listdir(path)
    except OSError as error:
        raise CannotReadError(f"{path} cannot be listed: {error.strerror}") from None


def check_root(path: str) -> None:
    """CannotReadError if there is neither a step nor a save in the directory `path`."""
    root = CheckpointRoot(path)
    if root.steps() or os.path.isdir(root.pending_path) or os.path.isdir(root.abandoned_path):
        return
    if not os.listdir(path):
        raise CannotReadError(f"{path} is empty: there is no checkpoint")
    _refuse_other_format(path)
    raise CannotReadError(f"{path} is not a checkpoint and contains none")


def _refuse_other_format(path: str) -> None:
    """CannotReadError, with what to write instead, if there is a checkpoint of another format at `path`."""
    try:
        kind = kind_of(path)
    except OSError:
        return
    if kind is not None:
        raise CannotReadError(
            f"{path} is {DESCRIPTIONS[kind]}, not a checkpoint of ckpt; to make a step of it: "
            f"inspect_ckpt convert {shlex.quote(path)} ROOT --step N"
        )


def looks_like_step(path: str) -> bool:
    """Whether the name or the files of a directory are those of a step."""
    if re.fullmatch(r"step_\d{8,18}", os.path.basename(os.path.abspath(path))):
        return True
    return any(os.path.lexists(os.path.join(path, name)) for name in ("intent.json", "state.json", "parts"))


def tree_bytes(path: str) -> tuple[int, float]:
    """Return the bytes of all files below `path`, and the newest modification time; links are not followed."""
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
            continue  # removed meanwhile
    return total, newest


def _is_own_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


# -- saves that are not published --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnpublishedSave:
    """A pending or abandoned save.

    `age_s` is the time since anything in it changed; `in_use`: a writer of its job is alive; `complete`: the parts of
    all ranks are there.
    """

    id: SaveId
    path: str
    state: str
    age_s: float
    bytes: int
    world_size: int | None
    in_use: bool
    complete: bool
    note: str


def pending_saves(root: CheckpointRoot) -> list[UnpublishedSave]:
    """Return the saves that are neither published nor abandoned, oldest step first."""
    return [save for id_ in root.pending() if (save := _pending(root, id_)) is not None]


def abandoned_saves(root: CheckpointRoot) -> list[UnpublishedSave]:
    """Return the saves that can never be published, oldest step first."""
    return [save for id_ in root.abandoned() if (save := _abandoned(root, id_)) is not None]


def _pending(root: CheckpointRoot, id_: SaveId) -> UnpublishedSave | None:
    pending = PendingSave(root, id_)
    try:
        total, newest = tree_bytes(pending.path)
        in_use = root.ownership.state(id_.owner) is not OwnerState.GONE
    except (OSError, CheckpointError):
        return None  # published or abandoned meanwhile
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
        ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        note = "all parts are there" if complete else f"{plural(len(missing), 'part')} missing: ranks {ranks}"
    age_s = max(0.0, time.time() - newest)
    note += ", being written" if in_use else f", unchanged for {duration(age_s)}"
    return UnpublishedSave(id_, pending.path, "pending", age_s, total, world_size, in_use, complete, note)


def _abandoned(root: CheckpointRoot, id_: SaveId) -> UnpublishedSave | None:
    path = os.path.join(root.abandoned_path, id_.name)
    try:
        total, newest = tree_bytes(path)
        note = why_abandoned(root, id_)
    except (OSError, CheckpointError) as error:
        return UnpublishedSave(id_, path, "abandoned", 0.0, 0, None, False, False, str(error))
    return UnpublishedSave(id_, path, "abandoned", max(0.0, time.time() - newest), total, None, False, False, note)


def why_abandoned(root: CheckpointRoot, save: SaveId) -> str:
    """Return the rank and error for which a save was abandoned; "" if it was not. CheckpointError if it is damaged."""
    outcome = PendingSave(root, save).outcome()
    if not isinstance(outcome, Abandoned):
        return ""
    where = "" if outcome.reason.rank is None else f"rank {outcome.reason.rank}: "
    return f"{where}{outcome.reason.kind}: {outcome.reason.message}"


# -- steps that are not published any more -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MovedStep:
    """A step that was moved aside. `continues` is the step and save that it was continued from, if that is known."""

    step: int
    name: str
    path: str
    state: str  # superseded or damaged
    save: str | None
    continues: dict[str, Any] | None


def moved_steps(root: CheckpointRoot) -> list[MovedStep]:
    """Return all steps that were moved aside, by step and name. Links are left out."""
    found = []
    for state, folder in (("superseded", root.superseded_path), ("damaged", root.damaged_path)):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            match = _STEP_NAME.fullmatch(name)
            if match is None or not _is_own_directory(path):
                continue
            intent = intent_of_step(path) or {}
            found.append(MovedStep(int(match[1]), name, path, state, intent.get("save"), intent.get("continues")))
    return sorted(found, key=lambda step: (step.step, step.name))


def find_moved_step(
    root: CheckpointRoot, name: str, states: tuple[str, ...] = ("superseded", "damaged")
) -> MovedStep | None:
    """Find the step with this directory name or number; None if there is none.

    CannotReadError if a number means more than one.
    """
    candidates = [step for step in moved_steps(root) if step.state in states]
    exact = [step for step in candidates if step.name == name]
    found = exact or [step for step in candidates if name.isascii() and name.isdigit() and step.step == int(name)]
    if len(found) > 1:
        names = ", ".join(step.name for step in found)
        raise CannotReadError(f"{root.path} has several steps {name} that were moved aside; give one of: {names}")
    return found[0] if found else None


def branch_of(root: CheckpointRoot, tip: MovedStep) -> tuple[list[MovedStep], int]:
    """Return the steps that must be published again so that `tip` is the newest, and the step that they continue.

    The steps are `tip` and those it continues, oldest first. The step that the first of them continues is in the root;
    -1 if there is none.
    """
    superseded = {step.save: step for step in moved_steps(root) if step.state == "superseded"}
    chain = [tip]
    while (before := chain[-1].continues) is not None:
        step, save = before.get("step"), before.get("save")
        published = intent_of_step(root.step_path(step)) if type(step) is int else None
        if published is not None and published.get("save") == save:
            return chain[::-1], int(before["step"])
        if save not in superseded or superseded[save] in chain:
            break  # it was removed
        chain.append(superseded[save])
    older = [step for step in root.steps() if step < chain[-1].step]
    return chain[::-1], max(older, default=-1)


# -- changing a root ---------------------------------------------------------------------------------------------------


@contextmanager
def owned(root: CheckpointRoot) -> Iterator[int]:
    """Own the root for the length of the block; gives the token of the ownership.

    CannotReadError if the job that owns the root is still running.
    """
    root.make()
    newest = root.ownership.newest()
    if root.ownership.state(newest) is not OwnerState.GONE:
        raise CannotReadError(
            f"{root.path} is owned by {root.ownership.describe(newest)}, which is alive: stop the job first, or let it "
            "do this itself (Checkpointer.delete, keep_last)"
        )
    token = root.ownership.claim(newest)
    try:
        yield token
    finally:
        root.ownership.release(token)


def confirmed(question: str, output: Output) -> bool:
    """Ask on the terminal; whether the answer is yes. CannotReadError if there is no terminal."""
    if output.as_json or not sys.stdin.isatty():
        raise CannotReadError("confirmation is needed before anything is removed; without a terminal give --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
