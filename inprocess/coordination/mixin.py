"""Logical contents of a store, on top of the operations that every store of torch has."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from inprocess.attribution import InterruptionRecord, compact_ranks
from inprocess.exception import BarrierOverflow, BarrierTimeout, StoreTimeoutError
from inprocess.ipc.suspension import Silence

__all__ = ["NO_GUARD", "Guard", "StoreMixin", "few", "in_bytes"]

_INTERRUPTED = "interrupted"
_RECORDS = "interruption_records"
_LOCKED_RECORDS = "interruption_records_locked"
_COMPLETED = "completed"
_TERMINATED = "terminated_ranks"
_CHUNK = timedelta(seconds=1)
_SHORTEST_S = 0.001  # torch's stores take 0 for "no limit"


def in_bytes(value: str | bytes) -> bytes:
    """Return a value as it is stored: text in UTF-8."""
    return value.encode() if isinstance(value, str) else bytes(value)


def few(keys: Sequence[str]) -> str:
    """Return the names of the first keys, for a message."""
    return ", ".join(map(repr, keys[:4])) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


if TYPE_CHECKING:

    class _Operations:
        """For type checkers: the operations that `StoreMixin` needs of the class it is mixed into."""

        def set(self, key: str, value: Any) -> None:
            """Write a value, over any other."""

        def get(self, key: str) -> bytes:
            """Return the value of a key, once it exists."""
            raise NotImplementedError

        def add(self, key: str, amount: int) -> int:
            """Add to a number, 0 if it does not exist yet; returns the sum."""
            raise NotImplementedError

        def append(self, key: str, value: Any) -> None:
            """Append to a value, empty if it does not exist yet."""

        def check(self, keys: list[str]) -> bool:
            """Whether all these keys exist now."""
            raise NotImplementedError

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            """Wait until all these keys exist."""

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            """Write `desired` if the key holds `expected`, or is absent and that is empty; returns the value."""
            raise NotImplementedError

        def delete_key(self, key: str) -> bool:
            """Delete a key; returns whether it existed."""
            raise NotImplementedError

        def num_keys(self) -> int:
            """Return how many keys there are."""
            raise NotImplementedError

        @property
        def timeout(self) -> timedelta:
            """How long `get` and `wait` wait by default."""
            raise NotImplementedError

else:
    _Operations = object


class Guard(NamedTuple):
    """A condition of requests: as long as `key` has this `value`. Otherwise they end with StaleViewError."""

    key: str
    value: str


NO_GUARD = Guard("", "")


class StoreMixin(_Operations):
    """Logical contents of a store: `class MyStore(StoreMixin, torch.distributed.SomeStore)`.

    Usable from any thread that may use the store itself. Every operation may be repeated, and waits check again what is
    there.

    A store with sets of its own overrides `arrive`, `wait_size` and `members`, which are built from keys here.
    """

    # Interruption

    def record_interrupted(self, records: Iterable[InterruptionRecord]) -> None:
        """Report faults: list the records, then set the flag. After the lock, records are no longer listed."""
        text = "".join(f"{record}\n" for record in records)
        if text:
            self.append(_RECORDS, text)
        self.set(_INTERRUPTED, "1")

    def is_interrupted(self) -> bool:
        """Return whether a fault was reported."""
        return self.check([_INTERRUPTED])

    def wait_for_interrupted(self, timeout: timedelta) -> bool:
        """Wait until a fault is reported; return False if none is in time."""
        return self._appears(_INTERRUPTED, timeout)

    def lock_interruption_records(self) -> None:
        """Fix the list of records. The first call counts: all ranks read the same list afterwards."""
        self.compare_set(_LOCKED_RECORDS, "", self._text(_RECORDS) or "\n")

    def get_interruption_records(self) -> tuple[InterruptionRecord, ...]:
        """Return the records, each once, in the order of the reports; once locked, those that were there then."""
        text = self._text(_LOCKED_RECORDS) or self._text(_RECORDS)
        return tuple(dict.fromkeys(InterruptionRecord.from_str(line) for line in text.splitlines() if line))

    # Completion

    def record_completed(self) -> None:
        """Report that the wrapped function has returned."""
        self.set(_COMPLETED, "1")

    def is_completed(self) -> bool:
        """Return whether the function has returned on a rank."""
        return self.check([_COMPLETED])

    def wait_for_completed(self, timeout: timedelta) -> bool:
        """Wait until the function has returned on a rank; return False if it has not in time."""
        return self._appears(_COMPLETED, timeout)

    # Ranks

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Report that these ranks take no further part. Must come before arriving for them at a barrier."""
        text = "".join(f"{rank}\n" for rank in ranks)
        if text:
            self.append(_TERMINATED, text)

    def get_terminated_ranks(self) -> frozenset[int]:
        """Return all ranks recorded so far."""
        return frozenset(int(line) for line in self._text(_TERMINATED).split())

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Publish the initial rank of the process that has this rank."""
        self.set(f"initial_rank/{rank}", str(initial_rank))

    def get_initial_rank(self, rank: int) -> int:
        """Return a published initial rank; waits for it. StoreTimeoutError after the timeout of the store."""
        return int(self._gather([f"initial_rank/{rank}"])[0])

    def get_initial_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the initial ranks of these ranks, in their order; waits for them."""
        return [int(text) for text in self._gather([f"initial_rank/{rank}" for rank in ranks])]

    def send_heartbeat(self, rank: int, text: str) -> None:
        """Overwrite the heartbeat of a rank. Any text that differs from the last one is a sign of life."""
        self.set(f"heartbeat/{rank}", text)

    def get_heartbeat(self, rank: int) -> str | None:
        """Return the last heartbeat of a rank; None if it sent none."""
        return self._text(f"heartbeat/{rank}") or None

    def get_heartbeats(self, ranks: Iterable[int]) -> dict[int, str | None]:
        """Return the last heartbeat of each of these ranks; None for one that sent none."""
        return {rank: self.get_heartbeat(rank) for rank in ranks}

    def send_state(self, state: Mapping[str, Any], rank: int, name: str = "") -> None:
        """Publish the state of a rank, of JSON types. `name` distinguishes states sent for several purposes."""
        self.set(f"state/{name}/{rank}", json.dumps(state))

    def get_states(self, ranks: Sequence[int], name: str = "") -> list[Any]:
        """Return the states of these ranks, in their order; waits for them."""
        return [json.loads(text) for text in self._gather([f"state/{name}/{rank}" for rank in ranks])]

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

    # Sets, made of keys

    def arrive(self, name: str, member: str) -> int:
        """Add a member (one line of text) to a set, which may contain it already; return the size."""
        self.append(f"{name}/members", f"{member}\n")
        members = self._members(name)
        # The member with which the set reaches a size reports it; `wait_size` copes with one that died before that.
        self.set(f"{name}/reached/{members.index(member) + 1}", "1")
        return len(members)

    def wait_size(self, name: str, size: int, timeout: timedelta | None = None) -> int:
        """Wait until a set has `size` members; return how many it has. StoreTimeoutError if it does not in time."""
        found = len(self._members(name))
        if found >= size:
            return found
        try:
            self.wait([f"{name}/reached/{size}"], timeout)
        except StoreTimeoutError:
            # The process that should have reported the size may have died between the two steps of its arrival.
            if len(self._members(name)) < size:
                raise
        return len(self._members(name))

    def members(self, name: str) -> frozenset[str]:
        """Return the members of a set, none if it does not exist."""
        return frozenset(self._members(name))

    def _members(self, name: str) -> list[str]:
        return list(dict.fromkeys(self._text(f"{name}/members").splitlines()))

    # Waiting

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys exist. StoreTimeoutError after `timeout` (default: that of the store)."""
        if timeout is None:
            timeout = self.timeout
        seconds = max(timeout.total_seconds(), _SHORTEST_S)
        started = time.monotonic()
        try:
            super().wait(list(keys), timedelta(seconds=seconds))
        except RuntimeError as error:  # torch has no special error for a timeout
            if time.monotonic() - started < 0.9 * seconds:
                raise
            raise StoreTimeoutError(f"{', '.join(keys)}: not in the store within {seconds:g} s") from error

    def _appears(self, key: str, timeout: timedelta) -> bool:
        try:
            self.wait([key], timeout)
        except StoreTimeoutError:
            return False
        return True

    def get_within(self, key: str, timeout: timedelta) -> bytes:
        """Return the value of a key once it exists. StoreTimeoutError if it does not appear in time."""
        self.wait([key], timeout)
        return self.get(key)

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

    def _text(self, key: str) -> str:
        return self.get(key).decode() if self.check([key]) else ""


def _ranks(members: Iterable[str]) -> str:
    return compact_ranks(int(member.split(" ")[0]) for member in members)


def _missing(name: str, members: Iterable[str], count: int, timeout: timedelta) -> str:
    """Return who is missing; if the ranks are not numbered from 0 to count - 1, who has arrived."""
    arrived = [int(member.split(" ")[0]) for member in members]
    text = f"{name}: {len(arrived)} of {count} ranks arrived within {timeout.total_seconds():g} s"
    if set(arrived) <= set(range(count)):
        return f"{text}; missing: {compact_ranks(set(range(count)) - set(arrived))}"
    return f"{text}; arrived: {compact_ranks(arrived)}"
