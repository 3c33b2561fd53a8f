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

from ckpt.errors import CheckpointError, StorageError
from ckpt.formats.foreign_files import foreign_file
from ckpt.formats.foreign_state import DESCRIPTIONS, kind_of
from ckpt.storage.documents import FORMAT_VERSION, INTENT, MAX_DOCUMENT_BYTES, decode_document
from ckpt.storage.interface import MovedStep, Root
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.outcomes import Abandoned
from ckpt.storage.ownership import OwnerState
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import is_object_url, own_directory, own_root
from ckpt.storage.step_source import StepSource

from .output import CannotReadError, Output, duration, plural


def root_of(path: str) -> CheckpointRoot:
    """Return the checkpoint root in a directory. CannotReadError if it is not one, with a hint if it is a step."""
    check_directory(path)
    if os.path.lexists(os.path.join(path, "zarr.json")) or looks_like_step(path):
        refuse_other_format(path)
        raise CannotReadError(f"{path} is a step, not a checkpoint root; give {os.path.dirname(os.path.abspath(path))}")
    own_directory(os.path.abspath(path), "a checkpoint root")
    check_root(path)
    return CheckpointRoot(path)


def any_root(path: str) -> Root:
    """Return the checkpoint root at a path, as `root_of` does, or at the URL of an object store."""
    if not is_object_url(path):
        return root_of(path)
    root = own_root(path)
    if root.ownership.newest() == 0 and not root.steps():
        raise CannotReadError(f"{path} is not a checkpoint root: no job has ever owned it")
    return root


def steps_of(root: Root) -> list[int]:
    """Return the published steps of a root, ascending: also links to steps, which a restart restores, too."""
    if not isinstance(root, CheckpointRoot):
        return root.steps()
    return [step for step in root.steps() if os.path.isdir(root.step_path(step))]


def check_directory(path: str) -> None:
    """CannotReadError if `path` is not a directory that can be listed."""
    if is_object_url(path):
        raise CannotReadError(f"{path}: this command takes directories only")
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CannotReadError(f"{path}: there is no such directory") from None
    except (OSError, ValueError) as error:
        raise CannotReadError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISDIR(status.st_mode):
        refuse_other_format(path)
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
    refuse_other_format(path)
    raise CannotReadError(f"{path} is not a checkpoint and contains none")


def refuse_other_format(path: str) -> None:
    """CannotReadError, with what to write instead, if there is a checkpoint of another format at `path`."""
    try:
        kind = kind_of(path)
    except OSError:
        return
    if kind is None and os.path.isfile(path) and (what := foreign_file(path)) is not None:
        raise CannotReadError(f"{path} is {what}")
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


# -- saves that are not published --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnpublishedSave:
    """A pending or abandoned save.

    `age_s` is the time since anything in it changed; `in_use`: a writer of its job is alive; `complete`: the parts of
    all ranks are there; `is_known`: it could be read.
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
    is_known: bool = True


def pending_saves(root: Root) -> list[UnpublishedSave]:
    """Return the saves that are neither published nor abandoned, lowest step first."""
    return [save for id_ in root.pending() if (save := _pending(root, id_)) is not None]


def abandoned_saves(root: Root) -> list[UnpublishedSave]:
    """Return the saves that can never be published, lowest step first."""
    found = ((parse_save_name(moved.name), moved) for moved in root.moved("abandoned"))
    return [
        _abandoned(root, id_, moved.source if moved.has_files else None, moved.since_s)
        for id_, moved in found
        if id_ is not None
    ]


def _pending(root: Root, id_: SaveId) -> UnpublishedSave | None:
    pending = root.pending_save(id_)
    try:
        total, newest = pending.source.usage()
        in_use = root.ownership.state(id_.owner) is not OwnerState.GONE
    except CheckpointError:
        return None  # published or abandoned meanwhile
    if not newest:
        return None
    intent: dict[str, Any] | None = None
    try:
        intent = pending.intent()
        note = "has no intent" if intent is None else ""
    except StorageError as error:
        note = f"cannot be read: {error}"
        return UnpublishedSave(id_, pending.path, "pending", 0.0, total, None, in_use, False, note, is_known=False)
    except CheckpointError:
        note = "its intent is damaged"
    complete, world_size = False, None
    if intent is not None and intent.get("format") != FORMAT_VERSION:
        note = "is of another format"
    elif intent is not None:
        world_size = intent["world_size"]
        missing = sorted(set(range(world_size)) - pending.parts_present())
        complete = not missing
        ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        note = "all parts are there" if complete else f"{plural(len(missing), 'part')} missing: ranks {ranks}"
    age_s = max(0.0, time.time() - newest)
    note += ", being written" if in_use else f", unchanged for {duration(age_s)}"
    return UnpublishedSave(id_, pending.path, "pending", age_s, total, world_size, in_use, complete, note)


def _abandoned(root: Root, id_: SaveId, source: StepSource | None, since_s: float) -> UnpublishedSave:
    """`source`: its files; None if none are left."""
    path = root.pending_save(id_).path if source is None else source.path
    try:
        total, newest = (0, 0.0) if source is None else source.usage()
        age_s = max(0.0, time.time() - max(newest, since_s))
        note = why_abandoned(root, id_)
    except CheckpointError as error:
        return UnpublishedSave(id_, path, "abandoned", 0.0, 0, None, False, False, str(error))
    return UnpublishedSave(id_, path, "abandoned", age_s, total, None, False, False, note)


def why_abandoned(root: Root, save: SaveId) -> str:
    """Return the rank and error for which a save was abandoned; "" if it was not. CheckpointError if it is damaged."""
    outcome = root.pending_save(save).outcome()
    if not isinstance(outcome, Abandoned):
        return ""
    where = "" if outcome.reason.rank is None else f"rank {outcome.reason.rank}: "
    return f"{where}{outcome.reason.kind}: {outcome.reason.message}"


# -- steps that are not published any more -----------------------------------------------------------------------------


def origin_of(moved: MovedStep) -> tuple[str | None, dict[str, Any]]:
    """Return the save that made a step, and the step and save that it continues: None and {} if that is not known."""
    try:
        intent = decode_document(moved.source.read(INTENT, MAX_DOCUMENT_BYTES), moved.source.path)
    except (CheckpointError, DamagedFileError, OSError):
        return None, {}
    before = intent.get("continues")
    return intent.get("save"), before if isinstance(before, dict) else {}


def find_moved_step(root: Root, name: str, states: tuple[str, ...] = ("superseded", "damaged")) -> MovedStep | None:
    """Find the step with this name or number; None if there is none.

    CannotReadError if a number means more than one.
    """
    candidates = [step for step in root.moved_aside() if step.why in states]
    exact = [step for step in candidates if step.name == name]
    found = exact or [step for step in candidates if name.isascii() and name.isdigit() and step.step == int(name)]
    if len(found) > 1:
        names = ", ".join(step.name for step in found)
        raise CannotReadError(f"{root.path} has several steps {name} that were moved aside; give one of: {names}")
    return found[0] if found else None


def branch_of(root: Root, tip: MovedStep) -> tuple[list[MovedStep], int]:
    """Return the steps that must be published again so that `tip` is the newest, and the step that they continue.

    The steps are `tip` and those it continues, oldest first. The step that the first of them continues is in the root;
    -1 if there is none.
    """
    superseded = {origin_of(step)[0]: step for step in root.moved_aside() if step.why == "superseded"}
    published = root.saves()
    chain = [tip]
    while before := origin_of(chain[-1])[1]:
        step, save = before.get("step"), before.get("save")
        if type(step) is int and save is not None and published.get(step) == save:
            return chain[::-1], step
        if save not in superseded or superseded[save] in chain:
            break  # it was removed
        chain.append(superseded[save])
    older = [step for step in published if step < chain[-1].step]
    return chain[::-1], max(older, default=-1)


# -- changing a root ---------------------------------------------------------------------------------------------------


@contextmanager
def owned(root: Root, above: int = 0) -> Iterator[int]:
    """Own the root for the length of the block; gives the token of the ownership, which is larger than `above`.

    CannotReadError if the job that owns the root is still running.
    """
    root.make()
    newest = root.ownership.newest()
    for token in {newest, root.ownership.owner()}:
        if root.ownership.state(token) is not OwnerState.GONE:
            raise CannotReadError(
                f"{root.path} is owned by {root.ownership.describe(token)}, which is alive: stop the job first, or let "
                "it do this itself (Checkpointer.delete, keep=N)"
            )
    token = root.ownership.claim(newest, above=above)
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
