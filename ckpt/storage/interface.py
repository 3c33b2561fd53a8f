"""What saving, loading and restarts need of a checkpoint root, whatever it is stored in.

    Root              the published steps (`published_steps`), the saves on their way there, and who owns them
      PendingSave     one save until it is decided: published or abandoned, and that is final
        PackWriter    writes the files of one rank
      HeldStep        one published step while it is read
        StepSource    its files

`root.CheckpointRoot` is in a directory, `store_root.StoreRoot` in a store: a bucket, or any other backend of the eight
operations in `stores.interface`. `roots.open_root` tells them apart.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from ckpt.errors import CheckpointCorruptError, CheckpointExistsError, StorageError
from ckpt.native import crc32c
from ckpt.ranks.failure import Failure
from ckpt.storage.attempts import TriesAgain, never
from ckpt.storage.documents import FORMAT_VERSION, INTENT, checked_intent, decode_document, encode_document
from ckpt.storage.names import SaveId, parse_save_name, part_name
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.outcomes import (
    Abandoned,
    Aside,
    MovedStep,
    MovedTo,
    NotDurableError,
    Published,
    SaveOutcome,
    find_moved,
)
from ckpt.storage.ownership import Ownership
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.published_steps import PublishedSteps
from ckpt.storage.step_source import StepSource, read_document
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.deadline import Deadline

__all__ = ["NO_LINEAGE", "Aside", "MovedStep", "Pending", "Root"]

_VISIBLE_S, _PAUSE_S = 5.0, 0.05  # a network file system may take so long to show a file to another node

NO_LINEAGE: Mapping[str, Any] = MappingProxyType({"restart": None, "metrics": {}, "versions": {}})


class Pending(ABC):
    """A save that may not be decided yet, as seen by one of its ranks or by the process that decides about it.

    It acts with the owner's token (that of the save by default). Methods that change anything raise FencedError if a
    later job owns the root. `path` says where it is, in messages, and `source` has the files that were written so far.
    `decision` is the key, in the store of the root, of what says that the save is published.
    """

    def __init__(self, root: Root, save: SaveId, token: int | None, source: StepSource, decision: str) -> None:
        self.root = root
        self.save = save
        self.path = source.path
        self.source = source
        self._token = save.owner if token is None else token
        self._decision = decision
        self.tries_again: TriesAgain = never
        """Whether files in a directory are written again; a store tries again by itself."""
        self._own: dict[str, bytes] = {}  # documents that this object has written, and need not read

    def check_token(self) -> None:
        """Raise FencedError if a later job owns the root."""
        self.root.ownership.check(self._token)

    # -- writing -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(
        self,
        world_size: int,
        plan_digest: str,
        continues: dict[str, Any] | None = None,
        superseded: Collection[int] = (),
        lineage: Mapping[str, Any] = NO_LINEAGE,
    ) -> None:
        """Record the intent: without one nothing is published. Coordinator only, once.

        `continues` is the step, and its save, that training continued from; `lineage` has what else is recorded of the
        save. The steps `superseded` are moved aside before the save is published. Raises StorageError if the save was
        begun or abandoned before, CheckpointExistsError if the step is published.
        """

    def _intent(
        self, world_size: int, plan_digest: str, continues: dict[str, Any] | None, lineage: Mapping[str, Any]
    ) -> bytes:
        """Return the intent as a document; see `begin`."""
        intent = {"format": FORMAT_VERSION, "save": self.save.name, "step": self.save.step, "owner": self.save.owner}
        return encode_document(
            intent | {"world_size": world_size, "plan": plan_digest, "continues": continues, **lineage}
        )

    @abstractmethod
    def join(self) -> None:
        """Let a rank write before the coordinator has begun the save. StorageError if the save is abandoned."""

    def take_recycled(self, plan: str, names: Iterable[str]) -> None:  # noqa: B027 - not every root has some
        """Give the save recycled files with these names, if the root has some of the plan."""

    @abstractmethod
    def pack_writer(self, rank: int, *, threads: int, reuse: bool) -> PackWriter:
        """Return what writes the pack of a rank; with `reuse` over existing files."""

    @abstractmethod
    def write_file(self, name: str, data: memoryview) -> None:
        """Write or replace a file, whole or not at all, durably. StorageError if the save does not exist any more.

        A part manifest is durable when `write_documents` has returned after it.
        """

    def write_part(self, rank: int, document: dict[str, Any]) -> int:
        """Record that this rank's part is complete and durable, and return the checksum of the manifest.

        StorageError if the save does not exist any more.
        """
        data = encode_document(document)
        self.write_file(part_name(rank), memoryview(data))
        return crc32c(data)

    def write_documents(self, documents: Mapping[str, bytes]) -> None:
        """Write documents of the whole step, by their names, and make all that was written durable."""
        for name, data in documents.items():
            self.write_file(name, memoryview(data))

    # -- reading -------------------------------------------------------------------------------------------------------

    def intent(self) -> dict[str, Any] | None:
        """Return the intent; None if there is none. CheckpointCorruptError if it is damaged."""
        data, where = self._document(INTENT), os.path.join(self.path, INTENT)
        return None if data is None else checked_intent(decode_document(data, where), where)

    def has_begun(self) -> bool:
        """Return whether the save has begun and is not decided. StorageError if that cannot be told."""
        return self._document(INTENT) is not None and self.outcome() is None

    def begun_s(self) -> float:
        """Return when the save began, or else was written to last (seconds since 1970). StorageError if it is gone."""
        began = self.source.changed_s(INTENT) or self.source.usage()[1]
        if not began:
            raise StorageError(f"{self.path} does not exist any more")
        return began

    @abstractmethod
    def ranks_in(self, directory: str) -> set[int]:
        """Return the ranks whose part is complete, of those that have their parts below this directory.

        One look if no directories are in it.
        """

    def has_part(self, rank: int) -> bool:
        """Return whether the part of this rank is complete. One look."""
        return bool(self.source.changed_s(part_name(rank)))

    def parts_present(self) -> set[int]:
        """Return the ranks whose part is complete. Lists every directory of parts; to wait, use `PartsWatch`."""
        return self.ranks_in("parts")

    def read_part(self, rank: int) -> tuple[dict[str, Any], int]:
        """Return a rank's part manifest and its checksum. CheckpointCorruptError if it is damaged or missing."""
        data = self.read_document(part_name(rank))
        return decode_document(data, os.path.join(self.path, part_name(rank))), crc32c(data)

    def read_document(self, name: str) -> bytes:
        """Return the content of a document. CheckpointCorruptError if it is damaged or missing."""
        data = self._document(name)
        if data is None:
            raise CheckpointCorruptError(f"{os.path.join(self.path, name)} is missing")
        return data

    def _document(self, name: str) -> bytes | None:
        return self._own.get(name) or read_document(self.source, name)

    # -- the decision --------------------------------------------------------------------------------------------------

    @abstractmethod
    def publish(self) -> Published | Abandoned:
        """Commit the save, unless it is decided already, and return the outcome.

        Everything must be durable before. Raises CheckpointExistsError if another save has published the step,
        NotDurableError if this one is published but perhaps not durable.
        """

    def confirm(self) -> None:
        """Make the published step durable, from a rank that did not publish it. Raises NotDurableError."""
        try:
            self.root.store.sync(self._decision)
        except StorageError as error:
            raise NotDurableError(
                f"step {self.save.step} is published, but {error}: it may not survive a loss of power",
                step=self.save.step,
            ) from error

    @abstractmethod
    def abandon(self, reason: Failure) -> Published | Abandoned:
        """Abandon the save, which need not have begun, unless it is decided already, and return the outcome.

        Its reason is the one that all ranks find. Raises StorageError if nothing can be decided.
        """

    @abstractmethod
    def outcome(self) -> SaveOutcome:
        """Return the outcome as found in storage. StorageError if that cannot be read."""

    def decided(self) -> SaveOutcome:
        """Return the outcome, for ranks that have joined the save: if it does not exist any more, it was removed."""
        return self.outcome()

    def look(self) -> tuple[SaveOutcome, int]:
        """Return the outcome, as `decided`, and the number of operations that took."""
        return self.decided(), 1

    def already_published(self) -> CheckpointExistsError:
        """Return the error for a step that another save has published."""
        return CheckpointExistsError(
            f"step {self.save.step} is already published in {self.root.path}; save under another step, or remove that "
            f"one first (Checkpointer.delete, or inspect_ckpt rm)",
            step=self.save.step,
        )


class Root(PublishedSteps):
    """A checkpoint root. Makes nothing until a save begins. Any process, any thread.

    `options` is what else than its path or URL is needed to open it again in another process.
    """

    options: StorageOptions | None = None
    ownership: Ownership

    reuses_files: ClassVar[bool]
    """Whether a save can write over the files of a removed step."""

    removed_by_all: ClassVar[bool]
    """Whether each rank deletes its own files of removed steps, which are in directories; else the coordinator all."""

    least_look_s: ClassVar[float]
    """How long a process that waits lets pass between two looks, at least."""

    # -- what became of steps and saves --------------------------------------------------------------------------------

    @abstractmethod
    def moved(self, *states: MovedTo) -> list[MovedStep]:
        """Return the steps and saves that are in one of these states, by step and name."""

    def moved_aside(self) -> list[MovedStep]:
        """Return the steps that were moved aside, by step and name."""
        return self.moved("superseded", "damaged")

    def superseded(self) -> list[str]:
        """Return the names of the superseded steps, by step."""
        return [moved.name for moved in self.moved("superseded")]

    def abandoned(self) -> list[SaveId]:
        """Return the abandoned saves of which there is a record, lowest step first."""
        saves = (parse_save_name(moved.name) for moved in self.moved("abandoned"))
        return [save for save in saves if save is not None]

    def removed(self) -> list[MovedStep]:
        """Return the removed steps and abandoned saves that have files, which any rank may delete."""
        return [moved for moved in self.moved("abandoned", "removed") if moved.has_files]

    def removed_here(self) -> list[MovedStep] | None:
        """Return those of `removed` that this process has removed, without asking the storage; None if that is free."""
        return None

    @abstractmethod
    def move_aside(self, step: int, token: int, why: Aside) -> str | None:
        """Move a step aside, even if it is being read, and return where it is now. For the owner with `token`.

        None if it does not exist, or if a later owner has saved it meanwhile. FencedError if there is a later owner.
        """

    @abstractmethod
    def publish_again(self, name: str, token: int) -> None:
        """Make a step that was moved aside a published one again. For the owner with `token`.

        CheckpointNotFoundError if there is no such step, CheckpointExistsError if its number is published, FencedError
        if there is a later owner.
        """

    @abstractmethod
    def retire_step(self, step: int, token: int | None, plan: str | None = None) -> MovedStep | None:
        """Remove a published step, whose files are to be deleted; None if it is being read or pinned.

        A crash leaves it whole or removed. For the owner: with its `token`, raises FencedError if the step was saved by
        a later one. With `plan`, a save with this digest may write over the files instead.
        """

    @abstractmethod
    def delete(self, moved: MovedStep, before_each: Callable[[], None]) -> None:
        """Delete the files of what `moved` or `retire_step` has returned, but for the record of an abandoned save.

        `before_each` may wait, or raise. A step that was moved aside is removed so.
        """

    def remove_moved(self, name: str) -> None:
        """Remove a step that was moved aside. CheckpointNotFoundError if there is no such step."""
        self.delete(find_moved(self.moved_aside(), name, self.path), lambda: None)

    def remove_step(self, step: int, token: int | None = None) -> bool:
        """Remove a published step, with its files; False if it is being read or pinned. See `retire_step`."""
        moved = self.retire_step(step, token)
        if moved is not None:
            self.delete(moved, lambda: None)
        return moved is not None

    def retire_steps(
        self, steps: Sequence[int], token: int, plan: str | None = None, *, failed: dict[int, str]
    ) -> list[int]:
        """Do what `retire_step` does with published steps, as of the last `steps`, and return those it has removed.

        With `plan` no others than these can be written over any more. A step that the storage does not let go is
        entered in `failed`, with the reason, and the others are removed nevertheless.
        """
        pinned = self.pinned_steps()
        steps = [step for step in steps if step not in pinned]
        if steps and plan is not None:
            self.discard_recycled()  # the last save has taken from there what it could use
        removed = []
        for step in steps:
            try:
                if self.retire_step(step, token, plan) is not None:
                    removed.append(step)
            except StorageError as error:
                failed[step] = str(error)
        return removed

    def discard_recycled(self, keep: str | None = None) -> list[str]:
        """Let no save write over the files of removed steps any more, but those of the plan `keep`.

        Return the directories to delete.
        """
        del keep
        return []

    def clean(self) -> None:
        """Free the space of abandoned saves and interrupted removals, at once. For the owner.

        Writers that have not noticed that their save was abandoned may still write there: the next clean-up goes on.
        """
        self.clean_records()
        for moved in self.removed():
            with contextlib.suppress(StorageError):
                self.delete(moved, lambda: None)

    @abstractmethod
    def clean_records(self) -> None:
        """Remove what is small and of no use any more, and undo interrupted moves. For the owner."""

    # -- saves ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def pending(self) -> list[SaveId]:
        """Return the saves that are neither published nor abandoned, lowest step first."""

    @abstractmethod
    def is_gone(self, save: SaveId) -> bool | None:
        """Return whether a save was abandoned, or removed after it was published.

        None if there is nothing of it: it has not begun, or is gone and the record of that, too. StorageError if that
        cannot be told.
        """

    @abstractmethod
    def pending_save(self, save: SaveId, token: int | None = None) -> Pending:
        """Return a save, to act on it with the owner's `token` (that of the save by default)."""

    @abstractmethod
    def refresh(self) -> None:
        """Have `pending` list what was begun before a claim that this process has made. For the owner.

        Takes in the steps that were copied here from a root of the other kind: see `copied_steps`.
        """

    # -- the place -----------------------------------------------------------------------------------------------------

    def check_links(self) -> None:
        """Raise StorageError if one of the directories of the root, other than a step, is a symbolic link.

        Nothing is to be done in a store, which has none.
        """

    def make(self) -> None:
        """Make the root, durably, unless it is there. Raises what `check_links` raises.

        Nothing is to be done in a store: a prefix is there with its first object, and no bucket is made.
        """

    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to. In a store, the next put tells."""

    def confirm(self, token: int) -> None:
        """Raise StorageError unless this process sees the claim with `token`, just made by another rank, and can write.

        Ranks that do not share the storage fail here, before anything is saved. Of processes of one node that do this
        at the same time, one tries to write.
        """
        deadline = Deadline(_VISIBLE_S)
        while not self.ownership.has(token):
            if deadline.is_over:
                raise StorageError(
                    f"{self.path} on {socket.gethostname()} is not what rank 0 has under this name: the claim that "
                    "rank 0 made is missing. Mount the same shared file system at the checkpoint root on all hosts, or "
                    "give all ranks the same endpoint"
                )
            time.sleep(_PAUSE_S)
        probe = NodeLock(f"probe of {self.path} for {token}")
        if probe.take():
            try:
                self.check_writable()
            finally:
                probe.release()
