"""Changes of the state of published steps in a store: they are removed, moved aside, or published again.

A process may be stopped between its look at the token and a put, while a later owner claims the root and continues the
very step whose state is changed then. So the record tells the token first, and no object is deleted; then the token is
looked at again, before the second put. Either that look finds the claim of the later owner; or that owner, who looks
for such records after its claim, finds this one, publishes the step again, and the second put fails. Without the second
put, for whatever reason, the step is published as before.

Pins of a step that is removed are looked at again after the first put, too: whoever pins a step looks at its record
afterwards. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ckpt.errors import CheckpointError, FencedError, StorageError
from ckpt.storage.documents import MAX_DOCUMENT_BYTES, decode_document
from ckpt.storage.names import parse_save_name
from ckpt.storage.ownership import Ownership
from ckpt.storage.records import Record, Records, State
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.step_documents import INTENT
from ckpt.storage.store_step import StoreStep
from ckpt.storage.stores.interface import Store

__all__ = ["StateChanges"]


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
