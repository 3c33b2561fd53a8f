"""What was decided about the saves in an object store: one record for each, at one key.

    records/<save>.json    {"save": ..., "state": "published", ...}

The first put of a record wins, because it is conditional on that there is none; so a save is published or abandoned,
and that never changes. The owner replaces the record of a published step when it is moved aside or removed, on the
condition that the record is the one it has read: first by one with its token, and once more when it has seen that it
still is the owner (see `object_root`). A record stays for an hour after the objects of its save are deleted, so that no
late process finds none and decides anew.
"""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckpt.errors import CheckpointCorruptError
from ckpt.storage.documents import decode_document, encode_document, well_formed
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.object_store import ObjectAbout, ObjectStore
from ckpt.storage.outcomes import Abandoned, Published, Reason, unknown_reason

__all__ = ["Record", "Records", "State"]

State = Literal["published", "abandoned", "superseded", "damaged", "removed"]

_STATES = ("published", "abandoned", "superseded", "damaged", "removed")
_MAX_BYTES = 1 << 20
_READERS = 16


@dataclass(frozen=True, slots=True)
class Record:
    """What was decided about a save, and when (seconds since 1970, by the clock of the process that decided).

    `about` describes the object that it was read from. `by` is the token of the owner that has moved the step aside or
    removed it, and has not looked yet whether it still is the owner.
    """

    save: SaveId
    state: State
    reason: Reason | None = None
    time: float = field(default_factory=time.time)
    about: ObjectAbout | None = None
    by: int | None = None

    @classmethod
    def published(cls, save: SaveId) -> Record:
        """Return the record that makes a save a step."""
        return cls(save, "published")

    @classmethod
    def abandoned(cls, save: SaveId, reason: Reason) -> Record:
        """Return the record of a save that can never be published."""
        return cls(save, "abandoned", reason)

    @property
    def outcome(self) -> Published | Abandoned:
        """How the save has ended, whatever became of the step later."""
        if self.state != "abandoned":
            return Published()
        return Abandoned(self.reason or unknown_reason(self.save))

    def encoded(self) -> bytes:
        """Return the record as a document. Each has other bytes, so that its writer can tell it from others."""
        document: dict[str, Any] = {"save": self.save.name, "step": self.save.step, "owner": self.save.owner}
        document |= {"state": self.state, "time": self.time, "nonce": secrets.token_hex(8)}
        if self.by is not None:
            document["by"] = self.by
        if self.reason is not None:
            document["reason"] = self.reason.to_document()
        return encode_document(document)


class Records:
    """The records of one root. Any thread. What was read is kept as long as the store says that it is the same."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Record] = {}
        self._listed = False
        self._is_fresh = False

    def of(self, save: SaveId) -> Record | None:
        """Return the record of a save; None if nothing is decided. CheckpointCorruptError if it is damaged."""
        return self._read(_key(save))

    def all(self) -> list[Record]:
        """Return all records, by step. One list, and a read for each that this process has neither read nor put."""
        _, objects = self._store.names("records/")
        with self._lock:
            known = {each.key: _listed(self._known.get((each.key, each.etag)), each) for each in objects}
        new = [key for key, record in known.items() if record is None]
        if new:
            with ThreadPoolExecutor(min(_READERS, len(new)), "ckpt-records") as pool:
                known |= dict(zip(new, pool.map(self._read, new), strict=True))
        found = {record for record in known.values() if record is not None and record.about is not None}
        with self._lock:
            self._known = {(each.about.key, each.about.etag): each for each in found if each.about is not None}
            self._listed = self._is_fresh = True
        return sorted(found, key=lambda record: (record.save.step, record.save.owner, record.save.nonce))

    @property
    def listed(self) -> bool:
        """Whether `all` has returned before."""
        return self._listed

    def once_listed(self) -> list[Record]:
        """Return what the last call of `all` has returned, with what was put since; list again if that was used before.

        So what follows the commit of a save uses its list, and nothing older.
        """
        fresh, self._is_fresh = self._is_fresh, False
        if not fresh:
            self.all()
            self._is_fresh = False
        return self.known()

    def known(self) -> list[Record]:
        """Return the records as `all` returned them last, with those put since; no request."""
        with self._lock:
            return list(self._known.values())

    def create(self, record: Record) -> bool:
        """Put a record, unless there is one of this save; return whether this call has put it."""
        return self._remembered(record, self._store.create(_key(record.save), record.encoded())) is not None

    def change(self, record: Record, state: State, by: int | None = None) -> Record | None:
        """Replace a record that was read by one with another state, and return that; None if it was replaced before."""
        assert record.about is not None
        changed = replace(record, state=state, by=by)
        return self._remembered(changed, self._store.replace(record.about, changed.encoded()))

    def _remembered(self, record: Record, about: ObjectAbout | None) -> Record | None:
        """Remember a record if this process has put it, and return it: the next list needs no read of it."""
        if about is None:
            return None
        put = replace(record, about=about)
        with self._lock:
            known = {place: each for place, each in self._known.items() if place[0] != about.key}
            self._known = known | {(about.key, about.etag): put}
        return put

    def delete(self, records: list[Record]) -> None:
        """Delete records."""
        self._store.delete([_key(record.save) for record in records])

    def _read(self, key: str) -> Record | None:
        where = self._store.place(key)
        try:
            found = self._store.get(key, _MAX_BYTES)
        except ValueError as problem:
            raise CheckpointCorruptError(f"{where} {problem}; it is no record of a save") from None
        if found is None:
            return None
        with well_formed(where):
            document = decode_document(found.data, where)
            save, state = parse_save_name(str(document["save"])), document["state"]
            if save is None or state not in _STATES or _key(save) != key:
                raise ValueError(f"it is of save {document['save']!r:.80}, in state {state!r:.40}")
            reason = Reason.from_document(document["reason"]) if "reason" in document else None
            by = document.get("by")
            return Record(save, state, reason, float(document["time"]), found.about, None if by is None else int(by))


def _listed(record: Record | None, about: ObjectAbout) -> Record | None:
    """Return a known record with the time that a list tells. A list has no versions."""
    if record is None or record.about is None:
        return None
    return replace(record, about=replace(about, version=record.about.version))


def _key(save: SaveId) -> str:
    return f"records/{save.name}.json"
