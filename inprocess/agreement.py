"""What the ranks agree on in one iteration, and how a rank leaves it or is reported to have left.

Every decision is one value in the store that is written once (compare and set), so that all ranks see the same one,
whichever process dies meanwhile:

    outcome   completed or interrupted. The first fault makes it interrupted, the last rank at the completion barrier
              completed. What comes second has no effect: a rank that dies after completion causes no restart.
    reason    the interruption records, as they were when the last call ended
    roster    the ranks that take no further part, the processes that join, and the history of faults (`repetition`).
              Written when all ranks have arrived at the iteration barrier, or other processes for them; from then on no
              process runs code of this iteration, and the restart index is the next one

Requests that change something, or wait, are guarded by the restart index (see `RestartIndex`), so no process acts on an
old view: one that was stopped or cut off meanwhile gets StaleViewError. Each rank makes about eight small requests
for a restart. Only the process that writes the reason reads a list of all ranks. Tracebacks and stacks are written
once, and read where they are shown.

Processes are identified by their *initial* rank, which never changes. The dense rank of a process in an iteration is
the one that the process itself published. A process that dies between two iterations, after the roster of one and
before it published its rank in the next, is therefore reported by its initial rank alone, and the dense rank that no
process published is the missing one.

Used by the rank and by its monitor process; every method may be called from any thread. Imports no torch.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable, Sequence
from datetime import timedelta

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.blame import blamed
from inprocess.coordination import StoreVerbs
from inprocess.coordination.namespace import PrefixView, RestartIndex
from inprocess.coordination.verbs import VerbCall, in_bytes
from inprocess.coordination.wire import Op
from inprocess.exception import BarrierTimeout, StaleViewError, StoreTimeoutError
from inprocess.ipc.suspension import Silence
from inprocess.reasons import format_reason, parse_reason
from inprocess.repetition import PINGS, SECONDS, STEP, FaultHistory, fault_names
from inprocess.reports import Reports
from inprocess.roster import Roster

__all__ = ["Agreement", "IterationOutcome", "OnLate", "Roster", "depart"]

_WORLD_SIZE = "world_size"
_OUTCOME = "outcome"
_REASON = "reason"
_ROSTER = "roster"
_ACTIVE_RANK_IS_DONE = "active_done"
_AT_LAST_CALL = "last_call"
_AT_COMPLETION = "completion"
_AT_END = "iteration_barrier"
_DEPARTED = "departed"  # in each iteration; and in the whole store, where it is never deleted
_JOINING, _JOINED = "joining", "joined"  # in the whole store; processes attend the first, the second is never deleted
_UNKNOWN_SIZE = 1 << 62
_CHUNK_S = 1.0
_DECIDE_S = 1.0  # after which another process tries to decide
OnLate = Callable[[list[int], float], object]  # see `Agreement.wait_roster`


class IterationOutcome(enum.Enum):
    """How an iteration ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"


class Agreement(Reports):
    """The decisions of iteration `iteration`, among `world_size` processes, in the store of that iteration.

    `world_size` is None for a process that died before it learned the number of processes.
    """

    def __init__(self, store: PrefixView, iteration: int, world_size: int | None = None) -> None:
        super().__init__(store)
        self.iteration = iteration
        self._known_world_size = world_size
        self._answered: set[int] = set()  # initial ranks that arrived at the last call through this object

    # -- ranks and processes -------------------------------------------------------------------------------------------

    def publish_rank(self, initial_rank: int, rank: int) -> None:
        """Publish the dense rank of the process. Must come before it arrives anywhere."""
        self.store.multi_set(
            [_WORLD_SIZE, f"initial_rank/{rank}", f"rank/{initial_rank}"],
            [str(self.world_size), str(initial_rank), str(rank)],
        )

    def identity_of(self, rank: int) -> int:
        """Return the initial rank of the process with this dense rank.

        A process that died before it published its rank is not known to others by its initial rank: it gets a negative
        number, made from its dense rank.
        """
        initial_rank = self._peek(f"initial_rank/{rank}")
        return -1 - rank if initial_rank is None else int(initial_rank)

    @property
    def world_size(self) -> int | None:
        """The number of processes; None as long as no process has published it."""
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
        interrupted = in_bytes(IterationOutcome.INTERRUPTED.value)
        deciding = VerbCall(Op.COMPARE_SET, (_OUTCOME,), (b"", interrupted))
        return self.store.perform_all([*self._reporting(record), deciding])[-1] == (interrupted,)

    def wait_outcome(self, timeout_s: float) -> IterationOutcome | None:
        """Return how the iteration ended; None if it has not within `timeout_s`."""
        outcome = self._value(_OUTCOME, timeout_s)
        return None if outcome is None else IterationOutcome(outcome.decode())

    def announce_done(self) -> None:
        """Announce that the wrapped function has returned on an active rank: spares need not wait any longer."""
        self.store.set(_ACTIVE_RANK_IS_DONE, "1")

    def wait_done(self, timeout_s: float) -> bool:
        """Return whether the wrapped function has returned on an active rank, within `timeout_s`."""
        return self._value(_ACTIVE_RANK_IS_DONE, timeout_s) is not None

    def complete(
        self, initial_rank: int, timeout_s: float, chunk_s: float, on_late: OnLate | None = None
    ) -> IterationOutcome:
        """Arrive at the completion barrier and return how the iteration ended. `on_late` as for `wait_roster`."""

        def decide() -> None:
            self._decide(_OUTCOME, IterationOutcome.COMPLETED.value)

        if self._arrive(_AT_COMPLETION, initial_rank):  # StaleViewError here, also where there is an outcome
            decide()
        outcome = self._wait_decided(_OUTCOME, decide, _AT_COMPLETION, initial_rank, timeout_s, chunk_s, on_late)
        return IterationOutcome(outcome.decode())

    # -- reason --------------------------------------------------------------------------------------------------------

    def last_call(self, initial_rank: int, wait_s: float) -> tuple[InterruptionRecord, ...]:
        """Return why the iteration was interrupted: the same on all ranks; each distinct fault once with its details.

        Waits until every process has arrived here or departed, at most `wait_s`, so that the reports of one incident
        are listed together.
        """
        if initial_rank in self._answered:
            reason = self._value(_REASON, wait_s)
        else:
            reason = self._meet(_AT_LAST_CALL, initial_rank, _REASON, wait_s, self._decide_reason)
            self._answered.add(initial_rank)
        attempt = 0
        while reason is None:
            # The first one decides: of thousands of ranks, one reads all records. If it dies, the next one decides.
            attempt += 1
            me = str(initial_rank)
            if self._decide(f"{_REASON}/{attempt}", me) == me:
                self._decide_reason()
            reason = self._value(_REASON, _DECIDE_S)
        return parse_reason(reason.decode())

    def _answer_last_call(self, initial_rank: int) -> None:
        if initial_rank not in self._answered:
            if self._arrive(_AT_LAST_CALL, initial_rank):
                self._decide_reason()
            self._answered.add(initial_rank)

    def _decide_reason(self) -> None:
        if not self.store.check([_REASON]):
            records = self.records()
            if any(record.interruption is Interruption.SOFT_TIMEOUT for record in records):
                records = tuple(blamed(records, *self._positions()))
            self._decide(_REASON, format_reason(self._with_details(records)))

    # -- end -----------------------------------------------------------------------------------------------------------

    def mark_departed(self, initial_rank: int) -> None:
        """Report that the process takes no part in the next iteration. Must come before it arrives at the end."""
        self.store.arrive(_DEPARTED, str(initial_rank))
        self.store.base_store.arrive(_DEPARTED, str(initial_rank))

    def arrive_at_end(self, initial_rank: int) -> None:
        """Arrive at the iteration barrier, for this process or for one that has departed. Does not wait."""
        self._answer_last_call(initial_rank)
        if self._arrive(_AT_END, initial_rank):
            self._close_roster()

    def is_at_end(self, initial_rank: int) -> bool:
        """Return whether the process has arrived at the iteration barrier and still waits there for others."""
        return str(initial_rank) in self.store.members(_AT_END) and not self.store.check([_ROSTER])

    def wait_roster(
        self, initial_rank: int, timeout_s: float, chunk_s: float = _CHUNK_S, on_late: OnLate | None = None
    ) -> Roster:
        """Arrive at the end, and return the roster, the same on all ranks. The restart index is the next one then.

        After `timeout_s`, and again after half of that, one of the processes that wait calls `on_late` with the ranks
        that are absent and the time that it has waited. Without `on_late`: BarrierTimeout, with the processes that have
        arrived. StaleViewError if the others are further on.
        """

        with contextlib.suppress(StaleViewError):  # raised again below, unless there is a roster: that says more
            self._answer_last_call(initial_rank)
        text = self._wait_decided(_ROSTER, self._close_roster, _AT_END, initial_rank, timeout_s, chunk_s, on_late)
        roster = Roster.from_text(text)
        self.conclude(roster)
        return roster

    def conclude(self, roster: Roster) -> None:
        """Begin the next iteration, with this roster of this one. Every process does this; the first one counts."""
        for newcomer in roster.joined:
            self.store.base_store.arrive(_JOINED, str(newcomer))  # before a later roster could name it again
        RestartIndex(self.store.base_store).advance(self.iteration)

    def wait_for_roster(self, timeout_s: float) -> None:
        """Wait until there is a roster, at most `timeout_s`; for a process that takes no part in this iteration."""
        self._value(_ROSTER, timeout_s)

    def find_roster(self) -> Roster | None:
        """Return the roster, if there is one."""
        roster = self._peek(_ROSTER)
        return None if roster is None else Roster.from_text(roster)

    def find_reason(self) -> tuple[InterruptionRecord, ...]:
        """Return why the iteration was interrupted, as `last_call` does; empty as long as that is not decided."""
        reason = self._peek(_REASON)
        return () if reason is None else parse_reason(reason.decode())

    @staticmethod
    def announce_newcomer(base_store: StoreVerbs, initial_rank: int, places: int) -> None:
        """Announce that a process waits to be named in the next roster. It has to check whether that names it.

        `places` is how many ranks the job began with. One that waits in the same place has died, although that may not
        be known yet: the launcher starts one process after the other there. It is not named any more.
        """
        for earlier in Agreement.newcomers(base_store) - {initial_rank}:
            if earlier % places == initial_rank % places:
                base_store.arrive(_DEPARTED, str(earlier))
        Agreement.stay_newcomer(base_store, initial_rank)

    @staticmethod
    def stay_newcomer(base_store: StoreVerbs, initial_rank: int) -> None:
        """Go on waiting to be named in the next roster. To be called every second: one that has ended is not named."""
        base_store.attend(_JOINING, str(initial_rank))

    @staticmethod
    def newcomers(base_store: StoreVerbs) -> set[int]:
        """Return the initial ranks of the processes that wait to be named in the next roster, and live."""
        waiting = set(base_store.members(_JOINING))
        if waiting:
            waiting -= base_store.members(_JOINED) | base_store.members(_DEPARTED)
        return set(map(int, waiting))

    def give_up(self, records: Sequence[InterruptionRecord]) -> None:
        """Report these faults, and leave the iteration on behalf of their ranks; nothing if it was completed before.

        Their monitor processes end them when they learn of it.
        """
        if not all(self.interrupt(record) for record in records):
            return
        identities = [self.identity_of(record.rank) for record in records]
        for identity in identities:  # all of them, before one of them could complete the barrier
            self.mark_departed(identity)
        for identity in identities:
            self.arrive_at_end(identity)

    def was_left_behind(self, initial_rank: int) -> bool:
        """Return whether the others went on without the process. To be asked after a StaleViewError.

        False if this iteration has just ended, for the process as well.
        """
        roster = self.find_roster()
        return roster is None or initial_rank in roster.departed  # None: the others are two iterations further on

    def _close_roster(self) -> None:
        """Write the roster, when all have arrived. Each process that notices tries; the first one counts."""
        if self.store.check([_ROSTER]):
            return
        departed = {int(member) for member in self.store.members(_DEPARTED)}
        ranks = {initial_rank: self._rank_of(initial_rank) for initial_rank in departed}
        terminated = {rank for rank in ranks.values() if rank is not None}
        if None in ranks.values():  # some died before they had a rank in this iteration: the missing ranks are theirs
            arrived = {int(member) for member in self.store.members(_AT_END)}
            alive = {self._rank_of(initial_rank) for initial_rank in arrived - departed}
            terminated = set(range(self.world_size or 0)) - {rank for rank in alive if rank is not None}
        joined = sorted(self.newcomers(self.store.base_store))
        try:
            document = {
                "terminated_ranks": sorted(terminated),
                "departed": sorted(departed),
                "joined": joined,
                "initial_ranks": self._initial_ranks(terminated) + joined if joined else [],
                "faults": self._history(bool(joined)).to_json(),
            }
            self._decide(_ROSTER, json.dumps(document))
        except StaleViewError:
            if not self.store.check([_ROSTER]):  # else another process has just written it, and the job is further on
                raise

    def _history(self, takes_in: bool) -> FaultHistory:
        """Return the history of faults, with those of this iteration unless its restart was to take in processes."""
        self._decide_reason()
        reason = self.find_reason()
        has_fault = not takes_in or any(record.interruption is not Interruption.NEWCOMER for record in reason)
        reported = {kind: self._progress(kind) for kind in (STEP, PINGS)}
        progress = {kind: number for kind, number in reported.items() if number > 0}
        # Of the iteration before: its keys are deleted at the beginning of the one after this.
        key, store, before = f"{self.iteration - 1}/{_ROSTER}", self.store.base_store, FaultHistory()
        if store.check([key]):
            with contextlib.suppress(StoreTimeoutError):  # deleted just now: the others have written the roster
                before = Roster.from_text(store.get_within(key, timedelta(0))).faults
        seconds = self._progress(SECONDS)
        if not has_fault:
            return before.after_joining(seconds)
        return before.after(fault_names(reason), progress, seconds)

    def _initial_ranks(self, terminated: set[int]) -> list[int]:
        """Return the initial ranks by dense rank; -1 for one that left before it had published its own."""
        keys = [f"initial_rank/{rank}" for rank in range(self.world_size or 0)]
        left = iter(self.store.multi_get([key for rank, key in enumerate(keys) if rank not in terminated]))
        known = [self._peek(key) or b"-1" if rank in terminated else next(left) for rank, key in enumerate(keys)]
        return list(map(int, known))

    # -- the store -----------------------------------------------------------------------------------------------------

    def _arrive(self, name: str, initial_rank: int) -> bool:
        """Arrive, once or repeatedly; return whether all processes have."""
        size = self.store.arrive(name, str(initial_rank))
        return self.world_size is not None and size >= self.world_size

    def _value(self, key: str, timeout_s: float) -> bytes | None:
        """Return a value, once there is one; None if there is none in time."""
        try:
            return self.store.get_within(key, timedelta(seconds=timeout_s))
        except StoreTimeoutError:
            return None

    def _meet(self, name: str, initial_rank: int, key: str, wait_s: float, decide: Callable[[], None]) -> bytes | None:
        """Arrive; return the decision, if there is one within `wait_s`. Who comes last decides."""
        size = self.world_size or _UNKNOWN_SIZE
        try:
            value = self.store.meet(name, str(initial_rank), size, key, timedelta(seconds=wait_s))
        except StoreTimeoutError:
            return None
        if value is None:
            decide()
            value = self._value(key, wait_s)
        return value

    def _wait_decided(
        self,
        key: str,
        decide: Callable[[], None],
        name: str,
        initial_rank: int,
        timeout_s: float,
        chunk_s: float,
        on_late: OnLate | None,
    ) -> bytes:
        """Arrive, and wait for a decision in chunks, so that the caller returns to bytecode. Return it.

        A process that notices that all have arrived tries to decide, also in a later chunk: the last one may have died
        just before. Time in which this process was suspended does not count: the others may have been, too. A decision
        is returned although the view of this process has become old just now, because of it.
        """
        waited, next_look_s = Silence(timeout_s), timeout_s
        while True:
            waited_s = waited.seconds()
            next_look_s = min(next_look_s, waited_s + timeout_s)  # after a suspension it starts again
            pause_s = max(0.0, min(chunk_s, next_look_s - waited_s))
            waited.expect(pause_s)
            try:
                value = self._meet(name, initial_rank, key, pause_s, decide)
            except StaleViewError:
                if not self.store.check([key]):
                    raise
                value = self.store.get(key)
            if value is not None:
                return value
            waited_s = waited.seconds()
            if waited_s < next_look_s:
                continue
            arrived = self.store.members(name)
            if on_late is None:
                raise BarrierTimeout(
                    f"iteration {self.iteration}: {len(arrived)} of {self.world_size} ranks came to {name} within "
                    f"{timeout_s:g} s: initial ranks {', '.join(sorted(arrived, key=int)) or 'none'}"
                )
            next_look_s = waited_s + timeout_s / 2
            waiting = arrived - self.store.members(_DEPARTED)
            if str(initial_rank) == min(waiting, key=int, default=""):  # of many ranks that wait, one looks
                ranks = range(self.world_size or 0)
                absent = [rank for rank in ranks if str(self.identity_of(rank)) not in arrived]
                try:
                    on_late(absent, waited_s)
                except StaleViewError:  # those that were absent have just come, and the job goes on
                    if not self.store.check([key]):
                        raise


def depart(
    agreements: Callable[[int], Agreement],
    iteration: int,
    initial_rank: int,
    records: Sequence[InterruptionRecord],
    timeout_s: float,
) -> None:
    """Leave iteration `iteration`, or the one after it, on behalf of a process that is dead or about to leave.

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
                return  # completed: no process waits
            agreement.mark_departed(initial_rank)
            agreement.arrive_at_end(initial_rank)
            if current == following:
                return  # its roster needs this arrival, so it cannot miss it; there may be no other process to wait for
            if initial_rank in agreement.wait_roster(initial_rank, timeout_s).departed:
                return
        except StaleViewError:
            if current == following or agreement.was_left_behind(initial_rank):
                return  # the others went on without the process already
