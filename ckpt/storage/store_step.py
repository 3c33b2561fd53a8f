"""The files of a published step in a store, and what holds it while it is read.

    readers/<save>/<host>-<pid>-<start>-<random>    a process reads this step; put again and again

The prefix of a save is never used for anything else, so what is read below it is of this step. A lease only keeps the
step from being removed meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ckpt.errors import StorageError
from ckpt.storage.leases import ReadLease, is_reader_alive, reader_name
from ckpt.storage.regular_files import DamagedFileError, MissingFileError
from ckpt.storage.step_source import HeldStep, OpenFile, StepSource
from ckpt.storage.store_owner import STORE_EXPIRY_S, STORE_RENEW_S
from ckpt.storage.stores.interface import Store


class StoreStep(StepSource):
    """The objects below the prefix of a save, or below the place of the store itself if it is empty."""

    piece_bytes = 16 << 20

    def __init__(self, store: Store, prefix: str) -> None:
        self.path = store.place(prefix)
        self._store = store
        self._prefix = prefix

    def read(self, name: str, max_bytes: int) -> bytes:
        """See `StepSource.read`."""
        try:
            found = self._store.get(self._key(name), max_bytes)
        except ValueError:
            raise DamagedFileError("is larger than any document of a checkpoint") from None
        if found is None:
            raise MissingFileError("is missing")
        return found

    def open(self, name: str) -> OpenFile:
        """See `StepSource.open`. Makes no request: an object that is missing shows when it is read."""
        return _StoreFile(self._store, self._key(name))

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a document of the step, durably. StorageError if that fails."""
        self._store.put(self._key(name), data)

    def scan(self) -> tuple[dict[str, int], set[str]]:
        """See `StepSource.scan`."""
        below = self._key_of("")
        return {each.key[len(below) :]: each.nbytes for each in self._store.below(below)}, set()

    def changed_s(self, name: str) -> float:
        """See `StepSource.changed_s`."""
        about = self._store.about(self._key(name))
        return 0.0 if about is None else about.modified_s

    def usage(self) -> tuple[int, float]:
        """See `StepSource.usage`."""
        found = list(self._store.below(self._key_of("")))
        return sum(each.nbytes for each in found), max((each.modified_s for each in found), default=0.0)

    def delete(self) -> None:
        """Delete all objects."""
        self._store.delete([each.key for each in self._store.below(self._key_of(""))])

    def _key(self, name: str) -> str:
        if not name or any(part in ("", ".", "..") for part in name.split("/")):
            raise StorageError(f"{name!r} is not a name below {self.path}; the checkpoint is damaged")
        return self._key_of(name)

    def _key_of(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


class _StoreFile(OpenFile):
    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    @property
    def size(self) -> int:
        about = self._store.about(self._key)
        if about is None:
            raise MissingFileError("is missing")
        return about.nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        data = self._store.read(self._key, offset, nbytes)
        if data is None:
            raise MissingFileError("is missing")
        return data


def hold_objects(
    store: Store, prefix: str, save: str | None, is_published: Callable[[], bool], *, renewing: bool
) -> HeldStep:
    """Hold the step below a prefix. `is_published` asks the store whether it is still there.

    A lease is made, where that is possible, if its `save` is given. With `renewing` a thread renews it; otherwise each
    `check` does. CheckpointNotFoundError if the step is gone.
    """
    lease = None if save is None else _make_lease(store, save, renewing)
    return HeldStep(StoreStep(store, prefix), is_published, lease)


def _make_lease(store: Store, save: str, renewing: bool) -> ReadLease | None:
    """Make a lease, an object; None where nothing may be put."""
    key = f"readers/{save}/{reader_name()}"
    renew = functools.partial(store.put, key, b"")
    try:
        renew()
    except StorageError:
        return None
    return ReadLease(renew, functools.partial(store.delete, [key]), STORE_RENEW_S, renewing=renewing)


def readers(store: Store, save: str | None = None) -> set[str]:
    """Return the names of the saves that have a reader with a lease: of all, or of one. One list."""
    found = store.below("readers/" if save is None else f"readers/{save}/")
    return {each.key.split("/")[1] for each in found if _is_alive(store, each.key, each.modified_s)}


def remove_stale_readers(store: Store) -> None:
    """Remove the leases of readers that have ended. For the owner."""
    stale = [each.key for each in store.below("readers/") if not _is_alive(store, each.key, each.modified_s)]
    store.delete(stale)


def _is_alive(store: Store, key: str, modified_s: float) -> bool:
    return is_reader_alive(key.rpartition("/")[2], lambda: store.now() - modified_s < STORE_EXPIRY_S)
