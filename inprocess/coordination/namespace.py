"""Namespaces and guards: the part of a store that belongs to one iteration, and the end of its validity."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from inprocess.coordination.store_compat import CompatibleVerbs
from inprocess.coordination.verbs import NO_GUARD, Guard, StoreVerbs, VerbCall
from inprocess.exception import StaleViewError

if TYPE_CHECKING:
    from inprocess.coordination.client import StoreClient
    from inprocess.coordination.etcd import EtcdClient


_RESTART_INDEX = "restart_index"
_STARTED = "started_ms"


class RestartIndex:
    """The number of the current iteration of the job: a fencing token that only grows and is never deleted.

    `store` is the whole store of the job.
    """

    def __init__(self, store: StoreVerbs) -> None:
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


class PrefixView(StoreVerbs):
    """All verbs of a store on keys and sets whose names begin with "prefix/"."""

    base_store: StoreVerbs
    prefix: str
    guard = NO_GUARD

    @property
    def timeout(self) -> timedelta:
        """The default timeout of verbs that wait: that of the base store."""
        return self.base_store.timeout

    def perform(self, call: VerbCall) -> tuple[bytes, ...]:
        return self.base_store.perform(call.under(self.prefix, self.guard))

    def perform_all(self, calls: Sequence[VerbCall]) -> list[tuple[bytes, ...]]:
        return self.base_store.perform_all([call.under(self.prefix, self.guard) for call in calls])

    def clear(self) -> None:
        """Delete this namespace. A store that cannot delete by prefix keeps its keys."""
        self.delete_prefix("")


class Namespace(PrefixView, CompatibleVerbs):
    """Namespace of an iteration in the `base_store` of a job.

    It has the same keys as `inprocess.store.PrefixStore`. Requests that change something or wait are guarded:
    StaleViewError as soon as the job is in another iteration.
    """

    def __init__(self, iteration: int, base_store: StoreClient | EtcdClient) -> None:
        """`base_store` must accept guards (`takes_guards`)."""
        self.prefix = str(iteration)
        self.base_store = base_store
        self.guard = RestartIndex(base_store).guard(iteration)
