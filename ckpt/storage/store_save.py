"""A save in a store. See `store_root` for its objects and what decides about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ckpt.errors import CheckpointError, FencedError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage.documents import INTENT
from ckpt.storage.interface import NO_LINEAGE, Pending, Root
from ckpt.storage.names import SaveId, pack_file, part_rank
from ckpt.storage.outcomes import Abandoned, Published, SaveOutcome
from ckpt.storage.pack_writers import PackWriter, StoresBlock, WrittenFile
from ckpt.storage.records import Record, Records, record_key
from ckpt.storage.store_step import StoreStep
from ckpt.storage.stores.interface import Store


class StorePackWriter(PackWriter):
    """Writes the pack of one rank below a prefix: each file is one object, put straight from memory.

    `write` may be called from several threads at once. What it has written is durable.
    """

    def __init__(self, store: Store, prefix: str, rank: int, written: dict[str, bytes]) -> None:
        """The documents that it writes are entered in `written`."""
        super().__init__(store.place(prefix), rank)
        self._objects = store
        self._prefix = prefix
        self._written = written

    def write_documents(self, documents: Mapping[str, bytes]) -> None:
        """See `PackWriter.write_documents`."""
        for name, data in documents.items():
            self._objects.put(f"{self._prefix}/{name}", data)
            self._written[name] = data

    def finish(self) -> None:
        """Nothing is left to do."""

    def _store(self, number: int, pages: memoryview, nbytes: int) -> None:
        self._objects.put(f"{self._prefix}/{pack_file(self._rank, number)}", pages[:nbytes])

    def _store_blocks(self, number: int, write_with: Callable[[StoresBlock], WrittenFile]) -> WrittenFile:
        content = bytearray()  # an object is put as a whole
        written = write_with(lambda pages, nbytes, at: content.extend(pages[:nbytes]))
        self._store(number, memoryview(content), len(content))
        return written


class StoreSave(Pending):
    """A save below a prefix. See `Pending`."""

    def __init__(self, root: Root, store: Store, records: Records, save: SaveId, token: int | None) -> None:
        self._prefix = f"saves/{save.name}"
        super().__init__(root, save, token, StoreStep(store, self._prefix), record_key(save))
        self._store = store
        self._records = records

    def begin(
        self,
        world_size: int,
        plan_digest: str,
        continues: dict[str, Any] | None = None,
        superseded: Collection[int] = (),
        lineage: Mapping[str, Any] = NO_LINEAGE,
    ) -> None:
        """See `Pending.begin`. The token is checked after the intent was put.

        So either this sees the claim of a later owner, or that one sees the intent, and decides about the save. What is
        looked at before only saves work, so what this process knows will do: `publish` looks again.
        """
        if (self._obstacle(self._records.known(), superseded) or not self._records.listed) and (
            problem := self._obstacle(self._records.all(), superseded)
        ):
            raise problem
        data = self._intent(world_size, plan_digest, continues, lineage)
        if self._store.create(self._key(INTENT), data) is None:
            raise StorageError(f"save {self.save.name} has begun already: two jobs write to {self.root.path}")
        try:
            self.check_token()
        except FencedError:
            with contextlib.suppress(StorageError):  # the part of rank 0 will never be there: none publishes it
                self._store.delete([self._key(INTENT)])
            raise
        self._own[INTENT] = data

    def _obstacle(self, records: Iterable[Record], superseded: Collection[int]) -> CheckpointError | None:
        """Return why this save cannot begin, according to records."""
        for record in records:
            if record.save == self.save:
                return StorageError(f"save {self.save.name} was abandoned before it began")
            if record.is_published and record.save.step == self.save.step not in superseded:
                return self.already_published()
        return None

    def join(self) -> None:
        """See `Pending.join`."""
        if self._records.outcome(self.save) is not None:
            raise StorageError(f"save {self.save.name} was abandoned before this rank could write its part")

    def pack_writer(self, rank: int, *, threads: int, reuse: bool) -> StorePackWriter:
        """See `Pending.pack_writer`."""
        return StorePackWriter(self._store, self._prefix, rank, self._own)

    def ranks_in(self, directory: str) -> set[int]:
        """See `Pending.ranks_in`."""
        names = (each.key.rpartition("/")[2] for each in self._store.below(self._key(f"{directory}/")))
        return {rank for name in names if (rank := part_rank(name)) is not None}

    def write_file(self, name: str, data: memoryview) -> None:
        """See `Pending.write_file`. What is put of a save that was abandoned meanwhile is deleted with the rest."""
        self._store.put(self._key(name), data)

    def publish(self) -> Published | Abandoned:
        """See `Pending.publish`."""
        self.check_token()
        records = self._records.all()
        for record in records:
            if record.save == self.save:
                if record.outcome == Published():
                    self.confirm()  # another process has published it
                return record.outcome
        if any(record.save.step == self.save.step and record.is_published for record in records):
            raise self.already_published()
        outcome = self._decide(Record.published(self.save))
        if outcome == Published() and not self._records.keeps(Record.published(self.save)):
            return Abandoned(
                Failure(None, "SaveAbandonedError", "the objects of the save were deleted before it was decided")
            )
        return outcome

    def abandon(self, reason: Failure) -> Published | Abandoned:
        """See `Pending.abandon`."""
        self.check_token()
        return self._decide(Record.abandoned(self.save, reason))

    def _decide(self, record: Record) -> Published | Abandoned:
        if self._records.create(record) is not None:
            return record.outcome
        outcome = self.outcome()
        if outcome is None:
            raise StorageError(f"{self.path}: the record of the save was deleted by hand while it was decided")
        return outcome

    def outcome(self) -> SaveOutcome:
        """See `Pending.outcome`. One look."""
        return self._records.outcome(self.save)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
