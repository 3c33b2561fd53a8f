"""The decision about a save: published as a whole, or abandoned for ever. One atomic rename, no communication.

    <root>/.owner/              who may decide (see `ownership`)
    <root>/.pending/<save>/     being written; can be published only while it holds intent.json
        intent.json                 made once, by the coordinator, before any writer starts
        parts/rank_00000.json       a rank's part is durable
    <root>/step_00000100/       published: the same directory under its final name
    <root>/.abandoned/<save>/   given up: the same directory, and its arrays will never be read
        reason.json                 why, for all ranks; stays for a while when the rest is removed
    <root>/.superseded/<save>/  a published step of another branch; <root>/.damaged/<save>/ one that was found damaged:
                                moved here by the owner, and removed by a person only

Publishing renames ``.pending/<save>`` to ``step_N``, abandoning renames it to ``.abandoned/<save>``. Whoever tries,
however often and however late: exactly one of the two can happen, and every rank learns which by looking. Only a
process that acts with the owner's token tries.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import Rename, try_lock_exclusive
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, unseal
from ckpt.storage.files import storage_errors
from ckpt.storage.names import PUBLISHED_STEP, SaveId, parse_save_name, part_name, step_name
from ckpt.storage.ownership import Ownership
from ckpt.storage.regular_files import read_document_at
from ckpt.storage.step_reader import forget_readers, is_read

__all__ = ["CheckpointRoot", "intent_of_step", "owner_of_step", "read_part_of_step"]

FORMAT_VERSION = 1
INTENT = "intent.json"
_RECORDS_STAY_S = 3600.0
_VISIBLE_S, _PAUSE_S = 5.0, 0.05  # how long a file system may take to show one node what another wrote
_TAKEN = re.compile(r"(step_\d{8,18})-removed-(\d+)-[0-9a-f]+")
_NO_TOKEN = 10**18  # of a mover that is not told from the owner


class CheckpointRoot:
    """The directory that holds the steps. Makes nothing until a save begins. Any process, any thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ownership = Ownership(path)

    @property
    def pending_path(self) -> str:
        return os.path.join(self.path, ".pending")

    @property
    def abandoned_path(self) -> str:
        return os.path.join(self.path, ".abandoned")

    @property
    def superseded_path(self) -> str:
        return os.path.join(self.path, ".superseded")

    @property
    def damaged_path(self) -> str:
        return os.path.join(self.path, ".damaged")

    def step_path(self, step: int) -> str:
        """Where `step` is when it is published."""
        return os.path.join(self.path, step_name(step))

    def steps(self) -> list[int]:
        """The published steps, ascending. A root that does not exist has none; StorageError if it cannot be read."""
        return sorted(int(match[1]) for name in self._names(self.path) if (match := PUBLISHED_STEP.fullmatch(name)))

    def pending(self) -> list[SaveId]:
        """The saves that are not decided, oldest step first."""
        return _saves(self._names(self.pending_path))

    def abandoned(self) -> list[SaveId]:
        """The saves that were given up and not yet removed."""
        return _saves(self._names(self.abandoned_path))

    def superseded(self) -> list[str]:
        """The names in `superseded_path` of steps of other branches, by step."""
        return sorted(name for name in self._names(self.superseded_path) if name.startswith("step_"))

    def make(self) -> None:
        """Make the root and the directories for undecided and abandoned saves, durably."""
        missing = []
        path = os.path.abspath(self.path)
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in (*reversed(missing), self.pending_path, self.abandoned_path):
            with storage_errors("make directory", path):
                try:
                    os.mkdir(path)
                except FileExistsError:
                    if not os.path.isdir(path):
                        raise StorageError(f"{path} is a file; choose another checkpoint root") from None
                    continue
                directories.fsync_directory(os.path.dirname(os.path.abspath(path)))

    def _names(self, path: str) -> list[str]:
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise StorageError(f"checkpoint root {self.path} is a file; choose a directory") from None
        except OSError as error:
            raise StorageError(f"cannot list {path}: {error.strerror} (check its permissions and owner)") from error

    def tip(self) -> dict[str, Any] | None:
        """The newest published step and its save, ``{"step": 20, "save": ...}``; None if there is none."""
        steps = self.steps()
        if not steps:
            return None
        return {"step": steps[-1], "save": (intent_of_step(self.step_path(steps[-1])) or {}).get("save")}

    def remove_step(self, step: int, token: int | None = None) -> bool:
        """Remove a published step; False if it is being read. A crash leaves it whole, or gone.

        For the owner; with its `token` FencedError instead if the step is of a later one.
        """
        target = self.take_step(step, self.abandoned_path, token)
        if target is None:
            return False
        directories.remove_tree(target)
        return True

    def take_step(self, step: int, where: str, token: int | None = None) -> str | None:
        """Move a published step, if it is there, to directory `where`, from all who read; its path there. None if it is
        being read, as far as is known.

        Since its owner has looked at the token another may have claimed the root, and saved the same step. So what was
        moved is looked at: with a `token` smaller than that of its owner it is moved back, and this raises FencedError.
        """
        mover = _NO_TOKEN if token is None else token
        target = os.path.join(where, f"{step_name(step)}-removed-{mover}-{secrets.token_hex(4)}")
        if not self._rename_step(step, target):
            return None
        if self.give_back(target):
            self.ownership.check(mover)
        return target

    def give_back(self, path: str) -> bool:
        """Publish what `take_step` has moved to `path` again, if an owner did that to a step of a later one; whether
        that is so. It may have died before it could do that itself."""
        taken = _TAKEN.fullmatch(os.path.basename(path))
        if taken is None or owner_of_step(path) <= int(taken[2]):
            return False
        directories.rename_directory(path, os.path.join(self.path, taken[1]))
        return True

    def _rename_step(self, step: int, target: str) -> bool:
        path = self.step_path(step)
        try:
            lock = try_lock_exclusive(path)
        except StorageError:
            if not os.path.isdir(path):
                return True
            raise
        if lock is None:
            return False
        with lock:
            if is_read(self.path, path):
                return False
            directories.rename_directory(path, target)
        return True

    def move_aside(self, step: int, where: str) -> str | None:
        """Move a published step to directory `where`, durably, though it may be read; the path it has then.

        None if it is not there. Nothing is removed. For the owner.
        """
        path = self.step_path(step)
        with storage_errors("make directory", where), contextlib.suppress(FileExistsError):
            os.mkdir(where)
        directories.fsync_directory(self.path)
        name = str((intent_of_step(path) or {}).get("save", ""))
        if parse_save_name(name) is None:
            name = step_name(step)
        target = os.path.join(where, name)
        while (result := directories.rename_directory(path, target)) is Rename.TARGET_EXISTS:
            target = os.path.join(where, f"{name}-{secrets.token_hex(4)}")
        return target if result is Rename.DONE else None

    def clean(self) -> None:
        """Free the space of abandoned saves and interrupted removals. For the owner; writers that have not noticed yet
        that their save was abandoned may still write there.

        Ranks learn from its record that a save was abandoned, and why, so records stay for `_RECORDS_STAY_S`.
        """
        for name in self._names(self.abandoned_path):
            path = os.path.join(self.abandoned_path, name)
            try:
                is_record = parse_save_name(name) is not None
                old = time.time() - os.stat(path).st_mtime > _RECORDS_STAY_S
                if is_record and not old:
                    remove_directories_in(path)
                elif not self.give_back(path):
                    directories.remove_tree(path)
            except (OSError, StorageError):
                continue  # removed meanwhile, or by the next clean-up
        with contextlib.suppress(StorageError):
            forget_readers(self.path)
        with contextlib.suppress(OSError):
            for name in self._names(self.pending_path):
                path = os.path.join(self.pending_path, name)
                if name.startswith(".") and time.time() - os.lstat(path).st_mtime > _RECORDS_STAY_S:
                    files.remove(path)  # a document that was being written when its writer died

    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to."""
        self.make()
        directories.check_writable(self.pending_path)

    def confirm(self, token: int) -> None:
        """Raise StorageError unless this process sees the claim with `token`, which another rank has made just now,
        and can write beside it."""
        deadline = time.monotonic() + _VISIBLE_S
        while not self.ownership.has(token):
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{os.path.abspath(self.path)} on {socket.gethostname()} is not the directory that rank 0 has "
                    "under this name: what rank 0 wrote is not there. All ranks must have the same, shared file system "
                    "mounted at the checkpoint root"
                )
            time.sleep(_PAUSE_S)
        directories.check_writable(self.pending_path)


def read_part_of_step(path: str, rank: int) -> dict[str, Any]:
    """The part manifest of a rank, of the published step in directory `path`. CheckpointCorruptError if it is damaged
    or missing."""
    document = read_sealed(os.path.join(path, part_name(rank)))
    if document is None:
        raise CheckpointCorruptError(f"{path}/{part_name(rank)} is missing")
    return document


def intent_of_step(path: str) -> dict[str, Any] | None:
    """What was to be saved as the published step in directory `path`; None if nothing tells."""
    try:
        return read_sealed(os.path.join(path, INTENT))
    except CheckpointError:
        return None


def owner_of_step(path: str) -> int:
    """The token of the owner that published the step in directory `path`; 0 if nothing tells."""
    save = parse_save_name(str((intent_of_step(path) or {}).get("save", "")))
    return 0 if save is None else save.owner


def remove_directories_in(path: str) -> None:
    """Remove all directories in `path`, whoever may still write there."""
    with storage_errors("clean up", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.remove_tree(entry.path)


def _saves(names: list[str]) -> list[SaveId]:
    saves = (parse_save_name(name) for name in names)
    return sorted((save for save in saves if save is not None), key=lambda save: (save.step, save.owner, save.nonce))


def read_sealed(path: str) -> dict[str, Any] | None:
    data = read_document(path)
    return None if data is None else unseal(data, path)


def read_document(path: str) -> bytes | None:
    return read_document_at(path, MAX_DOCUMENT_BYTES)
