"""The agreement in any order of requests, with processes that fail, leave or are killed before any of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from inprocess.agreement import Agreement, IterationOutcome, Roster, depart
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.blame import Position
from tests.inprocess.interleaving import Actor, Contents, SteppedStore, Turns

ITERATIONS = 3
LONG_S = 1000.0  # nothing here waits; it is how long the tries go on

# What a process does in an iteration. The last two: it leaves, before or after the roster is closed.
FATES = ("complete", "complete", "fail", "leave", "leave late")


@dataclass(frozen=True)
class Ended:
    """What a process saw of an iteration."""

    rank: int
    outcome: IterationOutcome
    records: tuple[InterruptionRecord, ...] = ()
    roster: Roster | None = None


@dataclass
class Process:
    """A rank and its monitor process, in the order of requests of `protocol`, `monitor_thread` and `daemon`."""

    initial_rank: int
    world_size: int
    fates: tuple[str, ...]
    contents: dict[int | None, Contents]
    position: tuple[int, int] | None = None  # rank and iteration, as far as its monitor process knows
    left: bool = False  # it has said so itself
    seen: dict[int, Ended] = field(default_factory=dict)

    def agreement(self, actor: Actor, iteration: int, world_size: int | None = None) -> Agreement:
        return Agreement(SteppedStore(self.contents, iteration, actor), iteration, world_size)

    def run(self, actor: Actor) -> None:
        rank, world_size = self.initial_rank, self.world_size
        for iteration in range(ITERATIONS):
            agreement = self.agreement(actor, iteration, world_size)
            agreement.publish_rank(self.initial_rank, rank)
            self.position = rank, iteration
            ended = self._iteration(agreement, rank, self.fates[iteration])
            if ended.outcome is IterationOutcome.COMPLETED or ended.roster is None:
                return
            if self.initial_rank in ended.roster.departed:
                return
            if self.fates[iteration] == "leave late":
                self._leave(actor, rank, iteration, world_size)
                return
            rank -= sum(lost < rank for lost in ended.roster.terminated_ranks)
            world_size -= len(ended.roster.terminated_ranks)

    def _iteration(self, agreement: Agreement, rank: int, fate: str) -> Ended:
        if fate == "leave":
            self._leave(agreement.store._actor, rank, agreement.iteration, agreement.world_size)  # type: ignore[attr-defined]
            return Ended(rank, IterationOutcome.INTERRUPTED)
        if fate == "fail":
            agreement.interrupt(InterruptionRecord(rank, Interruption.EXCEPTION))
        else:
            agreement.announce_done()
            agreement.complete(self.initial_rank, LONG_S, 0.0)
        outcome = None
        while outcome is None:
            outcome = agreement.wait_outcome(0.0)
        if outcome is IterationOutcome.COMPLETED:
            self.seen[agreement.iteration] = ended = Ended(rank, outcome)
            return ended
        records = agreement.last_call(self.initial_rank, 0.0)
        agreement.arrive_at_end(self.initial_rank)
        roster = agreement.wait_roster(self.initial_rank, LONG_S, 0.0)
        self.seen[agreement.iteration] = ended = Ended(rank, outcome, records, roster)
        return ended

    def _leave(self, actor: Actor, rank: int, iteration: int, world_size: int | None) -> None:
        record = InterruptionRecord(rank, Interruption.BASE_EXCEPTION)
        depart(
            lambda i: self.agreement(actor, i, world_size if i == iteration else None),
            iteration,
            self.initial_rank,
            [record],
            LONG_S,
        )
        self.left = True

    def speak_for(self, actor: Actor) -> None:
        """The monitor process, after the rank was killed."""
        if self.position is None or self.left:
            return
        rank, iteration = self.position
        record = InterruptionRecord(rank, Interruption.TERMINATED)
        depart(lambda i: self.agreement(actor, i), iteration, self.initial_rank, [record], LONG_S)


@settings(
    max_examples=250,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    fates=st.lists(st.tuples(*[st.sampled_from(FATES)] * ITERATIONS), min_size=1, max_size=4),
    deaths=st.dictionaries(st.integers(0, 3), st.integers(2, 70), max_size=3),
    schedule=st.lists(st.integers(0, 7), max_size=300),
)
@example(fates=[("complete",) * 3] * 3, deaths={}, schedule=[])
@example(fates=[("fail",) * 3, ("complete",) * 3, ("fail",) * 3], deaths={1: 30, 2: 31}, schedule=[])
def test_all_ranks_come_to_the_same_conclusions(
    fates: list[tuple[str, ...]], deaths: dict[int, int], schedule: list[int]
) -> None:
    """Whatever the order of requests, and whichever processes die, all ranks come to the same decisions.

    `deaths` is by process: before which of its requests it is killed. The first one publishes its rank in iteration 0;
    a process that is killed before that is noticed by its neighbor in the ring of heartbeats, which is not modelled
    here.
    """
    contents: dict[int | None, Contents] = defaultdict(Contents)
    processes = [Process(i, len(fates), fate, contents) for i, fate in enumerate(fates)]
    turns = Turns(schedule)
    by_actor = {turns.add(f"rank {p.initial_rank}", p.run): p for p in processes}

    def kill_in_time(actor: Actor) -> None:
        process = by_actor.get(actor)
        if process is None or actor.killed or actor.steps != deaths.get(process.initial_rank):
            return
        actor.killed = True
        turns.add(f"monitor of rank {process.initial_rank}", process.speak_for)

    turns.run(kill_in_time)
    check(processes, {p.initial_rank for a, p in by_actor.items() if a.killed})


def check(processes: list[Process], killed: set[int]) -> None:
    members = {p.initial_rank for p in processes}
    for iteration in range(ITERATIONS):
        seen = {p.initial_rank: p.seen[iteration] for p in processes if iteration in p.seen}
        if not seen:
            return
        views: set[Any] = {(e.outcome, e.records, e.roster) for e in seen.values()}
        assert len(views) == 1, f"iteration {iteration} was seen differently: {views}"
        numbers = [ended.rank for ended in seen.values()]
        assert len(set(numbers)) == len(numbers), "two processes with the same number"
        ((outcome, records, roster),) = views
        if outcome is IterationOutcome.COMPLETED:
            assert not any(iteration + 1 in p.seen or (p.position or (0, 0))[1] > iteration for p in processes)
            return
        assert roster is not None
        assert records, "interrupted for no reason"
        assert len(roster.terminated_ranks) == len(roster.departed)
        # Only who is dead, or wanted to leave, is left out.
        wanted = {p.initial_rank for p in processes if any("leave" in fate for fate in p.fates[: iteration + 1])}
        assert roster.departed <= (killed | wanted) & members
        members -= roster.departed
        for initial_rank, ended in seen.items():
            assert (ended.rank in roster.terminated_ranks) == (initial_rank in roster.departed)


# -- blame -------------------------------------------------------------------------------------------------------------

DECIDING, REPORTING = 24, 8  # more requests than a rank makes for that


def test_a_late_rank_that_answers_while_another_one_decides_stays_blamed() -> None:
    """Rank 1 is late, and makes any number of its requests between any two of rank 0, which decides."""
    for before, meanwhile in itertools.product(range(DECIDING), range(1, REPORTING)):
        contents: dict[int | None, Contents] = defaultdict(Contents)

        def agreement(actor: Actor, contents: dict[int | None, Contents] = contents) -> Agreement:
            return Agreement(SteppedStore(contents, 0, actor), 0, 3)  # rank 2 does not answer

        def begin(actor: Actor, agreement: Any = agreement) -> None:
            for rank in range(3):
                agreement(actor).publish_rank(10 + rank, rank)
            agreement(actor).interrupt(InterruptionRecord(1, Interruption.SOFT_TIMEOUT))

        def report(actor: Actor, rank: int, agreement: Any = agreement) -> Agreement:
            reports: Agreement = agreement(actor)
            reports.report_position(rank, Position(rank, waits=False, function="a.py in f", line="a.py:7 in f"), "")
            return reports

        begins = Turns([])
        begins.add("the beginning", begin)
        begins.run(lambda actor: None)
        turns = Turns([0] * before + [1] * meanwhile + [0] * DECIDING)
        decides = turns.add("rank 0", lambda actor, report=report: report(actor, 0).last_call(10, 0.0))
        turns.add("rank 1", lambda actor, report=report: report(actor, 1).store.arrive("last_call", "11"))
        turns.run(lambda actor: None)
        assert decides.steps < DECIDING
        assert [record.rank for record in decides.result] == [1], f"{meanwhile} of its requests after {before}"
