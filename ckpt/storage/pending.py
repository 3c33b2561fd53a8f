"""One save on its way to a root, until it is decided: published or abandoned, and that is final."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.errors import CheckpointExistsError
from ckpt.ranks.failure import Failure
from ckpt.storage.names import RANKS_PER_DIRECTORY, SaveId, parts_directory
from ckpt.storage.outcomes import Abandoned, Published, SaveOutcome
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.step_source import StepSource

if TYPE_CHECKING:
    from ckpt.storage.interface import Root

__all__ = ["NO_LINEAGE", "PartsWatch", "Pending", "WorkLock"]

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


class PartsWatch:
    """Which ranks have completed their parts, for a process that waits for all of them.

    Each look lists the directories that were not complete at the one before.
    """

    def __init__(self, pending: Pending, world_size: int) -> None:
        self._pending = pending
        self._missing: dict[str, set[int]] = {}
        for first in range(0, world_size, RANKS_PER_DIRECTORY):
            ranks = range(first, min(first + RANKS_PER_DIRECTORY, world_size))
            self._missing[parts_directory(first)] = set(ranks)

    @property
    def missing(self) -> set[int]:
        """The ranks whose parts were missing at the last look."""
        return set().union(*self._missing.values())

    @property
    def directories_left(self) -> int:
        """How many directories the next look lists."""
        return len(self._missing)

    def look(self) -> bool:
        """Return whether all parts are there."""
        for directory, ranks in list(self._missing.items()):
            ranks.difference_update(self._pending.ranks_in(directory))
            if not ranks:
                del self._missing[directory]
        return not self._missing
