"""Verbs of ranks, made of those of the store: barriers, and keys that the others read."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta

from inprocess.attribution import compact_ranks
from inprocess.coordination.verbs import StoreVerbs
from inprocess.exception import BarrierOverflow, BarrierTimeout, StoreTimeoutError
from inprocess.ipc.suspension import Silence

_CHUNK = timedelta(seconds=1)


class RankVerbs(StoreVerbs):
    """A store with barriers and keys of ranks. Waits check again what is there."""

    def send_key(self, key: str, rank: int, name: str = "") -> None:
        """Publish the grouping key of a rank."""
        self.set(f"key/{name}/{rank}", key)

    def get_keys(self, ranks: Sequence[int], name: str = "") -> list[str]:
        """Return the grouping keys of these ranks, in their order; waits for them."""
        return [text.decode() for text in self._gather([f"key/{name}/{rank}" for rank in ranks])]

    # Barriers

    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Arrive for `ranks` and wait until `rendezvous_count` ranks have arrived. A name is used once.

        The wait is divided into pieces of `timeout_chunk` (default: `timeout`); between them the caller runs bytecode.
        BarrierTimeout after `timeout` names the missing ranks. BarrierOverflow if more arrive than expected; every
        arrival counts, also of the same rank.
        """
        call = uuid.uuid4().hex  # so every arrival is a new member, but one that is sent again is the same
        members = [f"{rank} {call} {index}" for index, rank in enumerate(ranks)]
        self._meet(f"barrier/{group_name}", members, rendezvous_count, timeout, timeout_chunk)

    def reentrant_barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Arrive for `ranks`, which may have arrived before, and wait until `rendezvous_count` different ones have.

        With a `timeout` of 0 this only arrives. Otherwise as `barrier`.
        """
        members = [str(rank) for rank in ranks]
        self._meet(f"reentrant_barrier/{group_name}", members, rendezvous_count, timeout, timeout_chunk)

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Return whether a rank has arrived, or another process for it."""
        return str(rank) in self.members(f"reentrant_barrier/{group_name}")

    def _meet(self, name: str, members: Iterable[str], count: int, timeout: timedelta, chunk: timedelta | None) -> None:
        waited = Silence(timeout.total_seconds())  # without the time in which this process was suspended
        size = 0
        for member in members:
            size = self.arrive(name, member)
        while timeout and size < count:
            left = timedelta(seconds=max(0.0, timeout.total_seconds() - waited.seconds()))
            pause = min(left, chunk or left)
            waited.expect(pause.total_seconds())
            try:
                size = self.wait_size(name, count, pause)
            except StoreTimeoutError:
                if waited.seconds() >= timeout.total_seconds():
                    raise BarrierTimeout(_missing(name, self.members(name), count, timeout)) from None
        if size > count:
            raise BarrierOverflow(f"{name}: {size} arrivals where {count} were expected: {_ranks(self.members(name))}")

    def _gather(self, keys: list[str]) -> list[bytes]:
        """Wait for the values that others write, in slices, and return them."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                self.wait(keys, _CHUNK)
                return [self.get(key) for key in keys]
            except StoreTimeoutError:
                if time.monotonic() >= deadline:
                    raise


def _ranks(members: Iterable[str]) -> str:
    return compact_ranks(int(member.split(" ")[0]) for member in members)


def _missing(name: str, members: Iterable[str], count: int, timeout: timedelta) -> str:
    """Return who is missing; if the ranks are not numbered from 0 to count - 1, who has arrived."""
    arrived = [int(member.split(" ")[0]) for member in members]
    text = f"{name}: {len(arrived)} of {count} ranks arrived within {timeout.total_seconds():g} s"
    if set(arrived) <= set(range(count)):
        return f"{text}; missing: {compact_ranks(set(range(count)) - set(arrived))}"
    return f"{text}; arrived: {compact_ranks(arrived)}"
