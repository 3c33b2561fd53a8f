"""The decision about a save: published as a whole, or abandoned for ever. One atomic rename, no communication.

    <root>/.pending/<save>/    being written; can be published only while it holds intent.json
        intent.json                 made once, by the coordinator, before any writer starts
        parts/rank_00000.json       a rank's part is durable; or rank_00000.error.json: it will never be
    <root>/step_00000100/      published: the same directory under its final name
    <root>/.abandoned/<save>/  given up: the same directory, and nobody will ever read it

Publishing renames ``.pending/<save>`` to ``step_N``, abandoning renames it to ``.abandoned/<save>``. Whoever tries,
however often and however late: exactly one of the two can happen, and every rank learns which by looking. Everyone who
works on a pending save holds a shared lock on its directory, so that a later start of the job can tell a save being
finished from one left behind.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import files
from ckpt.storage.documents import seal, unseal
from ckpt.storage.files import Rename, storage_errors
from ckpt.storage.locks import DirectoryLock, lock_shared, try_lock_exclusive

__all__ = ["Abandoned", "CheckpointRoot", "Outcome", "PendingSave", "Published", "Reason", "SaveId", "parse_save_name"]

FORMAT_VERSION = 1

_STEP = re.compile(r"step_(\d{8,18})")
_SAVE = re.compile(r"step_(\d{8,18})-e(\d+)-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class SaveId:
    """One attempt to save one step. `token` tells it from every other attempt; all ranks derive the same without
    communication."""

    step: int
    epoch: int
    token: str

    @property
    def name(self) -> str:
        """The directory of the save while it is not published."""
        return f"{step_name(self.step)}-e{self.epoch}-{self.token}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a save was given up: on which rank, the kind of error, its message and traceback."""

    rank: int | None
    kind: str
    message: str
    traceback: str = ""

    def to_document(self) -> dict[str, Any]:
        return {"rank": self.rank, "kind": self.kind, "message": self.message, "traceback": self.traceback}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Reason:
        return cls(document.get("rank"), str(document["kind"]), str(document["message"]), str(document["traceback"]))


@dataclass(frozen=True, slots=True)
class Published:
    """The save is a published step."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The save can never be published."""

    reason: Reason


Outcome = Published | Abandoned | None  # None: not decided, or not begun


def step_name(step: int) -> str:
    """The directory of a published step."""
    return f"step_{step:08d}"


def parse_save_name(name: str) -> SaveId | None:
    """The save whose directory has this name; None for anything else."""
    match = _SAVE.fullmatch(name)
    return SaveId(int(match[1]), int(match[2]), match[3]) if match else None


class CheckpointRoot:
    """The directory that holds the steps. Makes nothing until a save begins. Any process, any thread."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def pending_path(self) -> str:
        return os.path.join(self.path, ".pending")

    @property
    def abandoned_path(self) -> str:
        return os.path.join(self.path, ".abandoned")

    def step_path(self, step: int) -> str:
        """Where `step` is when it is published."""
        return os.path.join(self.path, step_name(step))

    def steps(self) -> list[int]:
        """The published steps, ascending. A root that does not exist has none; StorageError if it cannot be read."""
        return sorted(int(match[1]) for name in self._names(self.path) if (match := _STEP.fullmatch(name)))

    def pending(self) -> list[SaveId]:
        """The saves that are not decided, oldest step first."""
        return _saves(self._names(self.pending_path))

    def abandoned(self) -> list[SaveId]:
        """The saves that were given up and not yet removed."""
        return _saves(self._names(self.abandoned_path))

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
                files.fsync_directory(os.path.dirname(os.path.abspath(path)))

    def _names(self, path: str) -> list[str]:
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise StorageError(f"checkpoint root {self.path} is a file; choose a directory") from None
        except OSError as error:
            raise StorageError(f"cannot list {path}: {error.strerror} (check its permissions and owner)") from error

    def remove_step(self, step: int) -> bool:
        """Remove a published step; False if it is being read. A crash leaves it whole, or gone."""
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
            target = os.path.join(self.abandoned_path, f"{step_name(step)}-removed-{os.getpid()}")
            files.rename_directory(path, target)
        files.remove_tree(target)
        return True

    def clean(self, older_than_s: float = 0.0) -> None:
        """Remove what abandoned saves and interrupted removals left, except for what is in use or was decided just now.

        Ranks learn from the record why a save was abandoned, so a clean-up during a run leaves them some time.
        """
        for name in self._names(self.abandoned_path):
            path = os.path.join(self.abandoned_path, name)
            try:
                if time.time() - os.stat(path).st_mtime < older_than_s:
                    continue
                lock = try_lock_exclusive(path)
            except (OSError, StorageError):
                continue  # somebody else was faster
            if lock is not None:
                with lock:
                    files.remove_tree(path)


class PendingSave:
    """One save of a root, as seen by anybody who takes part in it."""

    def __init__(self, root: CheckpointRoot, save: SaveId) -> None:
        self.root = root
        self.save = save
        self.path = os.path.join(root.pending_path, save.name)
        self._abandoned_path = os.path.join(root.abandoned_path, save.name)

    def begin(self, world_size: int, plan_digest: str) -> DirectoryLock | None:
        """Make the directory and its intent. Coordinator only, once, before any other writer starts.

        Returns a lock that says somebody works on this save. StorageError if it has been begun or abandoned before.
        """
        if os.path.lexists(self._abandoned_path):
            raise StorageError(f"save {self.save.name} was abandoned before it began")
        self.root.make()
        files.make_directories(self.root.pending_path, f"{self.save.name}/parts")
        files.fsync_directory(self.path)
        lock = lock_shared(self.path)
        intent = {"format": FORMAT_VERSION, "save": self.save.name, "step": self.save.step, "epoch": self.save.epoch}
        intent |= {"world_size": world_size, "plan": plan_digest}
        if not files.create_exclusive(os.path.join(self.path, "intent.json"), seal(intent)):
            raise StorageError(f"save {self.save.name} has begun already: two jobs write to {self.root.path}")
        files.fsync_directory(self.root.pending_path)
        return lock

    def join(self) -> DirectoryLock | None:
        """Take part in a save that has begun: a lock, or None while it has not begun (or is decided)."""
        if not os.path.exists(os.path.join(self.path, "intent.json")):
            return None
        try:
            return lock_shared(self.path)
        except StorageError:
            return None

    def intent(self) -> dict[str, Any] | None:
        """The intent, None if there is none. CheckpointCorruptError if it is damaged."""
        return self._read("intent.json")

    def write_part(self, rank: int, document: dict[str, Any]) -> None:
        """Say that this rank's part is whole and durable. StorageError when the save is gone."""
        files.write_durable(os.path.join(self.path, part_name(rank)), seal(document))

    def write_error(self, rank: int, reason: Reason) -> None:
        """Say that this rank's part will never be there, also when the save has not begun."""
        if os.path.lexists(self._abandoned_path):
            return
        self.root.make()
        files.make_directories(self.root.pending_path, f"{self.save.name}/parts")
        files.write_durable(os.path.join(self.path, error_name(rank)), seal(reason.to_document()))

    def failure(self) -> Reason | None:
        """What a rank reported by `write_error`."""
        return _failure_in(self.path)

    def parts_present(self) -> set[int]:
        """The ranks whose part is there."""
        return {int(name[5:10]) for name in _part_names(self.path) if re.fullmatch(r"rank_\d{5,}\.json", name)}

    def read_part(self, rank: int) -> dict[str, Any]:
        """A rank's part manifest. CheckpointCorruptError if it is damaged or missing."""
        document = self._read(part_name(rank))
        if document is None:
            raise CheckpointCorruptError(f"{self.path}/{part_name(rank)} is missing")
        return document

    def publish(self) -> Outcome:
        """The commit. Published or Abandoned, whoever decided it; None if the step is published with another save's
        content.

        Everything in the directory is durable before this is called.
        """
        if not os.path.exists(os.path.join(self.path, "intent.json")):
            return self.outcome() or Abandoned(_vanished(self.save))
        result = files.rename_directory(self.path, self.root.step_path(self.save.step))
        if result is Rename.TARGET_EXISTS:
            return None
        return self.outcome() or Abandoned(_vanished(self.save))

    def abandon(self, reason: Reason) -> Outcome:
        """Give the save up. Published if it was too late for that; None if it has not begun: then nothing was
        changed."""
        if not os.path.isdir(self.path):
            return self.outcome()
        self.root.make()
        result = files.rename_directory(self.path, self._abandoned_path)
        if result is Rename.DONE:
            files.write_durable(os.path.join(self._abandoned_path, "reason.json"), seal(reason.to_document()))
            return Abandoned(reason)
        return self.outcome()

    def outcome(self) -> Outcome:
        """What was decided, as far as storage tells."""
        if os.path.exists(os.path.join(self.path, "intent.json")):
            return None
        published = _read_sealed(os.path.join(self.root.step_path(self.save.step), "intent.json"))
        if published is not None and published.get("save") == self.save.name:
            return Published()
        if os.path.isdir(self._abandoned_path):
            document = _read_sealed(os.path.join(self._abandoned_path, "reason.json"))
            reason = None if document is None else Reason.from_document(document)
            return Abandoned(reason or _failure_in(self._abandoned_path) or _vanished(self.save))
        return None

    def _read(self, name: str) -> dict[str, Any] | None:
        return _read_sealed(os.path.join(self.path, name))


def part_name(rank: int) -> str:
    """A rank's part manifest, relative to the save."""
    return f"parts/rank_{rank:05d}.json"


def error_name(rank: int) -> str:
    """A rank's error record, relative to the save."""
    return f"parts/rank_{rank:05d}.error.json"


def _part_names(path: str) -> list[str]:
    try:
        return os.listdir(os.path.join(path, "parts"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _failure_in(path: str) -> Reason | None:
    for name in sorted(_part_names(path)):
        if re.fullmatch(r"rank_\d{5,}\.error\.json", name):
            document = _read_sealed(os.path.join(path, "parts", name))
            if document is not None:
                return Reason.from_document(document)
    return None


def _vanished(save: SaveId) -> Reason:
    return Reason(None, "SaveAbandonedError", f"save {save.name} was given up; its record is not there (cleaned up?)")


def _saves(names: list[str]) -> list[SaveId]:
    saves = (parse_save_name(name) for name in names)
    return sorted((save for save in saves if save is not None), key=lambda save: (save.step, save.epoch, save.token))


def _read_sealed(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return unseal(data, path)
