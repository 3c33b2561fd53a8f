"""A save in a store. See `store_root` for its objects and what decides about it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointError, FencedError, StorageError
from ckpt.native import crc32c
from ckpt.ranks.failure import Failure
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document, encode_document
from ckpt.storage.interface import NO_LINEAGE, Pending, Root
from ckpt.storage.names import SaveId, pack_file, part_name, part_rank, parts_directory
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.outcomes import Abandoned, NotDurableError, Published, SaveOutcome
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.records import Record, Records
from ckpt.storage.step_documents import FORMAT_VERSION, INTENT, checked_intent
from ckpt.storage.store_step import StoreStep
from ckpt.storage.stores.interface import Store

__all__ = ["StorePackWriter", "StoreSave"]


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


class _WorkLock:
    def __init__(self, lock: NodeLock) -> None:
        self._lock = lock

    def close(self) -> None:
        self._lock.release()


class StoreSave(Pending):
    """A save below a prefix. See `Pending`."""

    def __init__(self, root: Root, store: Store, records: Records, save: SaveId, token: int | None) -> None:
        self.root = root
        self.save = save
        self._prefix = f"saves/{save.name}"
        self.path = store.place(self._prefix)
        self._store = store
        self._records = records
        self._token = save.owner if token is None else token
        self._own: dict[str, bytes] = {}  # documents that this object has put, and need not read

    def check_token(self) -> None:
        """See `Pending.check_token`."""
        self.root.ownership.check(self._token)

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
        intent = {"format": FORMAT_VERSION, "save": self.save.name, "step": self.save.step, "owner": self.save.owner}
        intent |= {"world_size": world_size, "plan": plan_digest, "continues": continues, **lineage}
        data = encode_document(intent)
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

    def take_recycled(self, plan: str, names: Iterable[str]) -> None:
        """See `Pending.take_recycled`: there are none."""

    def pack_writer(self, rank: int, *, threads: int, reuse: bool) -> StorePackWriter:
        """See `Pending.pack_writer`."""
        return StorePackWriter(self._store, self._prefix, rank, self._own)

    def try_lock(self) -> _WorkLock | None:
        """See `Pending.try_lock`."""
        lock = NodeLock(f"decide {self.path}")
        return _WorkLock(lock) if lock.take() else None

    def look(self) -> tuple[SaveOutcome, int]:
        """See `Pending.look`."""
        return self.outcome(), 1

    def has_begun(self) -> bool:
        """See `Pending.has_begun`."""
        return self._store.about(self._key(INTENT)) is not None and self._records.outcome(self.save) is None

    def begun_s(self) -> float:
        """See `Pending.begun_s`."""
        about = self._store.about(self._key(INTENT))
        if about is not None:
            return about.modified_s
        first = min((each.modified_s for each in self._store.below(f"{self._prefix}/")), default=None)
        if first is None:
            raise StorageError(f"{self.path} does not exist any more")
        return first

    def intent(self) -> dict[str, Any] | None:
        """See `Pending.intent`."""
        data = self._own.get(INTENT) or self._read(INTENT)
        where = self._place(INTENT)
        return None if data is None else checked_intent(decode_document(data, where), where)

    def write_part(self, rank: int, document: dict[str, Any]) -> int:
        """See `Pending.write_part`. One of a save that was abandoned meanwhile is deleted with the rest of it."""
        data = encode_document(document)
        self._store.put(self._key(part_name(rank)), data)
        return crc32c(data)

    def has_part(self, rank: int) -> bool:
        """See `Pending.has_part`."""
        return self._store.about(self._key(part_name(rank))) is not None

    def ranks_in(self, directory: str) -> set[int]:
        """See `Pending.ranks_in`."""
        names = (each.key.rpartition("/")[2] for each in self._store.below(self._key(f"{directory}/")))
        return {rank for name in names if (rank := part_rank(name)) is not None}

    def parts_present(self) -> set[int]:
        """See `Pending.parts_present`."""
        return self.ranks_in(parts_directory(0).rpartition("/")[0])

    def read_part(self, rank: int) -> tuple[dict[str, Any], int]:
        """See `Pending.read_part`."""
        data = self.read_document(part_name(rank))
        return decode_document(data, self._place(part_name(rank))), crc32c(data)

    def read_document(self, name: str) -> bytes:
        """See `Pending.read_document`."""
        data = self._own.get(name) or self._read(name)
        if data is None:
            raise CheckpointCorruptError(f"{self._place(name)} is missing")
        return data

    def write_documents(self, documents: Mapping[str, bytes]) -> None:
        """See `Pending.write_documents`."""
        for name, data in documents.items():
            self._store.put(self._key(name), data)

    @property
    def source(self) -> StoreStep:
        """See `Pending.source`."""
        return StoreStep(self._store, self._prefix)

    def write_file(self, name: str, data: memoryview) -> None:
        """See `Pending.write_file`."""
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

    def confirm(self) -> None:
        """See `Pending.confirm`."""
        try:
            self._records.sync_outcome(self.save)
        except StorageError as error:
            raise NotDurableError(
                f"step {self.save.step} is published, but {error}: it may not survive a loss of power",
                step=self.save.step,
            ) from error

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

    def decided(self) -> SaveOutcome:
        """See `Pending.decided`. One look."""
        return self.outcome()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _place(self, name: str) -> str:
        return self._store.place(self._key(name))

    def _read(self, name: str) -> bytes | None:
        try:
            return self._store.get(self._key(name), MAX_DOCUMENT_BYTES)
        except ValueError as problem:
            raise CheckpointCorruptError(f"{self._place(name)} {problem}") from None
