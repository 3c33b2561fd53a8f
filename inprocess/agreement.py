"""What the ranks agree on in one iteration, and how a rank that is gone is spoken for.

Every decision is one value in the store that is written once (compare and set), so that all ranks see the same one
whoever dies meanwhile:

    outcome   completed | interrupted. Interrupted by the first fault; completed by the last rank at the completion
              barrier. What comes second has no effect: a rank that dies after completion restarts nobody.
    reason    the interruption records, as they were when the last call ended
    roster    the ranks that do not take part any more, and processes that take part from now on. Written when all
              ranks, or somebody for them, stand at the iteration barrier; after it nobody runs code of this iteration,
              and the restart index is the next one.

Nobody acts on an old view: what changes something, or waits, is guarded by the restart index (see `RestartIndex`). A
process that was stopped or cut off meanwhile gets StaleViewError. Of this size is what each rank does for a restart: a
dozen small operations; nobody reads a list of all ranks but the one who writes the reason. Tracebacks and stacks are
written once, and read where they are shown.

Processes are identified by their *initial* rank, which never changes. The dense rank of a process in an iteration is
what the process itself published in it. A process that dies between two iterations, after the roster of the one and
before publishing its rank in the other, is therefore spoken for by initial rank alone, and the dense rank nobody
published is the one that is missing.

Used by the rank and by its monitor process; every method may be called from any thread. Imports no torch.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from inprocess.attribution import Interruption, InterruptionRecord, parse_ranks, rank_ranges
from inprocess.coordination.namespace import RestartIndex
from inprocess.exception import BarrierTimeout, StaleViewError, StoreTimeoutError

__all__ = ["Agreement", "IterationStore", "Outcome", "Roster", "depart", "heartbeat_key"]

_WORLD_SIZE = "world_size"
_OUTCOME = "outcome"
_RECORDS = "records"
_REASON = "reason"
_ROSTER = "roster"
_SOMEBODY_ACTIVE_IS_DONE = "active_done"
_AT_LAST_CALL = "last_call"
_AT_COMPLETION = "completion"
_AT_END = "iteration_barrier"
_GONE = "gone"
_DEPARTED, _JOINING, _JOINED = "departed", "joining", "joined"  # in the whole store, and never deleted
_MOST_TOLD = 64  # records that the reason tells all of; of the others, who it was
_CHUNK_S = 1.0
_DECIDE_S = 1.0  # so long the one who decides may take before another one tries


class IterationStore(Protocol):
    """The part of the store of an iteration that the protocol uses; `StoreMixin` makes it of any torch store."""

    base_store: Any

    def set(self, key: str, value: str) -> None: ...
    def multi_set(self, keys: list[str], values: list[str]) -> None: ...
    def get(self, key: str) -> bytes: ...
    def get_within(self, key: str, timeout: timedelta) -> bytes: ...
    def append(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def arrive(self, name: str, member: str) -> int: ...
    def members(self, name: str) -> AbstractSet[str]: ...


class Outcome(enum.Enum):
    """How an iteration ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Roster:
    """The end of an iteration: the dense ranks, in that iteration, and the initial ranks of those who left.

    `joined` are the initial ranks of newcomers, in the order in which they are numbered behind all others.
    """

    terminated_ranks: frozenset[int]
    gone: frozenset[int]
    joined: tuple[int, ...] = ()


class Agreement:
    """The decisions of iteration `iteration`, among `world_size` processes, in the store of that iteration.

    Who does not know the number of processes, because it died before it learned it, leaves it away.
    """

    def __init__(self, store: IterationStore, iteration: int, world_size: int | None = None) -> None:
        self.store = store
        self.iteration = iteration
        self._known_world_size = world_size
        self._answered: set[int] = set()  # for whom this object has arrived at the last call

    # -- who is who ----------------------------------------------------------------------------------------------------

    def publish_rank(self, initial_rank: int, rank: int) -> None:
        """Say which dense rank the process has. Must come before it arrives anywhere."""
        self.store.multi_set(
            [_WORLD_SIZE, f"initial_rank/{rank}", f"rank/{initial_rank}"],
            [str(self.world_size), str(initial_rank), str(rank)],
        )

    def identity_of(self, rank: int) -> int:
        """Return the initial rank of the process with this dense rank.

        A process that vanished before it published its rank has none that others know: it gets a negative number, made
        from its dense rank.
        """
        initial_rank = self._peek(f"initial_rank/{rank}")
        return -1 - rank if initial_rank is None else int(initial_rank)

    @property
    def world_size(self) -> int | None:
        """The number of processes; None as long as nobody has told this one."""
        if self._known_world_size is None and self.store.check([_WORLD_SIZE]):
            self._known_world_size = int(self.store.get(_WORLD_SIZE))
        return self._known_world_size

    def _rank_of(self, initial_rank: int) -> int | None:
        if initial_rank < 0:
            return -1 - initial_rank
        rank = self._peek(f"rank/{initial_rank}")
        return None if rank is None else int(rank)

    # -- outcome -------------------------------------------------------------------------------------------------------

    def interrupt(self, record: InterruptionRecord) -> bool:
        """Report a fault. False, and no effect, if the iteration was completed before."""
        if record.detail:
            self.store.set(_detail_key(record), record.detail)
        elif record.interruption is Interruption.SOFT_TIMEOUT:
            self.store.set(_hang_key(record.rank), record.summary)
        self.store.append(_RECORDS, f"{replace(record, detail='')}\n")
        return self._decide(_OUTCOME, Outcome.INTERRUPTED.value) == Outcome.INTERRUPTED.value

    def wait_outcome(self, timeout_s: float) -> Outcome | None:
        """Return how the iteration ended; None if it has not within `timeout_s`."""
        outcome = self._value(_OUTCOME, timeout_s)
        return None if outcome is None else Outcome(outcome.decode())

    def announce_done(self) -> None:
        """Say that the wrapped function has returned on an active rank: spares need not wait any longer."""
        self.store.set(_SOMEBODY_ACTIVE_IS_DONE, "1")

    def wait_done(self, timeout_s: float) -> bool:
        """Return whether the wrapped function has returned on an active rank, within `timeout_s`."""
        return self._value(_SOMEBODY_ACTIVE_IS_DONE, timeout_s) is not None

    def complete(self, initial_rank: int, timeout_s: float, chunk_s: float) -> Outcome:
        """Arrive at the completion barrier and return how the iteration ended. BarrierTimeout after `timeout_s`."""

        def decide() -> None:
            if self._arrive(_AT_COMPLETION, initial_rank):
                self._decide(_OUTCOME, Outcome.COMPLETED.value)

        decide()
        return Outcome(self._wait_decided(_OUTCOME, decide, _AT_COMPLETION, timeout_s, chunk_s).decode())

    # -- reason --------------------------------------------------------------------------------------------------------

    def records(self) -> tuple[InterruptionRecord, ...]:
        """Return what was reported until now, without details; more may come."""
        return _parse_records(self._lines_of_records())

    def reported_hang(self, rank: int) -> InterruptionRecord | None:
        """Return the report that this rank hangs, if there is one without its stacks."""
        summary = self._peek(_hang_key(rank))
        if summary is None:
            return None
        return InterruptionRecord(rank, Interruption.SOFT_TIMEOUT, summary.decode(errors="replace"))

    def _with_details(self, records: Sequence[InterruptionRecord]) -> tuple[InterruptionRecord, ...]:
        """Return the records, the first of each kind with its details."""
        first = {record.interruption: record for record in reversed(records)}
        detailed = {
            record: replace(record, detail=self.store.get(_detail_key(record)).decode(errors="replace"))
            for record in first.values()
            if self.store.check([_detail_key(record)])
        }
        return tuple(detailed.get(record, record) for record in records)

    def last_call(self, initial_rank: int, wait_s: float) -> tuple[InterruptionRecord, ...]:
        """Return why the iteration was interrupted: the same on all ranks; one fault of each kind with its details.

        Waits until every process has come here, or is known to be gone, at most `wait_s`, so that the reports of one
        incident are listed together.
        """
        self._answer_last_call(initial_rank)
        reason = self._value(_REASON, wait_s)
        attempt = 0
        while reason is None:
            # Whoever comes first decides: of thousands of ranks, one reads all records. If it dies, the next one does.
            attempt += 1
            me = str(initial_rank)
            if self._decide(f"{_REASON}/{attempt}", me) == me:
                self._decide_reason()
            reason = self._value(_REASON, _DECIDE_S)
        return _parse_reason(reason.decode())

    def _answer_last_call(self, initial_rank: int) -> None:
        if initial_rank not in self._answered:
            if self._arrive(_AT_LAST_CALL, initial_rank):
                self._decide_reason()
            self._answered.add(initial_rank)

    def _decide_reason(self) -> None:
        if not self.store.check([_REASON]):
            self._decide(_REASON, _format_reason(self._with_details(self.records())))

    def _lines_of_records(self) -> list[str]:
        return (self._peek(_RECORDS) or b"").decode().splitlines()

    # -- end -----------------------------------------------------------------------------------------------------------

    def mark_gone(self, initial_rank: int) -> None:
        """Say that the process takes no part in the next iteration. Must come before it arrives at the end."""
        self.store.arrive(_GONE, str(initial_rank))
        self.store.base_store.arrive(_DEPARTED, str(initial_rank))  # for good: never deleted

    def arrive_at_end(self, initial_rank: int) -> None:
        """Arrive at the iteration barrier, for oneself or for a process that is gone. Does not wait."""
        self._answer_last_call(initial_rank)
        if self._arrive(_AT_END, initial_rank):
            self._close_roster()

    def is_at_end(self, initial_rank: int) -> bool:
        """Whether the process stands at the iteration barrier, and must wait there for others."""
        return str(initial_rank) in self.store.members(_AT_END) and not self.store.check([_ROSTER])

    def wait_roster(self, initial_rank: int, timeout_s: float, chunk_s: float = _CHUNK_S) -> Roster:
        """Return who is left out from now on; the same on all ranks. The restart index is the next one then.

        BarrierTimeout names who has arrived. StaleViewError if the others are further on.
        """
        text = self._wait_decided(_ROSTER, lambda: self.arrive_at_end(initial_rank), _AT_END, timeout_s, chunk_s)
        roster = _parse_roster(text)
        self.conclude(roster)
        return roster

    def conclude(self, roster: Roster) -> None:
        """Begin the next iteration, with this roster of this one. Any number of processes do so."""
        for newcomer in roster.joined:
            self.store.base_store.arrive(_JOINED, str(newcomer))  # before another roster could name it again
        RestartIndex(self.store.base_store).advance(self.iteration)

    def wait_for_roster(self, timeout_s: float) -> None:
        """Wait until there is a roster, at most `timeout_s`; for a process that takes no part in this iteration."""
        self._value(_ROSTER, timeout_s)

    def find_roster(self) -> Roster | None:
        """Return the roster, if there is one."""
        roster = self._peek(_ROSTER)
        return None if roster is None else _parse_roster(roster)

    def find_reason(self) -> tuple[InterruptionRecord, ...]:
        """Return why the iteration was interrupted, as `last_call` does on its ranks, once that is decided."""
        reason = self._peek(_REASON)
        return () if reason is None else _parse_reason(reason.decode())

    @staticmethod
    def announce_newcomer(base_store: Any, initial_rank: int) -> None:
        """Say that a process waits for the next roster. It has to see for itself whether that names it."""
        base_store.arrive(_JOINING, str(initial_rank))

    def heartbeat_of(self, rank: int) -> bytes:
        """Return the heartbeat of a rank, which changes as long as the rank lives; empty if there is none yet."""
        return self._peek(heartbeat_key(rank)) or b""

    def was_left_behind(self, initial_rank: int) -> bool:
        """Whether the others went on without the process, when its view of the job has turned out to be old.

        Not if this iteration has just ended, for the process as well.
        """
        roster = self.find_roster()
        return roster is None or initial_rank in roster.gone  # None: the others are two iterations further on

    def _close_roster(self) -> None:
        """Write the roster: everybody has arrived. Whoever sees that first does it; a second attempt is harmless."""
        if self.store.check([_ROSTER]):
            return
        gone = {int(member) for member in self.store.members(_GONE)}
        ranks = {initial_rank: self._rank_of(initial_rank) for initial_rank in gone}
        terminated = {rank for rank in ranks.values() if rank is not None}
        if None in ranks.values():  # some died before they had a rank in this iteration: theirs are the ones missing
            arrived = {int(member) for member in self.store.members(_AT_END)}
            alive = {self._rank_of(initial_rank) for initial_rank in arrived - gone}
            terminated = set(range(self.world_size or 0)) - {rank for rank in alive if rank is not None}
        base = self.store.base_store
        newcomers = set(base.members(_JOINING))
        if newcomers:
            newcomers -= base.members(_JOINED) | base.members(_DEPARTED)
        document = {
            "terminated_ranks": sorted(terminated),
            "gone": sorted(gone),
            "joined": sorted(map(int, newcomers)),
        }
        try:
            self._decide(_ROSTER, json.dumps(document))
        except StaleViewError:
            if not self.store.check([_ROSTER]):  # else another one has just written it, and the job is further on
                raise

    # -- the store -----------------------------------------------------------------------------------------------------

    def _decide(self, key: str, value: str) -> str:
        """Write a value that nobody has written before; return the one that counts."""
        return self.store.compare_set(key, "", value).decode()

    def _arrive(self, name: str, initial_rank: int) -> bool:
        """Arrive, which can be repeated; return whether everybody has."""
        size = self.store.arrive(name, str(initial_rank))
        return self.world_size is not None and size >= self.world_size

    def _peek(self, key: str) -> bytes | None:
        """Return a value if there is one now."""
        return self.store.get(key) if self.store.check([key]) else None

    def _value(self, key: str, timeout_s: float) -> bytes | None:
        """Return a value, once there is one; None if there is none in time."""
        try:
            return self.store.get_within(key, timedelta(seconds=timeout_s))
        except StoreTimeoutError:
            return None

    def _decision(self, key: str, wait_s: float, decide: Callable[[], None]) -> bytes | None:
        """Return the decision, if there is one within `wait_s`; if not, try to decide. One that is there wins over a
        view that has become old just now, because of it."""
        try:
            value = self._value(key, wait_s)
            if value is None:
                decide()
            return value
        except StaleViewError:
            if not self.store.check([key]):
                raise
            return self.store.get(key)

    def _wait_decided(self, key: str, decide: Callable[[], None], name: str, timeout_s: float, chunk_s: float) -> bytes:
        """Wait for a decision in chunks, so that the caller returns to bytecode; at each, try to decide. Return it.

        The attempt matters when the process that should have decided has died just before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            value = self._decision(key, max(0.0, min(chunk_s, deadline - time.monotonic())), decide)
            if value is not None:
                return value
            if time.monotonic() >= deadline:
                arrived = self.store.members(name)
                raise BarrierTimeout(
                    f"iteration {self.iteration}: {len(arrived)} of {self.world_size} ranks came to {name} within "
                    f"{timeout_s:g} s: initial ranks {', '.join(sorted(arrived, key=int)) or 'none'}"
                )


def depart(
    agreements: Callable[[int], Agreement],
    iteration: int,
    initial_rank: int,
    records: Sequence[InterruptionRecord],
    timeout_s: float,
) -> None:
    """Speak for a process that is gone, or goes: on its behalf leave iteration `iteration`, or the one after it.

    `agreements` makes the agreement of an iteration. The process may have died after the roster was written without it:
    then it is expected in the next iteration, and leaves there. BarrierTimeout if others do not come to the barrier;
    the process has left all the same.
    """
    following = iteration + 1
    for current in (iteration, following):
        agreement = agreements(current)
        try:
            interrupted = [agreement.interrupt(record) for record in records]
            if interrupted and not any(interrupted):
                return  # completed: nobody waits for anybody
            agreement.mark_gone(initial_rank)
            agreement.arrive_at_end(initial_rank)
            if current == following:
                return  # its roster needs this arrival, so it is not without us; perhaps there is nobody to wait for
            if initial_rank in agreement.wait_roster(initial_rank, timeout_s).gone:
                return
        except StaleViewError:
            if current == following or agreement.was_left_behind(initial_rank):
                return  # the others went on without the process already


def heartbeat_key(rank: int) -> str:
    """Return where the monitor process of a rank, in one iteration, stamps its heartbeat."""
    return f"heartbeat/{rank}"


def _parse_roster(text: bytes) -> Roster:
    document = json.loads(text)
    return Roster(frozenset(document["terminated_ranks"]), frozenset(document["gone"]), tuple(document["joined"]))


def _detail_key(record: InterruptionRecord) -> str:
    return f"detail/{record.rank}/{record.interruption.name}"


def _hang_key(rank: int) -> str:
    return f"hangs/{rank}"


def _format_reason(records: Sequence[InterruptionRecord]) -> str:
    """Return the reason as text: the first records as they are, of the others the ranks of each kind."""
    others: dict[str, list[int]] = {}
    lines = []
    for number, record in enumerate(records):
        if number < _MOST_TOLD or record.detail:
            lines.append(str(record))
        else:
            others.setdefault(record.interruption.name, []).append(record.rank)
    return "\n".join([json.dumps({kind: rank_ranges(ranks) for kind, ranks in others.items()}), *lines])


def _parse_reason(text: str) -> tuple[InterruptionRecord, ...]:
    others, *lines = text.splitlines()
    told = _parse_records(lines)
    ranges = json.loads(others).items()
    return told + tuple(
        InterruptionRecord(rank, Interruption[kind]) for kind, ranks in ranges for rank in parse_ranks(ranks)
    )


def _parse_records(lines: Iterable[str]) -> tuple[InterruptionRecord, ...]:
    """One of each fault: the first report, or the first that has details."""
    records: dict[InterruptionRecord, InterruptionRecord] = {}
    for line in lines:
        try:
            record = InterruptionRecord.from_str(line)
        except ValueError:
            continue  # half a line of somebody who died while writing it
        if record not in records or not records[record].detail:
            records[record] = record
    return tuple(records.values())
