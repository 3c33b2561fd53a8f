"""The commit of a save: published as a whole, or abandoned for good, by one atomic rename.

Publishing renames ``.pending/<save>`` to ``step_N``, abandoning renames it to ``.abandoned/<save>`` (see `root`).
Exactly one of the two can happen, however many processes try, however late. No communication is needed: every rank
learns the outcome by looking at the directories. Only a process that acts with the owner's token tries.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckpt.errors import FencedError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage import directories, files
from ckpt.storage.attempts import until_written
from ckpt.storage.directories import Rename
from ckpt.storage.directory_root import DirectoryRoot, take_recycled
from ckpt.storage.documents import INTENT, encode_document, read_json, well_formed
from ckpt.storage.interface import NO_LINEAGE, Pending
from ckpt.storage.links import refuse_link
from ckpt.storage.names import SaveId, part_rank, step_name
from ckpt.storage.outcomes import Abandoned, NotDurableError, Published, SaveOutcome, unknown_reason
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.parts_watch import PartsWatch
from ckpt.storage.step_source import LocalStep
from inprocess.ipc.deadline import Deadline

__all__ = ["Abandoned", "NotDurableError", "PartsWatch", "PendingSave", "Published", "SaveOutcome"]

_REASON = "reason.json"
_LOOK_BEFORE_BEGIN = 6  # operations of a look for the outcome; later it is one
_RECORD_GRACE_S = 1.0  # to wait for the reason of an abandoned save


class PendingSave(Pending):
    """A save in a directory. See `Pending`."""

    root: DirectoryRoot

    def __init__(self, root: DirectoryRoot, save: SaveId, token: int | None = None) -> None:
        source = LocalStep(os.path.join(root.pending_path, save.name))
        super().__init__(root, save, token, source, step_name(save.step))
        self._abandoned_path = os.path.join(root.abandoned_path, save.name)

    def begin(
        self,
        world_size: int,
        plan_digest: str,
        continues: dict[str, Any] | None = None,
        superseded: Collection[int] = (),
        lineage: Mapping[str, Any] = NO_LINEAGE,
    ) -> None:
        """Make the directory and its intent. See `Pending.begin`."""
        if self.was_abandoned():
            raise StorageError(f"save {self.save.name} was abandoned before it began")
        if self.save.step not in superseded and files.exists(self.root.step_path(self.save.step)):
            raise self.already_published()
        self.root.make()
        self._make_directories(self.root.pending_path, f"{self.save.name}/parts")
        directories.fsync_directory(self.path)
        intent = self._intent(world_size, plan_digest, continues, lineage)
        if not files.create_exclusive(os.path.join(self.path, INTENT), intent, self.tries_again):
            raise StorageError(f"save {self.save.name} has begun already: two jobs write to {self.root.path}")
        directories.fsync_directory(self.root.pending_path)
        try:
            self.check_token()  # after making the intent: a job that claims the root later sees it
        except FencedError:
            directories.remove_tree(self.path)
            raise
        if self.was_abandoned():  # meanwhile by another rank; then the directory may have been made anew by a late one
            directories.remove_tree(self.path)
            raise StorageError(f"save {self.save.name} was abandoned while it began")

    def join(self) -> None:
        """Make the directory, unless it is there, so that a rank can write before the coordinator has begun the save.

        StorageError if the save is abandoned. The record of that is looked at after the directory was made: so a save
        that is abandoned before or meanwhile has no directory afterwards, or none in which all parts can appear.
        """
        self._make_directories(self.root.pending_path, self.save.name)
        if self.was_abandoned():
            directories.remove_tree(self.path)
            raise StorageError(f"save {self.save.name} was abandoned before this rank could write its part")

    def _make_directories(self, root: str, relative: str) -> list[str]:
        return until_written(lambda: directories.make_directories(root, relative), self.tries_again)

    def was_abandoned(self) -> bool:
        """Return whether there is a record that the save was abandoned. One look. StorageError if it fails."""
        return files.exists(self._abandoned_path)

    def has_begun(self) -> bool:
        """Return whether the save has begun and is not decided. StorageError if that cannot be told."""
        return files.exists(os.path.join(self.path, INTENT))

    def ranks_in(self, directory: str) -> set[int]:
        """See `Pending.ranks_in`."""
        found: set[int] = set()
        for name in directories.names_in(os.path.join(self.path, directory)):
            if (rank := part_rank(name)) is not None:
                found.add(rank)
            elif name.isdigit():
                found |= self.ranks_in(f"{directory}/{name}")
        return found

    def write_documents(self, documents: Mapping[str, bytes]) -> None:
        """See `Pending.write_documents`. Documents of recycled files that hold the same are not written."""
        refuse_link(self.path)
        for name, data in documents.items():
            path = os.path.join(self.path, name)
            if not files.holds(path, data):
                write = functools.partial(files.write_document, path, data, self.root.pending_path)
                until_written(write, self.tries_again)
        parts = os.path.join(self.path, "parts")
        folders = [parts, *(os.path.join(parts, name) for name in directories.names_in(parts)), self.path]
        files.sync_files([os.path.join(self.path, name) for name in documents], folders)

    def write_file(self, name: str, data: memoryview) -> None:
        """See `Pending.write_file`."""
        made = self._make_directories(refuse_link(self.path), os.path.dirname(name))
        files.write_durable(os.path.join(self.path, name), data, self.tries_again)
        if part_rank(os.path.basename(name)) is None:  # else `write_documents` syncs them, once for all ranks
            for path in made[:-1]:
                directories.fsync_directory(path)

    def take_recycled(self, plan: str, names: Iterable[str]) -> None:
        """See `Pending.take_recycled`."""
        take_recycled(self, self.root, plan, names)

    def pack_writer(self, rank: int, *, threads: int, reuse: bool) -> PackWriter:
        """See `Pending.pack_writer`."""
        return PackWriter(self.path, rank, threads=threads, reuse=reuse)

    def publish(self) -> Published | Abandoned:
        """Commit the save, unless it is decided already, and return the outcome.

        Everything in the directory must be durable before. Raises CheckpointExistsError if another save has published
        the step, NotDurableError if this one is published but perhaps not durable.
        """
        self.check_token()
        refuse_link(self.path)
        if not self.has_begun():
            decided = self.outcome() or Abandoned(unknown_reason(self.save))
            if isinstance(decided, Published):
                self.confirm()
            return decided
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
            self._remove_reasons()
        outcome = self.outcome() or Abandoned(unknown_reason(self.save))
        if result is not Rename.DONE and isinstance(outcome, Published):
            self.confirm()  # another process renamed it, or a network file system repeated this rename
        return outcome

    def _remove_reasons(self) -> None:
        """Remove reasons from the published step, left by ranks that tried to abandon the save, too late or killed.

        No more can follow: they are written by the path that the save had before.
        """
        path = self.root.step_path(self.save.step)
        with contextlib.suppress(OSError, StorageError):
            for name in os.listdir(refuse_link(path)):
                if name == _REASON or name.startswith(f".{_REASON}."):
                    files.remove(os.path.join(path, name))

    def abandon(self, reason: Failure) -> Published | Abandoned:
        """Abandon the save, which need not have begun, unless it is decided already, and return the outcome.

        Its reason is the one that all ranks find. Raises StorageError if nothing can be decided.
        """
        self.check_token()
        self.root.make()
        if not files.is_directory(refuse_link(self.path)):
            if (outcome := self._outcome_with_reason()) is not None:
                return self._explained(outcome, reason)
            directories.make_directories(self.root.pending_path, self.save.name)  # the record of it stops `begin`
        recorded = self._write_reason(
            self.path, reason
        )  # before the rename: who sees the decision also sees the reason
        result = directories.rename_directory(self.path, self._abandoned_path)
        if result is Rename.DONE and not recorded:
            directories.remove_subdirectories(self._abandoned_path)  # makes room if the disk is full
            self._write_reason(self._abandoned_path, reason)
        elif result is Rename.TARGET_EXISTS:
            directories.remove_tree(
                self.path
            )  # a late writer's storage driver has made the directory of an abandoned save again
        outcome = self.outcome()
        if isinstance(outcome, Published):
            self._remove_reasons()
        return Abandoned(reason) if outcome is None else self._explained(outcome, reason)

    def _explained(self, outcome: Published | Abandoned, reason: Failure) -> Published | Abandoned:
        """Return the outcome, with this reason if storage has none. The record is made if there is room by now."""
        if isinstance(outcome, Published) or outcome.is_explained:
            return outcome
        if reason.is_known:
            self._write_reason(self._abandoned_path, reason)
        return Abandoned(reason)

    def outcome(self) -> SaveOutcome:
        """Return the outcome as found in storage. StorageError if that cannot be read."""
        if self.has_begun():
            return None
        published = read_json(os.path.join(self.root.step_path(self.save.step), INTENT))
        if published is not None and published.get("save") == self.save.name:
            return Published()
        if files.is_directory(self._abandoned_path):
            where = os.path.join(self._abandoned_path, _REASON)
            document = read_json(where)
            with well_formed(where):
                return Abandoned(unknown_reason(self.save) if document is None else Failure.from_document(document))
        return None

    def _outcome_with_reason(self) -> Published | Abandoned | None:
        """Return the outcome; wait shortly for its reason, which is recorded late if the disk was full."""
        deadline = Deadline(_RECORD_GRACE_S)
        while isinstance(outcome := self.outcome(), Abandoned) and not outcome.is_explained and not deadline.is_over:
            time.sleep(0.01)
        return outcome

    def decided(self) -> SaveOutcome:
        """Return the outcome, for ranks that have joined the save: if it does not exist any more, it was removed.

        One look while the save is begun and not decided, at most five before that.
        """
        if self.has_begun():
            return None
        outcome = self._outcome_with_reason()
        if outcome is None and not files.is_directory(self.path):
            return self.outcome() or Abandoned(unknown_reason(self.save))
        return outcome

    def look(self) -> tuple[SaveOutcome, int]:
        """See `Pending.look`."""
        return (None, 1) if self.has_begun() else (self.decided(), _LOOK_BEFORE_BEGIN)

    def _write_reason(self, where: str, reason: Failure) -> bool:
        try:
            files.write_durable(os.path.join(where, _REASON), encode_document(reason.to_document()))
        except StorageError:
            return False
        return True
