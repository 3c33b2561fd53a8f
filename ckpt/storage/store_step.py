"""The files of a published step in a store, and what holds it while it is read.

    readers/<save>/<host>-<pid>-<start>-<random>    a process reads this step; put again and again

The prefix of a save is never used for anything else, so what is read below it is of this step. A lease only keeps the
step from being removed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable

from ckpt.errors import CheckpointNotFoundError, StorageError
from ckpt.storage.leases import keep_renewing
from ckpt.storage.ranged_file import RangedFile
from ckpt.storage.regular_files import DamagedFileError, MissingFileError
from ckpt.storage.step_source import HeldStep, OpenFile, StepSource
from ckpt.storage.store_owner import STORE_EXPIRY_S, STORE_RENEW_S
from ckpt.storage.stores.interface import Store
from inprocess.ipc.process import Process

__all__ = ["HeldObjects", "StoreStep", "readers", "remove_stale_readers"]


class StoreStep(StepSource):
    """The objects below the prefix of a save, or below the place of the store itself if it is empty."""

    piece_bytes = 16 << 20

    def __init__(self, store: Store, prefix: str) -> None:
        self.path = store.place(prefix)
        self._store = store
        self._prefix = prefix

    @property
    def looks_like_step(self) -> bool:
        """See `StepSource.looks_like_step`: a record says that there is one."""
        return True

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

    def usage(self) -> tuple[int, float]:
        """See `StepSource.usage`."""
        found = list(self._store.below(self._key_of("")))
        return sum(each.nbytes for each in found), max((each.modified_s for each in found), default=0.0)

    def _key(self, name: str) -> str:
        if not name or any(part in ("", ".", "..") for part in name.split("/")):
            raise StorageError(f"{name!r} is not a name below {self.path}; the checkpoint is damaged")
        return self._key_of(name)

    def _key_of(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


class _StoreFile(RangedFile):
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

    def close(self) -> None:
        pass


class HeldObjects(HeldStep):
    """Holds a step. Makes a lease where it can, if so asked; with `renewing` a thread renews it."""

    def __init__(
        self, store: Store, prefix: str, save: str | None, is_published: Callable[[], bool], *, renewing: bool
    ) -> None:
        """`is_published` asks the store whether the step is still there. A lease is made if its `save` is given."""
        self.source = StoreStep(store, prefix)
        self.path = self.source.path
        self._store = store
        self._is_published = is_published
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._renewed = time.monotonic()
        self._lease = None if save is None else _make_lease(store, save)
        try:
            self.check()  # after the lease was made, which the owner looks for before it removes the step
        except BaseException:
            self.close()
            raise
        if renewing and self._lease is not None:
            keep_renewing(self, HeldObjects._renew, self._closed, STORE_RENEW_S)

    def check(self) -> None:
        """See `HeldStep.check`."""
        if not self._is_published():
            raise CheckpointNotFoundError(
                f"{self.path} was removed while it was read; open the checkpoint again, and the newest step"
            )
        self.renew()

    def renew(self) -> None:
        """See `HeldStep.renew`."""
        if time.monotonic() - self._renewed >= STORE_RENEW_S:
            self._renew()

    @property
    def still_there(self) -> bool:
        """See `HeldStep.still_there`."""
        try:
            return self._is_published()
        except StorageError:
            return True  # nothing is known of a removal

    def close(self) -> None:
        """See `HeldStep.close`."""
        self._closed.set()
        lease, self._lease = self._lease, None
        if lease is not None and os.getpid() == self._pid:  # a fork must not remove its parent's lease
            with contextlib.suppress(StorageError):
                self._store.delete([lease])

    def _renew(self) -> None:
        self._renewed = time.monotonic()
        if (lease := self._lease) is not None and os.getpid() == self._pid:  # that of a fork ends with its parent
            with contextlib.suppress(StorageError):
                self._store.put(lease, b"")


def _make_lease(store: Store, save: str) -> str | None:
    """Make a lease and return its key; None where nothing may be put."""
    own = Process.here()
    key = f"readers/{save}/{own.host}-{own.pid}-{own.start}-{secrets.token_hex(4)}"
    try:
        store.put(key, b"")
    except StorageError:
        return None
    return key


def readers(store: Store, save: str | None = None) -> set[str]:
    """Return the names of the saves that have a reader with a lease: of all, or of one. One list."""
    found = store.below("readers/" if save is None else f"readers/{save}/")
    return {each.key.split("/")[1] for each in found if _is_alive(store, each.key, each.modified_s)}


def remove_stale_readers(store: Store) -> None:
    """Remove the leases of readers that have ended. For the owner."""
    stale = [each.key for each in store.below("readers/") if not _is_alive(store, each.key, each.modified_s)]
    store.delete(stale)


def _is_alive(store: Store, key: str, modified_s: float) -> bool:
    try:
        host, pid, start, _ = key.rpartition("/")[2].rsplit("-", 3)
        alive = Process(host, int(pid), int(start)).alive
    except ValueError:
        return False
    return store.now() - modified_s < STORE_EXPIRY_S if alive is None else alive
