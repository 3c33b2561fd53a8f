"""What saving, loading and restarts need of a checkpoint root, whatever it is stored in.

    Root              the published steps, the saves on their way there, and who owns them
      PendingSave     one save until it is decided: published or abandoned, and that is final
        PackWriter    writes the files of one rank
      HeldStep        one published step while it is read
        StepSource    its files

`root.CheckpointRoot` is in a directory, `store_root.StoreRoot` in a store: a bucket, or any other backend of the eight
operations in `stores.interface`. `roots.open_root` tells them apart.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from ckpt.errors import CheckpointExistsError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage.moved_steps import Aside, MovedStep
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.options import StorageOptions
from ckpt.storage.outcomes import Abandoned, Published, SaveOutcome
from ckpt.storage.ownership import Ownership
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.step_source import HeldStep, StepSource

__all__ = ["NO_LINEAGE", "Aside", "MovedStep", "Pending", "Root", "WorkLock"]

NO_LINEAGE: Mapping[str, Any] = MappingProxyType({"restart": None, "metrics": {}, "versions": {}})


class WorkLock(Protocol):
    """A lock that only saves work."""

    def close(self) -> None:
        """Release the lock."""


class Pending(ABC):
    """A save that may not be decided yet, as seen by one of its ranks or by the process that decides about it.

    It acts with the owner's token (that of the save by default). Methods that change anything raise FencedError if a
    later job owns the root. `path` says where it is, in messages.
    """

    root: Root
    save: SaveId
    path: str

    @abstractmethod
    def check_token(self) -> None:
        """Raise FencedError if a later job owns the root."""

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

    @abstractmethod
    def join(self) -> None:
        """Let a rank write before the coordinator has begun the save. StorageError if the save is abandoned."""

    @abstractmethod
    def take_recycled(self, plan: str, names: Iterable[str]) -> None:
        """Give the save recycled files with these names, if the root has some of the plan."""

    @abstractmethod
    def pack_writer(self, rank: int, *, threads: int, reuse: bool) -> PackWriter:
        """Return what writes the pack of a rank; with `reuse` over existing files."""

    @abstractmethod
    def try_lock(self) -> WorkLock | None:
        """Lock the save, so that only one process of this host does the work; None if another one has the lock.

        StorageError if the save does not exist any more.
        """

    @abstractmethod
    def look(self) -> tuple[SaveOutcome, int]:
        """Return what `decided` returns, and how many operations that took."""

    @abstractmethod
    def has_begun(self) -> bool:
        """Return whether the save has begun and is not decided."""

    @abstractmethod
    def begun_s(self) -> float:
        """Return when the save began, or its first rank joined (seconds since 1970). StorageError if it is decided."""

    @abstractmethod
    def intent(self) -> dict[str, Any] | None:
        """Return the intent; None if there is none. CheckpointCorruptError if it is damaged."""

    @abstractmethod
    def write_part(self, rank: int, document: dict[str, Any]) -> int:
        """Record that this rank's part is complete and durable, and return the checksum of the manifest.

        StorageError if the save does not exist any more.
        """

    @abstractmethod
    def has_part(self, rank: int) -> bool:
        """Return whether the part of this rank is complete. One look."""

    @abstractmethod
    def ranks_in(self, directory: str) -> set[int]:
        """Return the ranks whose part is complete, of those that have their parts in this directory. One look."""

    @abstractmethod
    def parts_present(self) -> set[int]:
        """Return the ranks whose part is complete. Lists every directory of parts; to wait, use `PartsWatch`."""

    @abstractmethod
    def read_part(self, rank: int) -> tuple[dict[str, Any], int]:
        """Return a rank's part manifest and its checksum. CheckpointCorruptError if it is damaged or missing."""

    @abstractmethod
    def read_document(self, name: str) -> bytes:
        """Return the content of a document. CheckpointCorruptError if it is missing."""

    @abstractmethod
    def write_documents(self, documents: Mapping[str, bytes]) -> None:
        """Write documents of the whole step, by their names, and make all that was written durable."""

    @property
    @abstractmethod
    def source(self) -> StepSource:
        """The files that were written so far."""

    @abstractmethod
    def write_file(self, name: str, data: memoryview) -> None:
        """Write or replace a file, whole or not at all, durably. StorageError if the save does not exist any more."""

    @abstractmethod
    def publish(self) -> Published | Abandoned:
        """Commit the save, unless it is decided already, and return the outcome.

        Everything must be durable before. Raises CheckpointExistsError if another save has published the step,
        NotDurableError if this one is published but perhaps not durable.
        """

    @abstractmethod
    def confirm(self) -> None:
        """Make the published step durable, from a rank that did not publish it. Raises NotDurableError."""

    @abstractmethod
    def abandon(self, reason: Failure) -> Published | Abandoned:
        """Abandon the save, which need not have begun, unless it is decided already, and return the outcome.

        Its reason is the one that all ranks find. Raises StorageError if nothing can be decided.
        """

    @abstractmethod
    def outcome(self) -> SaveOutcome:
        """Return the outcome as found in storage."""

    @abstractmethod
    def decided(self) -> SaveOutcome:
        """Return the outcome, for ranks that have joined the save: if it does not exist any more, it was removed."""

    def already_published(self) -> CheckpointExistsError:
        """Return the error for a step that another save has published."""
        return CheckpointExistsError(
            f"step {self.save.step} is already published in {self.root.path}; save under another step, or remove that "
            f"one first (Checkpointer.delete, or inspect_ckpt rm)",
            step=self.save.step,
        )


class Root(ABC):
    """A checkpoint root. Makes nothing until a save begins. Any process, any thread.

    `path` is its absolute path or its URL, and `options` what else is needed to open it again in another process.
    """

    path: str
    options: StorageOptions | None = None
    ownership: Ownership

    reuses_files: ClassVar[bool]
    """Whether a save can write over the files of a removed step."""

    removed_by_all: ClassVar[bool]
    """Whether each rank deletes its own files of removed steps; else the coordinator deletes all."""

    least_look_s: ClassVar[float]
    """How long a process that waits lets pass between two looks, at least."""

    # -- steps ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the published steps, ascending; none if there is no root. StorageError if it cannot be read.

        Also those that were copied here from a root of the other kind: see `copied_steps`.
        """

    def listed_steps(self) -> list[int]:
        """Return the published steps, for the process that has just published one: what it saw then will do, once."""
        return self.steps()

    @abstractmethod
    def save_of(self, step: int) -> str | None:
        """Return the name of the save that was published as this step; None if there is none, or its intent is damaged.

        StorageError if it cannot be read.
        """

    def saves(self) -> dict[int, str | None]:
        """Return what `save_of` returns, for each of `steps`."""
        return {step: self.save_of(step) for step in self.steps()}

    @abstractmethod
    def source_of(self, step: int) -> StepSource:
        """Return the files of a published step. CheckpointNotFoundError if it is not there, where that is known."""

    @abstractmethod
    def published_s(self, step: int) -> float:
        """Return when a step was published, in seconds since 1970, to be shown. StorageError if that cannot be read.

        In a directory a file tells that, and a copy of it has another time; see `saved_s`.
        """

    @abstractmethod
    def saved_s(self, step: int) -> float:
        """Return when a step was saved, in seconds since 1970, as it records itself: copies of it say the same.

        CheckpointCorruptError if it does not say.
        """

    @abstractmethod
    def hold_step(self, step: int, *, lease: bool, renewing: bool = False) -> HeldStep:
        """Hold a published step while it is read; with `lease` also against removal by processes of other hosts.

        With `renewing` a thread renews the lease; otherwise each `check` does. CheckpointNotFoundError if it is being
        removed, or is not a step.
        """

    @abstractmethod
    def hold_itself(self) -> HeldStep:
        """Hold a step of which `path` is the place, not the root. Raises as `hold_step`."""

    def tip(self) -> dict[str, Any] | None:
        """Return the newest published step and its save, ``{"step": 20, "save": ...}``; None if there is none.

        The save is None if it is not known, also because it cannot be read: this describes, and decides nothing.
        """
        steps = self.steps()
        if not steps:
            return None
        save = None
        with contextlib.suppress(StorageError):
            save = self.save_of(steps[-1])
        return {"step": steps[-1], "save": save}

    def owner_of(self, step: int) -> int:
        """Return the token of the owner that saved a published step; 0 if its intent is damaged or missing.

        StorageError if it cannot be read.
        """
        save = parse_save_name(self.save_of(step) or "")
        return 0 if save is None else save.owner

    @abstractmethod
    def moved_aside(self) -> list[MovedStep]:
        """Return the steps that were moved aside, by step and name."""

    def superseded(self) -> list[str]:
        """Return the names of the superseded steps, by step."""
        return [moved.name for moved in self.moved_aside() if moved.why == "superseded"]

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
    def remove_moved(self, name: str) -> None:
        """Remove a step that was moved aside. CheckpointNotFoundError if there is no such step."""

    @abstractmethod
    def remove_step(self, step: int, token: int | None = None) -> bool:
        """Remove a published step; False if it is being read or pinned. A crash leaves it whole or removed.

        For the owner. With its `token`, raises FencedError instead if the step was saved by a later owner.
        """

    @abstractmethod
    def retire_step(self, step: int, token: int, plan: str | None = None) -> bool:
        """Remove a step as `remove_step` does, but leave it to `removed` to delete its files.

        With `plan`, a save with this digest may write over them instead.
        """

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
                if self.retire_step(step, token, plan):
                    removed.append(step)
            except StorageError as error:
                failed[step] = str(error)
        return removed

    @abstractmethod
    def pinned_steps(self) -> set[int]:
        """Return the numbers of the pinned steps."""

    @abstractmethod
    def pin_step(self, step: int) -> None:
        """Pin a published step, durably. CheckpointNotFoundError if it is not there. Idempotent."""

    @abstractmethod
    def unpin_step(self, step: int) -> bool:
        """Let a step be removed again; False if it was not pinned."""

    # -- saves ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def pending(self) -> list[SaveId]:
        """Return the saves that are neither published nor abandoned, lowest step first."""

    @abstractmethod
    def abandoned(self) -> list[SaveId]:
        """Return the abandoned saves of which there is a record."""

    @abstractmethod
    def abandoned_s(self, save: SaveId) -> float:
        """Return when a save was abandoned, in seconds since 1970. StorageError if there is no record of it."""

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

    @abstractmethod
    def check_links(self) -> None:
        """Raise StorageError if one of the directories of the root, other than a step, is a symbolic link."""

    @abstractmethod
    def make(self) -> None:
        """Make the root, durably, unless it is there. Raises what `check_links` raises."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise StorageError when the root cannot be made or written to."""

    @abstractmethod
    def confirm(self, token: int) -> None:
        """Raise StorageError unless this process sees the claim with `token`, just made by another rank, and can write.

        Ranks that do not share the storage fail here, before anything is saved.
        """

    # -- what is to be deleted -----------------------------------------------------------------------------------------

    @abstractmethod
    def discard_recycled(self, keep: str | None = None) -> list[str]:
        """Let no save write over the files of removed steps any more, but those of the plan `keep`.

        Return the paths to delete.
        """

    @abstractmethod
    def removed(self) -> list[tuple[str, bool]]:
        """Return the places of removed steps and abandoned saves, whose files may be deleted, by any rank.

        The second item says whether it is an abandoned save.
        """

    def removed_here(self) -> list[tuple[str, bool]] | None:
        """Return those of `removed` that this process has removed, without asking the storage; None if that is free."""
        return None

    @abstractmethod
    def source_at(self, place: str) -> StepSource:
        """Return the files at a place that `removed` returned."""

    @abstractmethod
    def delete_share(self, path: str, rank: int, before_each: Callable[[], None]) -> None:
        """Delete what one rank has written at a place that `removed` returned; `before_each` may wait, or raise."""

    @abstractmethod
    def delete_contents(self, path: str, before_each: Callable[[], None], *, is_record: bool) -> None:
        """Delete all that is at a place that `removed` returned, but for the record of an abandoned save."""

    @abstractmethod
    def clean(self) -> None:
        """Free the space of abandoned saves and interrupted removals, at once. For the owner."""

    @abstractmethod
    def clean_records(self) -> None:
        """Remove what is small and of no use any more, and undo interrupted moves. For the owner."""
