"""Torch-free stores with the logical contents: the whole store, and one namespace of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from inprocess.coordination.client import StoreClient
from inprocess.coordination.mixin import StoreMixin

__all__ = ["CoordinationStore", "Namespace", "PrefixView"]


class CoordinationStore(StoreClient, StoreMixin):  # of both, the operations of the client count
    """The client together with the logical contents. `CoordinationStore.from_spec(spec)` in another process."""


class PrefixView:
    """All operations of a store on keys that begin with "prefix/"."""

    base_store: Any
    prefix: str

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in keys]

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait by default: as the base store."""
        timeout: timedelta = self.base_store.timeout
        return timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.base_store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self.base_store.get(self._full(key))
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self.base_store.add(self._full(key), amount))

    def append(self, key: str, value: str | bytes) -> None:
        self.base_store.append(self._full(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.base_store.check(self._all(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.base_store.wait(self._all(keys), self.timeout if timeout is None else timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value: bytes = self.base_store.compare_set(self._full(key), expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self.base_store.delete_key(self._full(key)))

    def num_keys(self) -> int:
        """Return how many keys the whole store has, as torch's prefix store does."""
        return int(self.base_store.num_keys())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self.base_store.multi_get(self._all(keys))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.base_store.multi_set(self._all(keys), list(values))

    def arrive(self, name: str, member: str) -> int:
        return int(self.base_store.arrive(self._full(name), member))

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None) -> int:
        return int(self.base_store.wait_size(self._full(name), size, timeout))

    def members(self, name: str) -> frozenset[str]:
        return frozenset(self.base_store.members(self._full(name)))

    def clear(self) -> None:
        """Delete this namespace: from the server, and from the journal of this client.

        Other clients must `clear`, or `forget`, as well; what stays in their journals comes back after a fail-over. A
        store that cannot delete by prefix keeps its keys.
        """
        delete_prefix = getattr(self.base_store, "delete_prefix", None)
        if delete_prefix is not None:
            delete_prefix(f"{self.prefix}/")


class Namespace(PrefixView, StoreMixin):  # of both, the operations of the view count
    """Namespace `prefix` of `base_store`, with the logical contents of its own.

    The same keys as `inprocess.store.PrefixStore`: a rank and its monitor process see the same.
    """

    def __init__(self, prefix: str | int, base_store: StoreClient) -> None:
        self.prefix = str(prefix)
        self.base_store = base_store
