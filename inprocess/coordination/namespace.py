"""Namespaces and guards: the part of a store that belongs to one iteration, and the end of its validity."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from inprocess.coordination.mixin import Guard, StoreMixin
from inprocess.exception import StaleViewError

if TYPE_CHECKING:
    from inprocess.coordination.client import StoreClient
    from inprocess.coordination.etcd import EtcdClient

__all__ = ["Namespace", "PrefixView", "RestartIndex"]

_RESTART_INDEX = "restart_index"
_STARTED = "started_ms"


class RestartIndex:
    """The number of the current iteration of the job: a fencing token that only grows and is never deleted.

    `store` is the whole store of the job.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def begin(self) -> None:
        """Start at 0 unless the job has begun. StaleViewError if it has restarted since."""
        found = self._store.compare_set(_RESTART_INDEX, "", "0").decode()
        if found != "0":
            raise StaleViewError(f"this process is too late: the job was restarted {found} times without it")

    def first_token(self) -> int:
        """Return the fencing token of iteration 0, the same on all ranks: the start of the job, in milliseconds."""
        return int(self._store.compare_set(_STARTED, "", str(time.time_ns() // 1_000_000)))

    def guard(self, iteration: int) -> Guard:
        """Return the guard of requests that are valid in this iteration only."""
        return Guard(_RESTART_INDEX, str(iteration))

    def current(self) -> int:
        """Return the index, which may have grown by the time the caller has it."""
        return int(self._store.get(_RESTART_INDEX))

    def advance(self, iteration: int) -> None:
        """End this iteration. The first process counts. StaleViewError if the next iteration is over, too."""
        following = str(iteration + 1)
        if self._store.compare_set(_RESTART_INDEX, str(iteration), following).decode() != following:
            raise StaleViewError(f"this process ends iteration {iteration}, but the others are further on")


class PrefixView:
    """All operations of a store on keys that begin with "prefix/"."""

    base_store: Any
    prefix: str

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in keys]

    def _guarded(self) -> dict[str, Guard]:
        """Return the guard argument of requests that change something or wait."""
        return {}

    @property
    def timeout(self) -> timedelta:
        """The default timeout of `get` and `wait`: that of the base store."""
        timeout: timedelta = self.base_store.timeout
        return timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.base_store.set(self._full(key), value, **self._guarded())

    def get(self, key: str) -> bytes:
        value: bytes = self.base_store.get(self._full(key))
        return value

    def get_within(self, key: str, timeout: timedelta) -> bytes:
        value: bytes = self.base_store.get_within(self._full(key), timeout, **self._guarded())
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self.base_store.add(self._full(key), amount, **self._guarded()))

    def append(self, key: str, value: str | bytes) -> None:
        self.base_store.append(self._full(key), value, **self._guarded())

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.base_store.check(self._all(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.base_store.wait(self._all(keys), self.timeout if timeout is None else timeout, **self._guarded())

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value: bytes = self.base_store.compare_set(self._full(key), expected, desired, **self._guarded())
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self.base_store.delete_key(self._full(key), **self._guarded()))

    def num_keys(self) -> int:
        """Return how many keys the whole store has, as torch's prefix store does."""
        return int(self.base_store.num_keys())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self.base_store.multi_get(self._all(keys))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.base_store.multi_set(self._all(keys), list(values), **self._guarded())

    def arrive(self, name: str, member: str) -> int:
        return int(self.base_store.arrive(self._full(name), member, **self._guarded()))

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None) -> int:
        return int(self.base_store.wait_size(self._full(name), size, timeout, **self._guarded()))

    def members(self, name: str) -> frozenset[str]:
        return frozenset(self.base_store.members(self._full(name)))

    def clear(self) -> None:
        """Delete this namespace. A store that cannot delete by prefix keeps its keys."""
        delete_prefix = getattr(self.base_store, "delete_prefix", None)
        if delete_prefix is not None:
            delete_prefix(f"{self.prefix}/")


class Namespace(PrefixView, StoreMixin):  # of both, the operations of the view count
    """Namespace of an iteration in the `base_store` of a job, with its own logical contents.

    It has the same keys as `inprocess.store.PrefixStore`. Requests that change something or wait are guarded:
    StaleViewError as soon as the job is in another iteration.
    """

    def __init__(self, iteration: int, base_store: StoreClient | EtcdClient) -> None:
        """`base_store` must accept guards (`takes_guards`)."""
        self.prefix = str(iteration)
        self.base_store = base_store
        self._guard = {"guard": RestartIndex(base_store).guard(iteration)}

    def _guarded(self) -> dict[str, Guard]:
        return self._guard
