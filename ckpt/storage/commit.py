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
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointExistsError, FencedError, StorageError
from ckpt.storage import files
from ckpt.storage.checksums import crc32c
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, seal, unseal
from ckpt.storage.files import Rename, storage_errors
from ckpt.storage.locks import DirectoryLock, try_lock_exclusive
from ckpt.storage.ownership import Ownership
from ckpt.storage.readers import forget_readers, is_read
from ckpt.storage.regular_files import read_document_at

__all__ = [
    "Abandoned",
    "CheckpointRoot",
    "NotDurableError",
    "Outcome",
    "PendingSave",
    "Published",
    "Reason",
    "SaveId",
    "intent_of_step",
    "owner_of_step",
    "parse_save_name",
    "read_part_of_step",
]

FORMAT_VERSION = 1
_INTENT = "intent.json"
_REASON = "reason.json"
_RECORDS_STAY_S = 3600.0
_RECORD_GRACE_S = 1.0
_VISIBLE_S, _PAUSE_S = 5.0, 0.05  # how long a file system may take to show one node what another wrote

_STEP = re.compile(r"step_(\d{8,18})")
_SAVE = re.compile(r"step_(\d{8,18})-o(\d+)-([0-9a-f]{16})")
_TAKEN = re.compile(r"(step_\d{8,18})-removed-(\d+)-[0-9a-f]+")
_NO_TOKEN = 10**18  # of a mover that is not told from the owner


class NotDurableError(StorageError):
    """The step is published, but a sync after the commit failed: it may not survive a loss of power."""


@dataclass(frozen=True, slots=True)
class SaveId:
    """One attempt to save one step. `owner` is the token of the job that saves; `nonce` tells the attempt from every
    other one. All ranks derive the same without communication."""

    step: int
    owner: int
    nonce: str

    @property
    def name(self) -> str:
        """The directory of the save while it is not published."""
        return f"{step_name(self.step)}-o{self.owner}-{self.nonce}"


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
        return sorted(int(match[1]) for name in self._names(self.path) if (match := _STEP.fullmatch(name)))

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
        files.remove_tree(target)
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
        files.rename_directory(path, os.path.join(self.path, taken[1]))
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
            files.rename_directory(path, target)
        return True

    def move_aside(self, step: int, where: str) -> str | None:
        """Move a published step to directory `where`, durably, though it may be read; the path it has then.

        None if it is not there. Nothing is removed. For the owner.
        """
        path = self.step_path(step)
        with storage_errors("make directory", where), contextlib.suppress(FileExistsError):
            os.mkdir(where)
        files.fsync_directory(self.path)
        name = str((intent_of_step(path) or {}).get("save", ""))
        if parse_save_name(name) is None:
            name = step_name(step)
        target = os.path.join(where, name)
        while (result := files.rename_directory(path, target)) is Rename.TARGET_EXISTS:
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
                    _strip(path)
                elif not self.give_back(path):
                    files.remove_tree(path)
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
        files.check_writable(self.pending_path)

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
        files.check_writable(self.pending_path)


class PendingSave:
    """One save of a root, as seen by a process that takes part in it, or that decides about it with the owner's `token`
    (that of the save, unless another is given). What changes anything raises FencedError if that is the token no more.
    """

    def __init__(self, root: CheckpointRoot, save: SaveId, token: int | None = None) -> None:
        self.root = root
        self.save = save
        self.path = os.path.join(root.pending_path, save.name)
        self._token = save.owner if token is None else token
        self._abandoned_path = os.path.join(root.abandoned_path, save.name)

    def check_token(self) -> None:
        """Raise FencedError if a later job owns the root."""
        self.root.ownership.check(self._token)

    def begin(
        self,
        world_size: int,
        plan_digest: str,
        continues: dict[str, Any] | None = None,
        superseded: Collection[int] = (),
    ) -> None:
        """Make the directory and its intent. Coordinator only, once, before any other writer starts.

        `continues` is the step that training went on from, and its save. The steps `superseded` are moved aside before
        the save is published. StorageError if it has been begun or
        abandoned before, CheckpointExistsError if the step is published.
        """
        if os.path.lexists(self._abandoned_path):
            raise StorageError(f"save {self.save.name} was abandoned before it began")
        if self.save.step not in superseded and os.path.lexists(self.root.step_path(self.save.step)):
            raise self.already_published()
        self.root.make()
        files.make_directories(self.root.pending_path, f"{self.save.name}/parts")
        files.fsync_directory(self.path)
        try:
            self.check_token()  # only now: a job that claims the root later sees the directory
        except FencedError:
            files.remove_tree(self.path)
            raise
        intent = {"format": FORMAT_VERSION, "save": self.save.name, "step": self.save.step, "owner": self.save.owner}
        intent |= {"world_size": world_size, "plan": plan_digest, "continues": continues}
        if not files.create_exclusive(os.path.join(self.path, _INTENT), seal(intent)):
            raise StorageError(f"save {self.save.name} has begun already: two jobs write to {self.root.path}")
        files.fsync_directory(self.root.pending_path)
        if os.path.lexists(self._abandoned_path):  # meanwhile another rank gave up a save that it did not find
            files.remove_tree(self.path)
            raise StorageError(f"save {self.save.name} was abandoned while it began")

    def has_begun(self) -> bool:
        """Whether it has begun, and is not decided."""
        return os.path.exists(os.path.join(self.path, _INTENT))

    def try_lock(self) -> DirectoryLock | None:
        """Keep others on this host from doing the same work; None if one does already. StorageError if the save is
        gone."""
        return try_lock_exclusive(os.path.join(self.path, "parts"))

    def already_published(self) -> CheckpointExistsError:
        """The error for a step that is published by another save."""
        return CheckpointExistsError(
            f"step {self.save.step} is already published in {self.root.path}; save under another step, or remove that "
            f"one first (Checkpointer.delete, or inspect_ckpt rm)",
            step=self.save.step,
        )

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

    def publish(self) -> Published | Abandoned:
        """The commit. Published or Abandoned, whoever decided it.

        Everything in the directory is durable before this is called. CheckpointExistsError if the step is published by
        another save, NotDurableError if this one is published, but perhaps not durably.
        """
        self.check_token()
        if not self.has_begun():
            return self.outcome() or Abandoned(_vanished(self.save))
        try:
            result = files.rename_directory(self.path, self.root.step_path(self.save.step))
        except StorageError as error:
            if self.outcome() == Published():
                raise NotDurableError(
                    f"step {self.save.step} is published, but {error}: it may not survive a loss of power. Older steps "
                    "were kept; check the storage",
                    step=self.save.step,
                ) from error
            raise
        if result is Rename.TARGET_EXISTS:
            raise self.already_published()
        if result is Rename.DONE:
            self._forget_reasons()
        outcome = self.outcome() or Abandoned(_vanished(self.save))
        if result is not Rename.DONE and isinstance(outcome, Published):
            self.confirm()  # another process renamed it, or this one did, and the call was repeated
        return outcome

    def confirm(self) -> None:
        """Make the publication durable as seen from here, by a rank that did not publish. NotDurableError."""
        try:
            files.fsync_directory(self.root.path)
        except StorageError as error:
            raise NotDurableError(
                f"step {self.save.step} is published, but {error}: it may not survive a loss of power",
                step=self.save.step,
            ) from error

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
        self.check_token()
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
        """Like `outcome`, for those who joined the save: when it is nowhere, it was removed."""
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


def intent_of_step(path: str) -> dict[str, Any] | None:
    """What was to be saved as the published step in directory `path`; None if nothing tells."""
    try:
        return _read_sealed(os.path.join(path, _INTENT))
    except CheckpointError:
        return None


def owner_of_step(path: str) -> int:
    """The token of the owner that published the step in directory `path`; 0 if nothing tells."""
    save = parse_save_name(str((intent_of_step(path) or {}).get("save", "")))
    return 0 if save is None else save.owner


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
    return sorted((save for save in saves if save is not None), key=lambda save: (save.step, save.owner, save.nonce))


def _read_sealed(path: str) -> dict[str, Any] | None:
    data = _read(path)
    return None if data is None else unseal(data, path)


def _read(path: str) -> bytes | None:
    return read_document_at(path, MAX_DOCUMENT_BYTES)
