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
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointExistsError, FencedError, StorageError
from ckpt.native import crc32c
from ckpt.storage import directories, files
from ckpt.storage.directories import DirectoryLock, Rename, try_lock_exclusive
from ckpt.storage.documents import seal, unseal
from ckpt.storage.names import SaveId, part_name
from ckpt.storage.root import FORMAT_VERSION, INTENT, CheckpointRoot, read_document, read_sealed, remove_directories_in

__all__ = ["Abandoned", "NotDurableError", "Outcome", "PendingSave", "Published", "Reason"]

_REASON = "reason.json"
_RECORD_GRACE_S = 1.0


class NotDurableError(StorageError):
    """The step is published, but a sync after the commit failed: it may not survive a loss of power."""


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
        directories.make_directories(self.root.pending_path, f"{self.save.name}/parts")
        directories.fsync_directory(self.path)
        try:
            self.check_token()  # only now: a job that claims the root later sees the directory
        except FencedError:
            directories.remove_tree(self.path)
            raise
        intent = {"format": FORMAT_VERSION, "save": self.save.name, "step": self.save.step, "owner": self.save.owner}
        intent |= {"world_size": world_size, "plan": plan_digest, "continues": continues}
        if not files.create_exclusive(os.path.join(self.path, INTENT), seal(intent)):
            raise StorageError(f"save {self.save.name} has begun already: two jobs write to {self.root.path}")
        directories.fsync_directory(self.root.pending_path)
        if os.path.lexists(self._abandoned_path):  # meanwhile another rank gave up a save that it did not find
            directories.remove_tree(self.path)
            raise StorageError(f"save {self.save.name} was abandoned while it began")

    def has_begun(self) -> bool:
        """Whether it has begun, and is not decided."""
        return os.path.exists(os.path.join(self.path, INTENT))

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
        return self._read(INTENT)

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
        data = read_document(path)
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
            result = directories.rename_directory(self.path, self.root.step_path(self.save.step))
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
            directories.fsync_directory(self.root.path)
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
            directories.make_directories(
                self.root.pending_path, self.save.name
            )  # it leaves a record, which `begin` finds
        recorded = self._record(self.path, reason)  # before the rename: who sees the decision, sees the reason
        result = directories.rename_directory(self.path, self._abandoned_path)
        if result is Rename.DONE and not recorded:
            remove_directories_in(self._abandoned_path)  # makes room where the disk is full
            self._record(self._abandoned_path, reason)
        elif result is Rename.TARGET_EXISTS:
            directories.remove_tree(self.path)  # a late writer's storage driver brought back what was abandoned before
        outcome = self.outcome()
        if isinstance(outcome, Published):
            self._forget_reasons()
        if outcome is None or outcome == Abandoned(_vanished(self.save)):
            return Abandoned(reason)
        return outcome

    def outcome(self) -> Outcome:
        """What was decided, as far as storage tells."""
        if os.path.exists(os.path.join(self.path, INTENT)):
            return None
        published = read_sealed(os.path.join(self.root.step_path(self.save.step), INTENT))
        if published is not None and published.get("save") == self.save.name:
            return Published()
        if os.path.isdir(self._abandoned_path):
            document = read_sealed(os.path.join(self._abandoned_path, _REASON))
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
        return read_sealed(os.path.join(self.path, name))


def _part_names(path: str) -> list[str]:
    try:
        return os.listdir(os.path.join(path, "parts"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _vanished(save: SaveId) -> Reason:
    return Reason(
        None,
        "SaveAbandonedError",
        f"save {save.name} was given up and left no record of the reason (removed by hand, or no space to write it)",
    )
