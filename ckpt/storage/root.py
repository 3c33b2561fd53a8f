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
<root>/.superseded/<save>/  a published step of another branch, moved here by the owner; only a person removes it
<root>/.damaged/<save>/     a published step that was found damaged; likewise
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, FencedError, StorageError
from ckpt.storage import directories, files, pins
from ckpt.storage.commit import PendingSave
from ckpt.storage.copied_steps import CopiedObjects
from ckpt.storage.directory_root import DirectoryRoot
from ckpt.storage.documents import well_formed
from ckpt.storage.files import storage_errors
from ckpt.storage.interface import Aside
from ckpt.storage.links import refuse_link, refuse_links
from ckpt.storage.moved_steps import MovedStep, find_moved, moved_to, rename_back
from ckpt.storage.names import PUBLISHED_STEP, SaveId, parse_save_name, part_name, step_name
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.ownership import Ownership
from ckpt.storage.recycled import discard_recycled, recycle_step
from ckpt.storage.removal import remove_contents, remove_share
from ckpt.storage.step_documents import (
    FORMAT_VERSION,
    INTENT,
    intent_of_step,
    owner_of_step,
    read_bytes,
    read_json,
    read_part_of_step,
)
from ckpt.storage.step_moves import StepMoves, is_moving
from ckpt.storage.step_reader import hold_directory, remove_stale_readers, why_no_step
from ckpt.storage.step_source import HeldStep, LocalStep, StepSource

__all__ = [
    "FORMAT_VERSION",
    "INTENT",
    "CheckpointRoot",
    "intent_of_step",
    "owner_of_step",
    "read_bytes",
    "read_json",
    "read_part_of_step",
]

_KEEP_RECORDS_S = 3600.0
_VISIBLE_S, _PAUSE_S = 5.0, 0.05  # a network file system may take so long to show a file to another node


class CheckpointRoot(DirectoryRoot):
    """A checkpoint root in a directory. See `Root`."""

    reuses_files = True
    removed_by_all = True
    least_look_s = 0.0

    def __init__(self, path: str) -> None:
        if "://" in path:
            raise StorageError(f"{path}: only directories can be used here, not URLs")
        self.path = path
        self.ownership = Ownership(path)
        self._copied = CopiedObjects(path)
        self._moves = StepMoves(self)

    @property
    def pending_path(self) -> str:
        """The directory of saves that are neither published nor abandoned."""
        return refuse_link(os.path.join(self.path, ".pending"))

    @property
    def abandoned_path(self) -> str:
        """The directory of abandoned saves and removed steps."""
        return refuse_link(os.path.join(self.path, ".abandoned"))

    @property
    def superseded_path(self) -> str:
        return refuse_link(os.path.join(self.path, ".superseded"))

    @property
    def damaged_path(self) -> str:
        return refuse_link(os.path.join(self.path, ".damaged"))

    def step_path(self, step: int) -> str:
        """Return the directory of `step` once it is published; or where it was copied to from an object store."""
        path = os.path.join(self.path, step_name(step))
        is_copied = self._copied.are_there() and not files.exists(path)
        return self._copied.steps(only=False).get(step, path) if is_copied else path

    def steps(self) -> list[int]:
        """See `Root.steps`."""
        names = self._names(self.path)
        steps = {int(match[1]) for name in names if (match := PUBLISHED_STEP.fullmatch(name))}
        return sorted(steps | self._copied.steps(only=not steps).keys() if "saves" in names else steps)

    def pending(self) -> list[SaveId]:
        """Return the saves that are neither published nor abandoned, lowest step first. A link is none."""
        path = self.pending_path
        return _saves([name for name in self._names(path) if not os.path.islink(os.path.join(path, name))])

    def abandoned(self) -> list[SaveId]:
        """Return the abandoned saves that are not removed yet."""
        return _saves(self._names(self.abandoned_path))

    def abandoned_s(self, save: SaveId) -> float:
        """See `Root.abandoned_s`."""
        path = os.path.join(self.abandoned_path, save.name)
        with storage_errors("find", path):
            return os.lstat(path).st_mtime

    def moved_aside(self) -> list[MovedStep]:
        """See `Root.moved_aside`."""
        found = moved_to(self.superseded_path, "superseded") + moved_to(self.damaged_path, "damaged")
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

    def remove_moved(self, name: str) -> None:
        """See `Root.remove_moved`."""
        directories.remove_tree(find_moved(self.moved_aside(), name, self.path).source.path)

    def source_at(self, place: str) -> StepSource:
        """See `Root.source_at`."""
        return LocalStep(place)

    def is_gone(self, save: SaveId) -> bool | None:
        """See `Root.is_gone`. Looks twice, in opposite orders: the save may be renamed meanwhile."""
        looks: list[Callable[[], bool]] = [
            lambda: files.exists(os.path.join(self.pending_path, save.name)),
            lambda: self._may_be_published(save),
            lambda: bool(self._moved_as(save, "moving")),
            lambda: any(_may_be_of(save, name) for name in self.superseded()),
            lambda: any(_may_be_of(save, name) for name in self._names(self.damaged_path)),
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
        names = [name for name in self._names(self.abandoned_path) if name.startswith(prefix)]
        paths = (os.path.join(self.abandoned_path, name) for name in names)
        return [path for path in paths if (intent_of_step(path) or {}).get("save") == save.name]

    def make(self) -> None:
        """Make the root and its directories for pending and abandoned saves, durably."""
        self.check_links()
        for path in (self.path, self.pending_path, self.abandoned_path):
            directories.make_with_parents(path)

    def check_links(self) -> None:
        """See `Root.check_links`."""
        refuse_links(self.path)

    def _names(self, path: str) -> list[str]:
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise StorageError(f"checkpoint root {self.path} is a file; choose a directory") from None
        except OSError as error:
            raise StorageError(f"cannot list {path}: {error.strerror} (check its permissions and owner)") from error

    def save_of(self, step: int) -> str | None:
        """See `Root.save_of`."""
        save = (intent_of_step(self.step_path(step)) or {}).get("save")
        return save if isinstance(save, str) else None

    def source_of(self, step: int) -> StepSource:
        """See `Root.source_of`."""
        return LocalStep(self.step_path(step))

    def published_s(self, step: int) -> float:
        """See `Root.published_s`."""
        path = os.path.join(self.step_path(step), "zarr.json")
        with storage_errors("read", path):
            return os.stat(path).st_mtime

    def saved_s(self, step: int) -> float:
        """See `Root.saved_s`: as rank 0 has recorded it."""
        path = self.step_path(step)
        with well_formed(os.path.join(path, part_name(0))):
            times = read_part_of_step(path, 0)["times"]
            began = times["write_begin"] if "write_begin" in times else times["begin"]
            return float(began) + float(times.get("write_s", 0.0)) + float(times.get("sync_s", 0.0))

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

    def pinned_steps(self) -> set[int]:
        """See `Root.pinned_steps`."""
        return pins.pinned_steps(self.path)

    def pin_step(self, step: int) -> None:
        """See `Root.pin_step`."""
        pins.pin_step(self.path, step)

    def unpin_step(self, step: int) -> bool:
        """See `Root.unpin_step`."""
        return pins.unpin_step(self.path, step)

    def refresh(self) -> None:
        """See `Root.refresh`: a network file system answers from its cache for seconds."""
        for path in (self.pending_path, self.abandoned_path):
            directories.fresh_names(path)
        self._copied.take_in(self.path, self.superseded_path, self.damaged_path, self.abandoned_path)

    def retire_step(self, step: int, token: int, plan: str | None = None) -> bool:
        """See `Root.retire_step`."""
        if plan is not None:
            return recycle_step(self, step, plan, token)
        return self.move_step(step, self.abandoned_path, token) is not None

    def discard_recycled(self, keep: str | None = None) -> list[str]:
        """See `Root.discard_recycled`."""
        return discard_recycled(self, keep)

    def delete_share(self, path: str, rank: int, before_each: Callable[[], None]) -> None:
        """See `Root.delete_share`."""
        remove_share(path, rank, before_each)

    def delete_contents(self, path: str, before_each: Callable[[], None], *, is_record: bool) -> None:
        """See `Root.delete_contents`."""
        remove_contents(path, before_each, keep_files=is_record)

    def move_aside(self, step: int, token: int, why: Aside) -> str | None:
        """See `Root.move_aside`."""
        return self._moves.aside(step, token, self.superseded_path if why == "superseded" else self.damaged_path)

    def remove_step(self, step: int, token: int | None = None) -> bool:
        """See `Root.remove_step`."""
        target = self.move_step(step, self.abandoned_path, token)
        if target is None:
            return False
        directories.remove_tree(target)
        return True

    def move_step(self, step: int, where: str, token: int | None = None) -> str | None:
        """See `StepMoves.away`."""
        return self._moves.away(step, where, token)

    def removed(self) -> list[tuple[str, bool]]:
        """See `Root.removed`. Steps that are being moved are left out: they may be published again (`move_step`).

        Ranks learn from the files in the directory of an abandoned save that it was abandoned, and why.
        """
        found = []
        for name in sorted(self._names(self.abandoned_path)):
            path = os.path.join(self.abandoned_path, name)
            if not is_moving(name):
                found.append((path, parse_save_name(name) is not None))
        return found

    def clean(self) -> None:
        """See `Root.clean`. Writers that have not noticed that their save was abandoned may still write there."""
        self.clean_records()
        for path, is_record in self.removed():
            with contextlib.suppress(StorageError):  # it was removed meanwhile, or the next clean-up will remove it
                remove_contents(path, lambda: None, keep_files=is_record)

    def clean_records(self) -> None:
        """See `Root.clean_records`. Ranks learn from records what was abandoned: they stay for `_KEEP_RECORDS_S`."""
        owner = self.ownership.owner()
        for name in self._names(self.abandoned_path):
            path = os.path.join(self.abandoned_path, name)
            with contextlib.suppress(OSError, StorageError):
                if is_moving(name, before=owner):
                    self._moves.back(path)
                is_old = time.time() - os.lstat(path).st_mtime > _KEEP_RECORDS_S
                if is_old and parse_save_name(name) is not None:
                    directories.remove_tree(path)
        self._set_aside_late()
        with contextlib.suppress(StorageError):
            remove_stale_readers(self.path)
        for name in self._names(self.pending_path):
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

    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to."""
        self.make()
        directories.check_writable(self.pending_path)

    def confirm(self, token: int) -> None:
        """Raise StorageError unless this process sees the claim with `token`, just made by another rank, and can write.

        Ranks that do not share a file system fail here, before anything is saved. Of processes of one node that do this
        at the same time, one tries to write.
        """
        deadline = time.monotonic() + _VISIBLE_S
        while not self.ownership.has(token):
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{os.path.abspath(self.path)} on {socket.gethostname()} is not the directory that rank 0 has "
                    "under this name: a file that rank 0 wrote is missing. Mount the same shared file system at the "
                    "checkpoint root on all hosts"
                )
            time.sleep(_PAUSE_S)
        probe = NodeLock(f"probe of {self.path} for {token}")
        if probe.take():
            try:
                directories.check_writable(self.pending_path)
            finally:
                probe.release()


def _may_be_of(save: SaveId, name: str) -> bool:
    """Return whether a step with this name, which was moved aside, is of a save. A damaged one has that of its step."""
    return name.startswith(save.name) or re.fullmatch(rf"{step_name(save.step)}(-[0-9a-f]{{8}})?", name) is not None


def _saves(names: list[str]) -> list[SaveId]:
    saves = (parse_save_name(name) for name in names)
    return sorted((save for save in saves if save is not None), key=lambda save: (save.step, save.owner, save.nonce))
