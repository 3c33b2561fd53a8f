"""A store in the memory of this process: the smallest backend, for tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence

from ckpt.errors import StorageError
from ckpt.storage.stores.interface import About, Store, is_key


class MemoryStore(Store):
    """Objects in a dict. It ends with the process. See `Store`."""

    def __init__(self, url: str = "memory:///") -> None:
        self.url = url.rstrip("/")
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, About]] = {}
        self._numbers = itertools.count()

    def create(self, key: str, data: bytes) -> About | None:
        """See `Store.create`."""
        with self._lock:
            return None if key in self._objects else self._set(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Store.put`."""
        with self._lock:
            self._set(key, bytes(data))

    def _set(self, key: str, data: bytes) -> About:
        if not is_key(key):
            raise StorageError(f"{key!r} is not a key of {self.url}; the checkpoint or the plan is damaged")
        about = About(key, len(data), time.time(), str(next(self._numbers)))
        self._objects[key] = data, about
        return about

    def read(self, key: str, offset: int, nbytes: int) -> memoryview | None:
        """See `Store.read`."""
        found = self._objects.get(key)
        return None if found is None else memoryview(found[0])[offset : offset + nbytes]

    def about(self, key: str) -> About | None:
        """See `Store.about`."""
        found = self._objects.get(key)
        return None if found is None else found[1]

    def below(self, prefix: str) -> Iterator[About]:
        """See `Store.below`."""
        with self._lock:
            found = [about for key, (_, about) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found, key=lambda each: each.key))

    def names(self, prefix: str) -> tuple[list[str], list[About]]:
        """See `Store.names`."""
        found = list(self.below(prefix))
        folders = {each.key[len(prefix) :].split("/")[0] for each in found if "/" in each.key[len(prefix) :]}
        return sorted(folders), [each for each in found if "/" not in each.key[len(prefix) :]]

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def now(self) -> float:
        """See `Store.now`."""
        return time.time()
