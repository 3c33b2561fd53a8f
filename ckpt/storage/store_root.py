"""A checkpoint root in a store: a bucket, and every other kind of `stores.interface.Store`.

    records/<save>/000.json        what was decided about a save: see `records`
    saves/<save>/intent.json       made once, by the coordinator; the token is checked after it
    saves/<save>/packs/...         the same files as in a directory (docs/format.md); nothing is ever renamed or copied
    saves/<save>/parts/000/...
    step_00000100/...              a step that was copied here from a directory: see `copied_steps`
    owner/...                      the job that may publish: see `store_owner`
    readers/...                    leases of the processes that read a step: see `store_step`
    pins/step_00000100             this step is pinned

A save is published when the first of its records is created. The published steps are the records that say so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FencedError, StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage.copied_steps import CopiedDirectories
from ckpt.storage.documents import INTENT
from ckpt.storage.interface import Aside, MovedStep, Root
from ckpt.storage.names import PUBLISHED_STEP, SaveId, parse_save_name, step_name
from ckpt.storage.outcomes import MovedTo
from ckpt.storage.records import Record, Records, StateChanges
from ckpt.storage.step_source import HeldStep
from ckpt.storage.store_owner import StoreOwnership
from ckpt.storage.store_save import StoreSave
from ckpt.storage.store_step import StoreStep, hold_objects, readers, remove_stale_readers
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions, Store

_KEEP_RECORDS_S = 3600.0
_LEAST_LOOK_S = 0.2
_LEASE_TIMEOUT_S = 5.0
_ATTEMPTS = 10
_NAMED_STEP = re.compile(r"(?P<root>.*[^/])/step_(?P<step>\d{8,18})")
_OF_STEP = re.compile(r"(?P<root>.*)/saves/(?P<save>step_\d{8,18}-o\d+-[0-9a-f]{16})")


class StoreRoot(Root):
    """A checkpoint root in a store. See `Root`."""

    reuses_files = False
    removed_by_all = False
    least_look_s = _LEAST_LOOK_S

    def __init__(
        self,
        store: Store,
        options: StorageOptions | None = None,
        step: SaveId | None = None,
        impatient: Store | None = None,
    ) -> None:
        """`step`: this is the place of a step, not of a root; see `hold_itself`. `impatient`: see `StoreOwnership`."""
        self.path = store.url
        self.options = options
        self.ownership = StoreOwnership(store, impatient or store)
        self.store = store
        self._records = Records(store)
        self._copied = CopiedDirectories(store)
        self._changes = StateChanges(store, self._records, self.ownership, self._published, self.pinned_steps)
        self._step = step
        self._removed_here: dict[str, MovedStep] = {}  # by the names of the saves

    def steps(self) -> list[int]:
        """See `Root.steps`."""
        return [] if self._step is not None else sorted(self._published())

    def listed_steps(self) -> list[int]:
        """See `Root.listed_steps`."""
        return sorted(record.save.step for record in self._records.once_listed() if record.is_published)

    def _published(self) -> dict[int, Record]:
        """Return the records of the published steps, also of those that were copied here from a directory. Two lists.

        Of two saves of one step, that of this root counts.
        """
        records = self._records.all()
        published = {record.save.step: record for record in records if record.is_published}
        copied = self._copied.records(records, only=not published)
        return {record.save.step: record for record in copied} | published

    def _record(self, step: int) -> Record | None:
        return self._published().get(step)

    def tip(self) -> dict[str, Any] | None:
        """See `Root.tip`. One list."""
        newest = max(self._published().items(), default=None, key=lambda item: item[0])
        return None if newest is None else {"step": newest[0], "save": newest[1].save.name}

    def save_of(self, step: int) -> str | None:
        """See `Root.save_of`."""
        record = self._record(step)
        return None if record is None else record.save.name

    def saves(self) -> dict[int, str | None]:
        """See `Root.saves`. One list."""
        return {step: record.save.name for step, record in self._published().items()}

    def source_of(self, step: int) -> StoreStep:
        """See `Root.source_of`, as of the last list of the steps."""
        return self._source(self._listed(step))

    def _source(self, record: Record) -> StoreStep:
        return StoreStep(self.store, record.prefix)

    def published_s(self, step: int) -> float:
        """See `Root.published_s`, as of the last list of the steps."""
        return self._listed(step).time

    def saved_s(self, step: int) -> float:
        """See `Root.saved_s`, as of the last list of the steps."""
        return self._listed(step).time

    def _listed(self, step: int) -> Record:
        """Return the record of a step that `steps` has just listed: no request for each."""
        found = [each for each in self._records.known() if each.save.step == step and each.is_published]
        return found[0] if len(found) == 1 else self._existing(step)

    def _existing(self, step: int) -> Record:
        record = self._record(step)
        if record is None:
            raise CheckpointNotFoundError(f"{self.path} has no published step {step}", step=step)
        return record

    def hold_step(self, step: int, *, lease: bool, renewing: bool = False) -> HeldStep:
        """See `Root.hold_step`."""
        return self._hold(self._existing(step), lease, renewing)

    def hold_itself(self) -> HeldStep:
        """See `Root.hold_itself`.

        The place of a step is the URL of the root, ``/saves/``, and the name of its save; or that of the root and
        ``/step_00000010``; or that to which a step of a directory was copied.
        """
        if self._step is not None:
            return self._hold(Record.published(self._step), lease=True, renewing=True)
        match = _NAMED_STEP.fullmatch(self.path)
        if self.store.about("zarr.json") is not None and self.store.about(INTENT) is not None:
            return hold_objects(self.store, "", None, lambda: self.store.about(INTENT) is not None, renewing=False)
        if match is not None:
            root = store_root(match["root"], self.options or StorageOptions())
            return root.hold_step(int(match["step"]), lease=True, renewing=True)
        raise CheckpointNotFoundError(f"{self.path} has no published checkpoint")

    def _hold(self, found: Record, lease: bool, renewing: bool) -> HeldStep:
        def is_published() -> bool:
            record = self._records.of(found.save)
            if record is None and found.at:  # no owner has taken it in yet
                return self.store.about(f"{found.at}/{INTENT}") is not None
            return record is not None and (record.is_published or record.state not in ("abandoned", "removed"))

        readers_of = found.save.name if lease else None
        return hold_objects(self.store, found.prefix, readers_of, is_published, renewing=renewing)

    def moved(self, *states: MovedTo) -> list[MovedStep]:
        """See `Root.moved`. One list; two, or three if steps were copied here, for those whose files may be deleted."""
        looks = "abandoned" in states or "removed" in states
        there = {f"saves/{save.name}" for save in self._saves()} if looks else set()
        records = [each for each in self._records.all() if each.state in states and each.by is None]
        there |= self._copied_there(records) if looks else set()
        return [self._as_moved(each, has_files=not each.is_gone or each.prefix in there) for each in records]

    def _as_moved(self, record: Record, *, has_files: bool = True) -> MovedStep:
        assert record.state != "published"
        source, save = self._source(record), record.save
        return MovedStep(save.step, save.name, record.state, source, record.time, has_files)

    def publish_again(self, name: str, token: int) -> None:
        """See `Root.publish_again`. Its objects have stayed where they are."""
        record = self._moved(name)
        self.ownership.check(token)
        if record.save.step in self._published():
            raise CheckpointExistsError(
                f"{name} cannot be published again: step {record.save.step} exists in {self.path}"
            )
        if self._records.change(record, "published") is None or not self._records.keeps(record):
            raise StorageError(f"{name} cannot be published again: another process has just changed or removed it")
        try:
            self.ownership.check(token)
        except FencedError:  # the later owner may have saved the same step meanwhile
            published = self._records.of(record.save)
            if published is not None and published.state == "published":
                self._records.change(published, record.state)
            raise

    def _moved(self, name: str) -> Record:
        for record in self._records.all():
            if record.save.name == name and record.state in ("superseded", "damaged") and record.by is None:
                return record
        raise CheckpointNotFoundError(f"{self.path} has no step {name} that was moved aside")

    def move_aside(self, step: int, token: int, why: Aside) -> str | None:
        """See `Root.move_aside`. Its objects stay where they are."""
        self.ownership.check(token)
        for _ in range(_ATTEMPTS):
            record = self._record(step)
            if record is not None and self._changes.make([record], why, token):
                return self.store.place(record.prefix)
            self.ownership.check(token)
            if record is None:
                break
            # A late process of an earlier owner was faster, and may leave the step published: look again.
        return None

    def retire_step(self, step: int, token: int | None, plan: str | None = None) -> MovedStep | None:
        """See `Root.retire_step`."""
        record = self._record(step)
        if record is None:
            return MovedStep(step, step_name(step), "removed", StoreStep(self.store, step_name(step)), has_files=False)
        if record.save.name in readers(self.store, record.save.name) or step in self.pinned_steps():
            return None
        changed = self._remove([record], token)
        if not changed and step in self._published():  # it was pinned meanwhile
            return None
        return self._as_moved(replace(record, state="removed", by=None), has_files=bool(changed))

    def retire_steps(
        self, steps: Sequence[int], token: int, plan: str | None = None, *, failed: dict[int, str]
    ) -> list[int]:
        """See `Root.retire_steps`. Four lists for all, and two puts for each."""
        records = {each.save.step: each for each in self._records.known() if each.is_published}
        read = readers(self.store)
        pinned = self.pinned_steps()  # after the readers: whoever pins a step reads it until it is pinned
        chosen = [records[step] for step in steps if step in records and step not in pinned]
        return self._remove([each for each in chosen if each.save.name not in read], token, failed)

    def _remove(self, records: list[Record], token: int | None, failed: dict[int, str] | None = None) -> list[int]:
        """Remove steps, and return their numbers; without those that another process has changed meanwhile."""
        changed = self._changes.make(records, "removed", token, failed)
        self._removed_here |= {record.save.name: self._as_moved(record) for record in changed}
        if token is not None and len(changed) + len(failed or {}) < len(records):
            self.ownership.check(token)  # else another process of this owner has changed it
        return [record.save.step for record in changed]

    def _is_leaving(self, step: int) -> bool:
        """See `PublishedSteps._is_leaving`."""
        record = self._record(step)
        if record is None:  # the removal has ended since the last look
            return True
        newest = self._records.of(record.save)  # None: a copied step that no owner has taken in yet
        return newest is not None and newest.state == "removed"

    def pending(self) -> list[SaveId]:
        """See `Root.pending`. Two lists."""
        saves = self._saves()  # before the records: one that is decided meanwhile has its record then
        decided = set(self.store.names("records/")[0])
        left = [save for save in saves if save.name not in decided]
        return sorted(left, key=lambda save: (save.step, save.owner, save.nonce))

    def is_gone(self, save: SaveId) -> bool | None:
        """See `Root.is_gone`."""
        record = self._records.of(save)
        if record is not None:
            return record.is_gone
        return False if any(True for _ in self.store.below(f"saves/{save.name}/")) else None

    def _saves(self) -> list[SaveId]:
        """Return all saves that have objects."""
        return [save for name in self.store.names("saves/")[0] if (save := parse_save_name(name)) is not None]

    def pending_save(self, save: SaveId, token: int | None = None) -> StoreSave:
        """See `Root.pending_save`."""
        return StoreSave(self, self.store, self._records, save, token)

    def refresh(self) -> None:
        """See `Root.refresh`: a list shows what was put before it. Two lists."""
        self._copied.take_in(self._records)

    def _copied_there(self, records: Iterable[Record]) -> set[str]:
        """Return the prefixes of steps that were copied from a directory and are there. A list if there are some."""
        if not any(each.at for each in records):
            return set()
        return {name for name in self.store.names("")[0] if PUBLISHED_STEP.fullmatch(name)}

    def removed_here(self) -> list[MovedStep]:
        """See `Root.removed_here`."""
        return [moved for _, moved in sorted(self._removed_here.items())]

    def delete(self, moved: MovedStep, before_each: Callable[[], None]) -> None:
        """See `Root.delete`. The record is not among the files."""
        before_each()
        if moved.why in ("superseded", "damaged") and self._records.change(self._moved(moved.name), "removed") is None:
            return  # published again meanwhile, or removed
        if moved.has_files:
            assert isinstance(moved.source, StoreStep)
            moved.source.delete()
        self._removed_here.pop(moved.name, None)

    def clean_records(self) -> None:
        """See `Root.clean_records`. Also of an earlier owner: what this decides and deletes can never be published."""
        saves = self._saves()  # before the records: one that is decided meanwhile has its record then
        records = {record.save.name: record for record in self._records.all()}
        self._changes.undo([each for each in records.values() if each.by is not None])
        self._abandon_late([save for save in saves if save.name not in records])
        left = {f"saves/{save.name}" for save in saves} | self._copied_there(records.values())
        absent = [each for each in records.values() if each.prefix not in left]
        for each in absent:
            if each.is_published:
                self._records.keeps(each)  # its process came late, and ended before it could withdraw the record
        gone = [each for each in absent if each.is_gone]
        before = self.store.now() - _KEEP_RECORDS_S if gone else 0.0
        if old := [each.save for each in gone if each.about and each.about.modified_s < before]:
            self._records.forget(old)
        with contextlib.suppress(StorageError):
            remove_stale_readers(self.store)

    def _abandon_late(self, undecided: list[SaveId]) -> None:
        """Abandon what late writers of earlier owners have put of saves that never began: those without an intent."""
        owner = self.ownership.owner() if undecided else 0
        for save in undecided:
            if save.owner < owner and self.store.about(f"saves/{save.name}/{INTENT}") is None:
                reason = Failure(None, "SaveAbandonedError", "a process of an earlier owner came too late")
                self._records.create(Record.abandoned(save, reason))


def store_root(url: str, options: StorageOptions) -> StoreRoot:
    """Return the root at a URL, the same for each call of one process. StorageError if it cannot be opened."""
    return _opened(url.rstrip("/"), options, os.getpid())


@functools.lru_cache(maxsize=64)
def _opened(url: str, options: StorageOptions, pid: int) -> StoreRoot:
    match = _OF_STEP.fullmatch(url)
    where, step = (url, None) if match is None else (match["root"], parse_save_name(match["save"]))
    impatient = replace(options, timeout_s=min(options.timeout_s, _LEASE_TIMEOUT_S))
    return StoreRoot(open_store(where, options), options, step, open_store(where, impatient))
