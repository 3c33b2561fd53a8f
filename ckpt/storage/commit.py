"""The decision about a save: published as a whole, or abandoned for ever. One atomic rename, no communication.

    <root>/.pending/<save>/    being written; can be published only while it holds intent.json
        intent.json                 made once, by the coordinator, before any writer starts
        parts/rank_00000.json       a rank's part is durable
    <root>/step_00000100/      published: the same directory under its final name
    <root>/.abandoned/<save>/  given up: the same directory, and nobody will ever read its arrays
        reason.json                 why, for all ranks; stays for a while when the rest is removed

Publishing renames ``.pending/<save>`` to ``step_N``, abandoning renames it to ``.abandoned/<save>``. Whoever tries,
however often and however late: exactly one of the two can happen, and every rank learns which by looking. Everyone who
works on a pending save holds a shared lock on its directory, so that a later start of the job can tell a save being
finished from one left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import files
from ckpt.storage.checksums import crc32c
from ckpt.storage.documents import seal, unseal
from ckpt.storage.files import Rename, storage_errors
from ckpt.storage.locks import (
    ByteLock,
    DirectoryLock,
    lock_shared,
    locked_bytes,
    try_lock_byte,
    try_lock_exclusive,
)

__all__ = [
    "Abandoned",
    "CheckpointRoot",
    "Outcome",
    "PendingSave",
    "Published",
    "Reason",
    "SaveId",
    "parse_save_name",
    "plan_of_step",
    "read_part_of_step",
]

FORMAT_VERSION = 1
_INTENT = "intent.json"
_REASON = "reason.json"
_RECORDS_STAY_S = 3600.0
_RECORD_GRACE_S = 1.0

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
        target = os.path.join(self.abandoned_path, f"{step_name(step)}-removed-{os.getpid()}")
        if not self.rename_step(step, target):
            return False
        files.remove_tree(target)
        return True

    def rename_step(self, step: int, target: str) -> bool:
        """Take a published step, if it is there, from all who read; False if somebody is reading it."""
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
            files.rename_directory(path, target)
        return True

    def clean(self) -> None:
        """Free the space of abandoned saves and interrupted removals that nobody uses any more.

        Ranks learn from its record that a save was abandoned, and why, so records stay for `_RECORDS_STAY_S`.
        """
        for name in self._names(self.abandoned_path):
            path = os.path.join(self.abandoned_path, name)
            try:
                is_record = parse_save_name(name) is not None
                old = time.time() - os.stat(path).st_mtime > _RECORDS_STAY_S
                lock = try_lock_exclusive(path)
            except (OSError, StorageError):
                continue  # somebody else was faster
            if lock is not None:
                with lock:
                    if is_record and not old:
                        _strip(path)
                    else:
                        files.remove_tree(path)

    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to."""
        self.make()
        files.check_writable(self.pending_path)


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
        if not files.create_exclusive(os.path.join(self.path, _INTENT), seal(intent)):
            raise StorageError(f"save {self.save.name} has begun already: two jobs write to {self.root.path}")
        files.fsync_directory(self.root.pending_path)
        if os.path.lexists(self._abandoned_path):  # meanwhile another rank gave up a save that it did not find
            files.remove_tree(self.path)
            raise StorageError(f"save {self.save.name} was abandoned while it began")
        return lock

    def join(self) -> DirectoryLock | None:
        """Take part in a save that has begun: a lock, or None while it has not begun (or is decided)."""
        if not os.path.exists(os.path.join(self.path, _INTENT)):
            return None
        try:
            return lock_shared(self.path)
        except StorageError:
            return None

    def work_as(self, number: int) -> ByteLock | None:
        """Let others see that somebody works on this save as rank `number`; None if somebody does already.

        StorageError if the save is gone.
        """
        return try_lock_byte(os.path.join(self.path, _INTENT), number)

    def workers(self, numbers: Iterable[int]) -> set[int] | None:
        """Return as which of these ranks somebody works on the save; None where that cannot be known."""
        return locked_bytes(os.path.join(self.path, _INTENT), numbers)

    def intent(self) -> dict[str, Any] | None:
        """The intent, None if there is none. CheckpointCorruptError if it is damaged."""
        return self._read(_INTENT)

    def write_part(self, rank: int, document: dict[str, Any]) -> int:
        """Say that this rank's part is whole and durable; return the checksum of the file. StorageError when the save
        is gone."""
        data = seal(document)
        files.write_durable(os.path.join(self.path, part_name(rank)), data)
        return crc32c(data)

    def parts_present(self) -> set[int]:
        """The ranks whose part is there."""
        return {int(name[5:10]) for name in _part_names(self.path) if re.fullmatch(r"rank_\d{5,}\.json", name)}

    def read_part(self, rank: int) -> tuple[dict[str, Any], int]:
        """A rank's part manifest, and the checksum of its file. CheckpointCorruptError if it is damaged or missing."""
        path = os.path.join(self.path, part_name(rank))
        data = _read(path)
        if data is None:
            raise CheckpointCorruptError(f"{path} is missing")
        return unseal(data, path), crc32c(data)

    def publish(self) -> Outcome:
        """The commit. Published or Abandoned, whoever decided it; None if the step is published with another save's
        content.

        Everything in the directory is durable before this is called.
        """
        if not os.path.exists(os.path.join(self.path, _INTENT)):
            return self.outcome() or Abandoned(_vanished(self.save))
        result = files.rename_directory(self.path, self.root.step_path(self.save.step))
        if result is Rename.TARGET_EXISTS:
            return None
        if result is Rename.DONE:
            self._forget_reasons()
        return self.outcome() or Abandoned(_vanished(self.save))

    def _forget_reasons(self) -> None:
        """Remove what ranks that tried to give the save up have left in the published step, too late or killed.

        Nothing more can come: they write by the path the save had before.
        """
        path = self.root.step_path(self.save.step)
        with contextlib.suppress(OSError, StorageError):
            for name in os.listdir(path):
                if name == _REASON or name.startswith(f".{_REASON}."):
                    files.remove(os.path.join(path, name))

    def abandon(self, reason: Reason) -> Published | Abandoned:
        """Give the save up, also before it has begun. Published if it was too late for that.

        The answer has the reason that all ranks find. Raises StorageError when nothing can be decided.
        """
        self.root.make()
        if not os.path.isdir(self.path):
            if (outcome := self._explained()) is not None:
                return outcome
            files.make_directories(self.root.pending_path, self.save.name)  # it leaves a record, which `begin` finds
        recorded = self._record(self.path, reason)  # before the rename: who sees the decision, sees the reason
        result = files.rename_directory(self.path, self._abandoned_path)
        if result is Rename.DONE and not recorded:
            _strip(self._abandoned_path)  # makes room where the disk is full
            self._record(self._abandoned_path, reason)
        elif result is Rename.TARGET_EXISTS:
            files.remove_tree(self.path)  # a late writer's storage driver brought back what was abandoned before
        outcome = self.outcome()
        if isinstance(outcome, Published):
            self._forget_reasons()
        if outcome is None or outcome == Abandoned(_vanished(self.save)):
            return Abandoned(reason)
        return outcome

    def outcome(self) -> Outcome:
        """What was decided, as far as storage tells."""
        if os.path.exists(os.path.join(self.path, _INTENT)):
            return None
        published = _read_sealed(os.path.join(self.root.step_path(self.save.step), _INTENT))
        if published is not None and published.get("save") == self.save.name:
            return Published()
        if os.path.isdir(self._abandoned_path):
            document = _read_sealed(os.path.join(self._abandoned_path, _REASON))
            return Abandoned(_vanished(self.save) if document is None else Reason.from_document(document))
        return None

    def _explained(self) -> Published | Abandoned | None:
        """The outcome; when its reason is just being recorded (late, because the disk was full), with that reason."""
        unexplained = Abandoned(_vanished(self.save))
        deadline = time.monotonic() + _RECORD_GRACE_S
        while (outcome := self.outcome()) == unexplained and time.monotonic() < deadline:
            time.sleep(0.01)
        return outcome

    def decided(self) -> Outcome:
        """Like `outcome`, for those who joined the save: when it is nowhere, somebody has removed it."""
        outcome = self._explained()
        if outcome is None and not os.path.isdir(self.path):
            return self.outcome() or Abandoned(_vanished(self.save))
        return outcome

    def _record(self, where: str, reason: Reason) -> bool:
        try:
            files.write_durable(os.path.join(where, _REASON), seal(reason.to_document()))
        except StorageError:
            return False
        return True

    def _read(self, name: str) -> dict[str, Any] | None:
        return _read_sealed(os.path.join(self.path, name))


def read_part_of_step(path: str, rank: int) -> dict[str, Any]:
    """The part manifest of a rank, of the published step in directory `path`. CheckpointCorruptError if it is damaged
    or missing."""
    document = _read_sealed(os.path.join(path, part_name(rank)))
    if document is None:
        raise CheckpointCorruptError(f"{path}/{part_name(rank)} is missing")
    return document


def plan_of_step(path: str) -> str | None:
    """The digest of the plan of the published step in directory `path`; None if nothing tells."""
    try:
        intent = _read_sealed(os.path.join(path, _INTENT))
    except CheckpointCorruptError:
        return None
    return None if intent is None else intent.get("plan")


def part_name(rank: int) -> str:
    """A rank's part manifest, relative to the save."""
    return f"parts/rank_{rank:05d}.json"


def _part_names(path: str) -> list[str]:
    try:
        return os.listdir(os.path.join(path, "parts"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _strip(path: str) -> None:
    """Remove all directories in `path`, whoever may still write there."""
    with storage_errors("clean up", path), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                files.remove_tree(entry.path)


def _vanished(save: SaveId) -> Reason:
    return Reason(
        None,
        "SaveAbandonedError",
        f"save {save.name} was given up and left no record of the reason (removed by hand, or no space to write it)",
    )


def _saves(names: list[str]) -> list[SaveId]:
    saves = (parse_save_name(name) for name in names)
    return sorted((save for save in saves if save is not None), key=lambda save: (save.step, save.epoch, save.token))


def _read_sealed(path: str) -> dict[str, Any] | None:
    data = _read(path)
    return None if data is None else unseal(data, path)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
