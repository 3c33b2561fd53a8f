"""The checkpoint root: the directory that holds published steps and the saves on their way there.

<root>/.owner/              the job that may publish (see `ownership`)
<root>/.pending/<save>/     being written; can be published only while it holds intent.json
    intent.json                 made once, by the coordinator, before any writer starts
    parts/000/rank_00000.json   this rank's part is durable
<root>/step_00000100/       published: the same directory under its final name
<root>/.abandoned/<save>/   abandoned: the same directory; its files will never be read
    reason.json                 why, for all ranks; kept for a while after the rest is removed
<root>/.abandoned/step_00000100-moving-<token>-..   a published step that the owner with this token is about to remove,
                                                    or to move aside, if it still is the owner; else published again
<root>/.abandoned/step_00000100-removed-<token>-..  a removed step, whose files are being deleted
<root>/pins/step_00000100   an empty file: this step is pinned
<root>/.superseded/<save>/  a published step of another branch, moved here by the owner; only a person removes it
<root>/.damaged/<save>/     a published step that was found damaged; likewise
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import time
from collections.abc import Callable

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, FencedError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.commit import PendingSave
from ckpt.storage.directories import remove_contents
from ckpt.storage.directory_root import DirectoryRoot, StepMoves, discard_recycled, is_moving, recycle_step
from ckpt.storage.documents import (
    INTENT,
    intent_of_step,
)
from ckpt.storage.interface import Aside
from ckpt.storage.names import SaveId, parse_save_name, step_name
from ckpt.storage.outcomes import MovedStep, MovedTo, find_moved, moved_to, rename_back, to_be_deleted
from ckpt.storage.step_reader import hold_directory, remove_stale_readers, why_no_step
from ckpt.storage.step_source import HeldStep, LocalStep

_KEEP_RECORDS_S = 3600.0
_VISIBLE_S, _PAUSE_S = 5.0, 0.05  # a network file system may take so long to show a file to another node


class CheckpointRoot(DirectoryRoot):
    """A checkpoint root in a directory. See `Root`."""

    reuses_files = True
    removed_by_all = True
    least_look_s = 0.0

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._moves = StepMoves(self)

    def pending(self) -> list[SaveId]:
        """Return the saves that are neither published nor abandoned, lowest step first. A link is none."""
        path = self.pending_path
        return _saves([name for name in self.names(path) if not os.path.islink(os.path.join(path, name))])

    def moved(self, *states: MovedTo) -> list[MovedStep]:
        """See `Root.moved`. Steps that are being moved are left out: they may be published again (`StepMoves`).

        Ranks learn from the files in the directory of an abandoned save that it was abandoned, and why.
        """
        found: list[MovedStep] = []
        if "superseded" in states:
            found += moved_to(self.superseded_path, "superseded")
        if "damaged" in states:
            found += moved_to(self.damaged_path, "damaged")
        if "abandoned" in states or "removed" in states:
            folder = self.abandoned_path
            found += to_be_deleted(folder, (name for name in self.names(folder) if not is_moving(name)))
        found = [each for each in found if each.why in states]
        return sorted(found, key=lambda each: (each.step, each.name))

    def publish_again(self, name: str, token: int) -> None:
        """See `Root.publish_again`."""
        moved = find_moved(self.moved_aside(), name, self.path)
        self.ownership.check(token)
        rename_back(moved.source.path, self.step_path(moved.step))
        try:
            self.ownership.check(token)
        except FencedError:  # the later owner has not seen it
            directories.rename_directory(self.step_path(moved.step), moved.source.path)
            raise

    def is_gone(self, save: SaveId) -> bool | None:
        """See `Root.is_gone`. Looks twice, in opposite orders: the save may be renamed meanwhile."""
        looks: list[Callable[[], bool]] = [
            lambda: files.exists(os.path.join(self.pending_path, save.name)),
            lambda: self._may_be_published(save),
            lambda: bool(self._moved_as(save, "moving")),
            lambda: any(_may_be_of(save, name) for name in self.superseded()),
            lambda: any(_may_be_of(save, name) for name in self.names(self.damaged_path)),
        ]
        if any(look() for look in (*looks, *reversed(looks))):
            return False
        is_recorded = files.exists(os.path.join(self.abandoned_path, save.name)) or self._moved_as(save, "removed")
        return True if is_recorded else None

    def _may_be_published(self, save: SaveId) -> bool:
        """Return whether this save is published, or the step is and its intent is damaged."""
        name = self.save_of(save.step)
        return name == save.name or (name is None and files.exists(self.step_path(save.step)))

    def _moved_as(self, save: SaveId, what: str) -> list[str]:
        """Return the directories of a removed step, or of one that is just being moved, published as this save."""
        prefix = f"{step_name(save.step)}-{what}-"
        names = [name for name in self.names(self.abandoned_path) if name.startswith(prefix)]
        paths = (os.path.join(self.abandoned_path, name) for name in names)
        return [path for path in paths if (intent_of_step(path) or {}).get("save") == save.name]

    def hold_step(self, step: int, *, lease: bool, renewing: bool = False) -> HeldStep:
        """See `Root.hold_step`. CheckpointCorruptError for an entry with the name of a step that is none."""
        path = self.step_path(step)
        try:
            return hold_directory(path, self.path if lease else None, renewing=renewing)
        except CheckpointNotFoundError:
            # It was not removed if its name is still there: a step is renamed before any of its files is deleted.
            problem = why_no_step(path)
            if problem is None or os.path.basename(path) not in directories.names_in(self.path):
                raise
            raise CheckpointCorruptError(
                f"{path} has the name of a step, and is none: {problem}. Move it away, or copy the whole step there",
                step=step,
            ) from None

    def hold_itself(self) -> HeldStep:
        """See `Root.hold_itself`."""
        return hold_directory(self.path, None)

    def pending_save(self, save: SaveId, token: int | None = None) -> PendingSave:
        """See `Root.pending_save`."""
        return PendingSave(self, save, token)

    def refresh(self) -> None:
        """See `Root.refresh`: a network file system answers from its cache for seconds."""
        for path in (self.pending_path, self.abandoned_path):
            directories.fresh_names(path)
        self.copied.take_in(self.path, self.superseded_path, self.damaged_path, self.abandoned_path)

    def retire_step(self, step: int, token: int | None, plan: str | None = None) -> MovedStep | None:
        """See `Root.retire_step`."""
        if plan is not None:
            name, is_removed = step_name(step), recycle_step(self, self._moves, step, plan, token)
            return MovedStep(step, name, "removed", self.source_of(step), has_files=False) if is_removed else None
        path = self._moves.away(step, self.abandoned_path, token)
        return None if path is None else MovedStep(step, os.path.basename(path), "removed", LocalStep(path))

    def discard_recycled(self, keep: str | None = None) -> list[str]:
        """See `Root.discard_recycled`."""
        return discard_recycled(self, keep)

    def delete(self, moved: MovedStep, before_each: Callable[[], None]) -> None:
        """See `Root.delete`."""
        if moved.has_files:
            remove_contents(moved.source.path, before_each, keep_files=moved.why == "abandoned")

    def move_aside(self, step: int, token: int, why: Aside) -> str | None:
        """See `Root.move_aside`."""
        return self._moves.aside(step, token, self.superseded_path if why == "superseded" else self.damaged_path)

    def clean_records(self) -> None:
        """See `Root.clean_records`. Ranks learn from records what was abandoned: they stay for `_KEEP_RECORDS_S`."""
        owner = self.ownership.owner()
        for name in self.names(self.abandoned_path):
            path = os.path.join(self.abandoned_path, name)
            with contextlib.suppress(OSError, StorageError):
                if is_moving(name, before=owner):
                    self._moves.back(path)
                is_old = time.time() - os.lstat(path).st_mtime > _KEEP_RECORDS_S
                if is_old and parse_save_name(name) is not None:
                    directories.remove_tree(path)
        self._set_aside_late()
        for sweep in (functools.partial(remove_stale_readers, self.path), self.store.sweep):
            with contextlib.suppress(StorageError):
                sweep()
        for name in self.names(self.pending_path):
            path = os.path.join(self.pending_path, name)
            with contextlib.suppress(OSError, StorageError):
                is_old = time.time() - os.lstat(path).st_mtime > _KEEP_RECORDS_S
                if os.path.islink(path) or (name.startswith(".") and is_old):
                    files.remove(path)  # made by hand, or a temporary file whose writer died

    def _set_aside_late(self) -> None:
        """Let directories be deleted that late writers have made for saves which were decided, or never began."""
        owner = self.ownership.owner()
        for save in self.pending():
            path = os.path.join(self.pending_path, save.name)
            with contextlib.suppress(StorageError):  # the next clean-up looks again
                is_late = save.owner < owner or files.is_directory(os.path.join(self.abandoned_path, save.name))
                if is_late and not files.exists(os.path.join(path, INTENT)):
                    target = os.path.join(self.abandoned_path, f"{save.name}-late-{secrets.token_hex(4)}")
                    directories.rename_directory(path, target)


def _may_be_of(save: SaveId, name: str) -> bool:
    """Return whether a step with this name, which was moved aside, is of a save. A damaged one has that of its step."""
    return name.startswith(save.name) or re.fullmatch(rf"{step_name(save.step)}(-[0-9a-f]{{8}})?", name) is not None


def _saves(names: list[str]) -> list[SaveId]:
    saves = (parse_save_name(name) for name in names)
    return sorted((save for save in saves if save is not None), key=lambda save: (save.step, save.owner, save.nonce))
