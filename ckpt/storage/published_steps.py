"""The published steps of a root, for those who read them, and which of them are pinned."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from typing import Any

from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from ckpt.storage.documents import INTENT, decode_document, well_formed
from ckpt.storage.names import parse_save_name, part_name, step_name, step_numbers
from ckpt.storage.step_source import HeldStep, StepSource, read_document
from ckpt.storage.stores.interface import Store


class PublishedSteps(ABC):
    """The part of a `Root` that needs no owner. `path` is the absolute path of the root, or its URL."""

    path: str
    store: Store
    """The place of the root as a store: for what lies at the same keys in every kind of root."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the published steps, ascending; none if there is no root. StorageError if it cannot be read.

        Also those that were copied here from a root of the other kind: see `copied_steps`.
        """

    def listed_steps(self) -> list[int]:
        """Return the published steps, for the process that has just published one: what it saw then will do, once."""
        return self.steps()

    @abstractmethod
    def source_of(self, step: int) -> StepSource:
        """Return the files of a published step. CheckpointNotFoundError if it is not there, where that is known."""

    def save_of(self, step: int) -> str | None:
        """Return the name of the save that was published as this step; None if there is none, or its intent is damaged.

        StorageError if it cannot be read.
        """
        try:
            source = self.source_of(step)
            data = read_document(source, INTENT)
            save = None if data is None else decode_document(data, source.path).get("save")
        except (CheckpointCorruptError, CheckpointNotFoundError):
            return None
        return save if isinstance(save, str) else None

    def saves(self) -> dict[int, str | None]:
        """Return the name of the save of each of `steps`, as `save_of`."""
        return {step: self.save_of(step) for step in self.steps()}

    def published_s(self, step: int) -> float:
        """Return when a step was published, in seconds since 1970, to be shown. StorageError if that cannot be read.

        In a directory a file tells that, and a copy of it has another time; see `saved_s`.
        """
        source = self.source_of(step)
        if not (written := source.changed_s("zarr.json")) and read_document(source, "zarr.json") is None:
            raise StorageError(f"{source.path}/zarr.json does not exist (any more)")
        return written

    def saved_s(self, step: int) -> float:
        """Return when a step was saved, in seconds since 1970, as rank 0 has recorded it: copies of it say the same.

        CheckpointCorruptError if it does not say.
        """
        source, name = self.source_of(step), part_name(0)
        where = os.path.join(source.path, name)
        with well_formed(where):
            if (data := read_document(source, name)) is None:
                raise CheckpointCorruptError(f"{where} is missing")
            times = decode_document(data, where)["times"]
            began = times["write_begin"] if "write_begin" in times else times["begin"]
            return float(began) + float(times.get("write_s", 0.0)) + float(times.get("sync_s", 0.0))

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

    # -- pins ----------------------------------------------------------------------------------------------------------
    #
    # Retention keeps pinned steps, and no command removes them. Anybody who may write to the root can pin a step; it
    # need not be owned. A pin belongs to the number: a step of another branch, published under it later, is pinned too.

    def pinned_steps(self, *, fresh: bool = False) -> set[int]:
        """Return the numbers of the pinned steps. One list. `fresh`: also those that another host has just pinned."""
        del fresh  # a list of a store always is
        _, objects = self.store.names("pins/")
        return step_numbers(each.key.rpartition("/")[2] for each in objects)

    def pin_step(self, step: int) -> None:
        """Pin a published step, durably. CheckpointNotFoundError if it is not there. Idempotent."""
        with self.hold_step(step, lease=True) as held:  # it is not removed meanwhile, as far as leases and locks reach
            is_new = self._make_pin(step)
            try:
                held.check()
                if self._is_leaving(step):  # whoever removes it may not have seen the pin
                    raise CheckpointNotFoundError(f"step {step} of {self.path} is being removed", step=step)
            except CheckpointNotFoundError:
                if is_new:
                    self.unpin_step(step)
                raise

    def _make_pin(self, step: int) -> bool:
        """Make the pin of a step, durably; False if it was there."""
        is_new = step not in self.pinned_steps()
        self.store.create(f"pins/{step_name(step)}", b"")
        return is_new

    def _is_leaving(self, step: int) -> bool:
        """Return whether the removal of a step has begun, and may not have seen a pin that was made since."""
        del step  # in a directory it does not have its name any more
        return False

    def unpin_step(self, step: int) -> bool:
        """Let a step be removed again; False if it was not pinned."""
        if step not in self.pinned_steps():
            return False
        self.store.delete([f"pins/{step_name(step)}"])
        return True
