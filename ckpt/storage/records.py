"""Decisions about the saves of a root in a store: numbered records, which are created and never changed.

    records/<save>/000.json    {"save": ..., "state": "published", ...}: the save is published, or abandoned
    records/<save>/001.json    the step was moved aside or removed, or is published again; and so on

`Store.create` decides: of several processes that create a record, one succeeds. Number 0 is the outcome of the save,
and that never changes. The record with the highest number is the state of the step: whoever has read record n, and
decides otherwise, creates n + 1, and fails if another process has done that meanwhile. An owner that moves a step aside
or removes it creates two: one with its token, and one when it has seen that it still is the owner (see `store_root`).
The step is published until the second one, so it is never lost between them: the owner changes it anew where it wants
to, and a later owner undoes what it finds.

Records stay for an hour after the objects of their save are deleted, so that no late process finds none and decides
anew. Then they are deleted, the newest one last. A process that was stopped for longer can still create one: so whoever
publishes a step looks afterwards whether its objects are there, and else creates the next record, `removed`.

`StateChanges`: published steps are removed, moved aside, or published again. A process may be stopped between its look
at the token and a put, while a later owner claims the root and continues the very step whose state is changed then. So
the record tells the token first, and no object is deleted; then the token is looked at again, before the second put.
Either that look finds the claim of the later owner; or that owner, who looks for such records after its claim, finds
this one, publishes the step again, and the second put fails. Without the second put, for whatever reason, the step is
published as before.

Pins of a step that is removed are looked at again after the first put, too: whoever pins a step looks at its record
afterwards. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckpt.errors import CheckpointCorruptError, CheckpointError, FencedError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage.documents import INTENT, MAX_DOCUMENT_BYTES, decode_document, encode_document, well_formed
from ckpt.storage.names import PUBLISHED_STEP, SaveId, parse_save_name
from ckpt.storage.outcomes import Abandoned, Published, unknown_reason
from ckpt.storage.ownership import Ownership
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.store_step import StoreStep
from ckpt.storage.stores.interface import About, Store

State = Literal["published", "abandoned", "superseded", "damaged", "removed"]

_STATES = ("published", "abandoned", "superseded", "damaged", "removed")
_MAX_BYTES = 1 << 20
_READERS = 16
_ATTEMPTS = 10
_KEY = re.compile(r"records/(?P<save>[^/]+)/(?P<number>\d{3,9})\.json")


@dataclass(frozen=True, slots=True)
class Record:
    """The decision about a save, and its time (seconds since 1970, by the clock of the process that decided).

    `number` is that of the record among those of the save, and `about` describes its object. `by` is the token of the
    owner that has moved the step aside or removed it, and has not looked yet whether it still is the owner. `at` is the
    prefix of a step that was copied from a directory.
    """

    save: SaveId
    state: State
    reason: Failure | None = None
    time: float = field(default_factory=time.time)
    number: int = 0
    about: About | None = None
    by: int | None = None
    at: str = ""

    @property
    def prefix(self) -> str:
        """The prefix of the objects of the save."""
        return self.at or f"saves/{self.save.name}"

    @classmethod
    def published(cls, save: SaveId) -> Record:
        """Return the record that makes a save a step."""
        return cls(save, "published")

    @classmethod
    def abandoned(cls, save: SaveId, reason: Failure) -> Record:
        """Return the record of a save that can never be published."""
        return cls(save, "abandoned", reason)

    @property
    def is_published(self) -> bool:
        """Whether the save is a published step."""
        return self.state == "published" or self.by is not None

    @property
    def is_gone(self) -> bool:
        """Whether the objects of the save may be deleted."""
        return self.by is None and self.state in ("abandoned", "removed")

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
        if self.at:
            document["at"] = self.at
        if self.reason is not None:
            document["reason"] = self.reason.to_document()
        return encode_document(document)


class Records:
    """The records of one root. Any thread. What was read is kept as long as the store says that it is the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, Record] = {}  # the newest one of each save
        self._listed = False
        self._is_fresh = False

    def outcome(self, save: SaveId) -> Published | Abandoned | None:
        """Return the decision about a save; None if there is none. One read.

        CheckpointCorruptError if the record is damaged.
        """
        record = self._read(record_key(save))
        return None if record is None else record.outcome

    def of(self, save: SaveId) -> Record | None:
        """Return the newest record of a save; None if there is none. One list, and a read if it is a new one.

        CheckpointCorruptError if it is damaged.
        """
        found = self._newest(self._store.below(f"records/{save.name}/"))
        return next(iter(found), None)

    def all(self) -> list[Record]:
        """Return the newest records of all saves, by step. One list, and a read for each that is not known."""
        found = self._newest(self._store.below("records/"))
        with self._lock:
            self._known = {record.save.name: record for record in found}
            self._listed = self._is_fresh = True
        return sorted(found, key=lambda record: (record.save.step, record.save.owner, record.save.nonce))

    def _newest(self, listed: Iterable[About]) -> list[Record]:
        """Return the newest records of the saves that a list tells of; those are read that are not known."""
        newest: dict[str, tuple[int, About]] = {}
        for about in listed:
            if (match := _KEY.fullmatch(about.key)) is not None:
                number = int(match["number"])
                if number >= newest.get(match["save"], (0, about))[0]:
                    newest[match["save"]] = number, about
        with self._lock:
            known = {name: self._known.get(name) for name in newest}
        found: list[Record] = []
        new: list[About] = []
        for name, (_, about) in newest.items():
            record = known[name]
            if record is None or record.about is None or (record.about.key, record.about.tag) != (about.key, about.tag):
                new.append(about)
            else:
                found.append(replace(record, about=about))  # with the time that the list tells
        if len(new) == 1:
            read = [self._read(new[0].key, new[0])]
        elif new:
            with ThreadPoolExecutor(min(_READERS, len(new)), "ckpt-records") as pool:
                read = list(pool.map(self._read, [about.key for about in new], new))
        else:
            read = []
        return found + [record for record in read if record is not None]

    @property
    def listed(self) -> bool:
        """Whether `all` has returned before."""
        return self._listed

    def once_listed(self) -> list[Record]:
        """Return the records of the last call of `all`, and those put since; list again if that was used before.

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

    def create(self, record: Record) -> Record | None:
        """Create a record, and return it; None if there is one of this save with its number."""
        about = self._store.create(record_key(record.save, record.number), record.encoded())
        if about is None:
            return None
        put = replace(record, about=about)
        with self._lock:
            before = self._known.get(record.save.name)
            if before is None or before.number <= put.number:
                self._known = self._known | {record.save.name: put}  # the next list needs no read of it
        return put

    def change(self, record: Record, state: State, by: int | None = None) -> Record | None:
        """Create the record after one that was read, with another state; None if another process has done so before."""
        return self.create(replace(record, state=state, by=by, number=record.number + 1))

    def keeps(self, record: Record) -> bool:
        """Return whether the objects of a step that was just published are there; withdraw the record if they are not.

        That was put too late: the process was stopped before, for so long that the save, its objects and its records
        are gone. Those are just being deleted, perhaps, so the record that says so is a new one in any case.
        """
        if self._store.about(f"{record.prefix}/{INTENT}") is not None:
            return True
        for _ in range(_ATTEMPTS):
            newest = self.of(record.save)
            if newest is None or self.change(newest, "removed") is not None:
                break
        return False

    def forget(self, saves: Iterable[SaveId]) -> None:
        """Delete the records of saves of which nothing else is left, and the newest ones last: see above. One list."""
        found: dict[str, list[About]] = {save.name: [] for save in saves}
        for about in self._store.below("records/"):
            found.get(about.key.split("/")[1], []).append(about)
        records = [sorted(each, key=_order) for each in found.values() if each]
        self._store.delete([about.key for each in records for about in each[:-1]])
        self._store.delete([each[-1].key for each in records])

    def _read(self, key: str, about: About | None = None) -> Record | None:
        where = self._store.place(key)
        try:
            data = self._store.get(key, _MAX_BYTES)
        except ValueError as problem:
            raise CheckpointCorruptError(f"{where} {problem}; it is no record of a save") from None
        if data is None:
            return None
        with well_formed(where):
            document = decode_document(data, where)
            save, state = parse_save_name(str(document["save"])), document["state"]
            number = int(key.rpartition("/")[2].removesuffix(".json"))
            if save is None or state not in _STATES or record_key(save, number) != key:
                raise ValueError(f"it is of save {document['save']!r:.80}, in state {state!r:.40}")
            reason = Failure.from_document(document["reason"]) if "reason" in document else None
            by, at = document.get("by"), str(document.get("at", ""))
            if at and PUBLISHED_STEP.fullmatch(at) is None:
                raise ValueError(f"{at!r:.40} is no place of a step")
            time_s, by = float(document["time"]), None if by is None else int(by)
            return Record(save, state, reason, time_s, number, about, by, at)


def _order(about: About) -> int:
    match = _KEY.fullmatch(about.key)
    return -1 if match is None else int(match["number"])


def record_key(save: SaveId, number: int = 0) -> str:
    """Return the key of a record; number 0 is the decision about the save."""
    return f"records/{save.name}/{number:03d}.json"


# -- changes of the state of published steps ---------------------------------------------------------------------------


class StateChanges:
    """The changes of one root. Any thread. `published` returns the published steps, `pinned` those that are pinned."""

    def __init__(
        self,
        store: Store,
        records: Records,
        ownership: Ownership,
        published: Callable[[], dict[int, Record]],
        pinned: Callable[[], set[int]],
    ) -> None:
        self._store = store
        self._records = records
        self._ownership = ownership
        self._published = published
        self._pinned = pinned

    def make(
        self, records: list[Record], state: State, token: int | None, failed: dict[int, str] | None = None
    ) -> list[Record]:
        """Change the state of published steps, and return the new records, without those that were changed meanwhile.

        Steps that were pinned meanwhile are not removed. What the store does not let change is entered in `failed`
        instead of raised, if that is given. FencedError, with the steps as they were, if `token` is not the owner's.
        """

        def change_all(records: list[Record], by: int | None) -> list[Record]:
            changed: list[Record] = []
            for each in records:
                try:
                    found = self._records.change(each, state, by)
                except StorageError as error:
                    if failed is None:
                        raise
                    failed[each.save.step] = str(error)
                else:
                    changed += [] if found is None else [found]
            return changed

        begun = change_all(records, token)
        if not begun or token is None:
            return begun
        if state == "removed":
            begun = self._without_pinned(begun)
        try:
            self._ownership.check(token)
        except FencedError:
            for each in begun:
                self._take_back(each)
            raise
        return change_all(begun, None)

    def _without_pinned(self, begun: list[Record]) -> list[Record]:
        """Take back the changes of steps that were pinned meanwhile, and return the others."""
        try:
            pinned = self._pinned()
        except StorageError:
            for each in begun:
                with contextlib.suppress(StorageError):
                    self._take_back(each)
            raise
        for each in begun:
            if each.save.step in pinned:
                self._take_back(each)
        return [each for each in begun if each.save.step not in pinned]

    def _take_back(self, record: Record) -> None:
        """Publish a step again that an earlier owner has changed; supersede it if a later owner has left its branch.

        Looks at the branch before and after: a later owner, that moves aside what it finds when it has published its
        first step, may just publish that.
        """
        step, token = record.save.step, max(record.save.owner, record.by or 0)
        if self._is_left(step, token):
            self._records.change(record, "superseded")
            return
        published = self._records.change(record, "published")
        if published is not None and self._records.keeps(record) and self._is_left(step, token):
            self._records.change(published, "superseded")

    def _is_left(self, step: int, token: int) -> bool:
        """Return whether an owner after that with `token` has published steps of a branch without this step."""
        for number, other in self._published().items():
            if other.save.owner <= token:
                continue
            with contextlib.suppress(CheckpointError, DamagedFileError, OSError, AttributeError):
                intent = decode_document(StoreStep(self._store, other.prefix).read(INTENT, MAX_DOCUMENT_BYTES), INTENT)
                before = parse_save_name(str((intent.get("continues") or {}).get("save")))
                if before is not None and before.owner <= token and before.step < step:
                    return True
            if number <= step:
                return True
        return False

    def undo(self, begun: list[Record]) -> None:
        """Undo changes that earlier owners have begun."""
        owner = self._ownership.owner() if begun else 0
        for each in begun:
            if each.by is not None and each.by < owner:
                self._take_back(each)
