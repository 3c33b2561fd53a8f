"""When a process that is ready to join interrupts the others, by policy, and by what it would gain."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import pytest

from inprocess import Compose, Wrapper
from inprocess.agreement import Agreement, IterationOutcome
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination import Access, CoordinationStore, Namespace, RestartIndex, StoreServer
from inprocess.joining import Newcomer, Rejoin
from inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    FilterCountGroupedByKey,
    LauncherOrder,
    Layer,
    MaxActiveWorldSize,
    ShiftRanks,
    Tree,
)
from inprocess.rank_filter import MaxActiveWorldSize as ClassicMaxActiveWorldSize
from inprocess.settings import RejoinPolicy
from tests.inprocess.coordination.helpers import eventually

LONG_S = 20.0


@pytest.fixture
def store() -> Iterator[CoordinationStore]:
    server = StoreServer(Access("127.0.0.1", 0))
    with CoordinationStore(server.start()) as client:
        RestartIndex(client).begin()
        yield client
    server.close()


class Job:
    """A job that began with `places` ranks, of which `live` are left, in iteration 1."""

    def __init__(self, store: CoordinationStore, places: int, live: int, active: tuple[int, int]) -> None:
        self.store, self.places = store, places
        Agreement(Namespace(0, store), 0, places).report_active_size(active[1])
        RestartIndex(store).advance(0)
        self.ranks = [self.agreement(live) for _ in range(live)]
        for rank, each in enumerate(self.ranks):
            each.publish_rank(rank, rank)
        self.ranks[0].report_active_size(active[0])
        self.now = 1000.0

    def agreement(self, world_size: int | None = None) -> Agreement:
        return Agreement(Namespace(1, self.store), 1, world_size)

    def newcomer(self, place: int, policy: str = "now", **wrapper: Any) -> Callable[[], bool]:
        """A process in the place of this rank is ready; return whether it is due."""
        Agreement.announce_newcomer(self.store, place + self.places, self.places)
        rejoin = Rejoin(
            RejoinPolicy.from_text(policy), self.places, Wrapper(**wrapper).hooks.active_of, lambda: self.now
        )
        return lambda: rejoin.is_due(self.agreement())


def test_now_is_at_once_when_the_job_is_complete_again(store: CoordinationStore) -> None:
    assert Job(store, 3, 2, (2, 3)).newcomer(1)()


def test_of_several_the_last_one_makes_the_job_complete(store: CoordinationStore) -> None:
    job = Job(store, 8, 5, (5, 8))
    first = job.newcomer(5)
    assert not first()
    job.now += 4
    second = job.newcomer(6)
    assert not first()
    job.now += 4
    assert not first(), "the second one came 4 s ago"
    assert not second()
    third = job.newcomer(7)
    assert [first(), second(), third()] == [True, True, True]


def test_those_that_do_not_come_are_waited_for_a_few_seconds(store: CoordinationStore) -> None:
    job = Job(store, 8, 5, (5, 8))
    due = job.newcomer(5)
    assert not due()
    job.now += 4.9
    assert not due()
    job.now += 0.1
    assert due()


def test_after_is_so_long_after_it_is_ready(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    due = job.newcomer(1, "after=60")
    assert not due()
    job.now += 59.9
    assert not due()
    job.now += 0.1
    assert due()


def test_next_restart_never_asks(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    due = job.newcomer(1, "next-restart")
    job.now += 1e9
    assert not due()


@pytest.mark.parametrize(
    "wrapper",
    [
        {"rank_assignment": Compose(MaxActiveWorldSize(2), ShiftRanks())},
        {"rank_filter": ClassicMaxActiveWorldSize(2)},
        {"rank_assignment": Tree([Layer(max_ranks=2)])},
        {"rank_assignment": lambda ctx: ctx},  # of which only the number of active ranks is known
    ],
)
def test_one_that_would_only_be_a_spare_never_asks(store: CoordinationStore, wrapper: dict[str, Any]) -> None:
    job = Job(store, 4, 3, (2, 2))
    due = job.newcomer(3, **wrapper)
    job.now += 1e6
    assert not due()


def test_a_spare_that_was_used_up_is_worth_it_only_when_active_ranks_are_missing(store: CoordinationStore) -> None:
    job = Job(store, 4, 1, (1, 2))
    rank_assignment = Compose(MaxActiveWorldSize(2), ShiftRanks())
    due = job.newcomer(3, rank_assignment=rank_assignment)
    assert not due()
    job.now += 5
    assert due()


def test_as_many_as_a_multiple_needs(store: CoordinationStore) -> None:
    job = Job(store, 8, 6, (4, 8))
    rank_assignment = Compose(ActiveWorldSizeDivisibleBy(4), ShiftRanks())
    first = job.newcomer(6, rank_assignment=rank_assignment)
    assert not first()
    job.now += 1e6
    assert not first(), "of 7 ranks 4 would be active, as now"
    second = job.newcomer(7, rank_assignment=rank_assignment)
    assert [first(), second()] == [True, True]


def test_groups_are_waited_for(store: CoordinationStore) -> None:
    job = Job(store, 4, 2, (2, 4))
    rank_assignment = Compose(LauncherOrder(), FilterCountGroupedByKey(lambda state: state.rank // 2, lambda n: n == 2))
    first = job.newcomer(2, rank_assignment=rank_assignment)
    job.now += 1e6
    assert not first(), "it alone would have to leave again"
    assert job.newcomer(3, rank_assignment=rank_assignment)()


def test_a_tree_has_no_place_for_one(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    due = job.newcomer(2, rank_assignment=Tree([Layer()]))
    job.now += 1e6
    assert not due()


def test_own_rank_filters_are_asked_if_they_say_it(store: CoordinationStore) -> None:
    class Half(MaxActiveWorldSize):
        def active_of(self, world_size: int) -> int:
            return world_size // 2

        def assign(self, ctx: Any) -> Any:
            raise AssertionError("it is not run")

    job = Job(store, 4, 2, (1, 2))
    due = job.newcomer(2, rank_assignment=Compose(Half(), ShiftRanks()))
    job.now += 1e6
    assert not due(), "of 3 ranks 1 would be active, as now"
    assert job.newcomer(3, rank_assignment=Compose(Half(), ShiftRanks()))()


def test_nothing_is_restarted_when_the_function_has_returned(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    due = job.newcomer(1)
    job.ranks[1].announce_done()
    assert not due()


@pytest.mark.parametrize("kind", [Interruption.NEWCOMER, Interruption.EXCEPTION])
def test_an_iteration_that_is_interrupted_already_is_not_interrupted(
    kind: Interruption, store: CoordinationStore
) -> None:
    job = Job(store, 3, 2, (2, 3))
    due = job.newcomer(1)
    assert due()
    job.ranks[1].interrupt(InterruptionRecord(1, kind))
    assert not due()


def test_one_asks_once_while_the_others_come_to_the_end(store: CoordinationStore) -> None:
    looks = Semaphore(0)

    class Looking(Rejoin):
        def is_due(self, agreement: Agreement) -> bool:
            looks.release()
            return super().is_due(agreement)

    job = Job(store, 3, 2, (2, 3))
    with ThreadPoolExecutor(1) as pool:
        place = pool.submit(wait_for_place, job, 1, rejoin=Looking(RejoinPolicy.from_text("now"), 3, int))
        for _ in range(3):
            assert looks.acquire(timeout=LONG_S)
        roster = end_of(job)
        assert place.result(LONG_S).rank == 2
    assert roster.joined == (4,)
    assert len(store.get("1/records").splitlines()) == 1


def test_an_iteration_that_has_not_begun_is_not_interrupted(store: CoordinationStore) -> None:
    RestartIndex(store).advance(0)
    agreement = Agreement(Namespace(1, store), 1)
    rejoin = Rejoin(RejoinPolicy.from_text("now"), 3, int)
    Agreement.announce_newcomer(store, 4, 3)
    assert not rejoin.is_due(agreement)
    Agreement(Namespace(1, store), 1, 2).publish_rank(0, 0)
    assert not rejoin.is_due(agreement)


def end_of(job: Job) -> Any:
    """The ranks come to the end of the iteration; the roster."""
    outcome = job.ranks[0].wait_outcome(LONG_S)
    assert outcome is IterationOutcome.INTERRUPTED
    for rank, each in enumerate(job.ranks):
        each.last_call(rank, LONG_S if rank else 0.1)
        each.arrive_at_end(rank)
    (roster,) = {each.wait_roster(rank, LONG_S) for rank, each in enumerate(job.ranks)}
    return roster


def wait_for_place(job: Job, place: int, number: int = 1, rejoin: Rejoin | None = None) -> Any:
    rejoin = rejoin or Rejoin(RejoinPolicy.from_text("now"), job.places, int)
    return Newcomer(place + number * job.places, None).wait_for_place(
        job.store, lambda iteration: Agreement(Namespace(iteration, job.store), iteration), LONG_S, rejoin
    )


def test_several_in_quick_succession_are_one_restart(store: CoordinationStore) -> None:
    job = Job(store, 5, 3, (3, 5))
    with ThreadPoolExecutor(2) as pool:
        places = [pool.submit(wait_for_place, job, place) for place in (4, 3)]
        roster = end_of(job)
        assert roster.joined == (8, 9)
        assert {each.result(LONG_S).rank for each in places} == {3, 4}
    reasons = job.ranks[0].find_reason()
    assert {(each.rank, each.interruption) for each in reasons} <= {(r, Interruption.NEWCOMER) for r in (3, 4)}
    assert "in the place of initial rank" in reasons[0].summary
    assert roster.faults.counts == {}
    assert roster.faults.ages == ()


def test_one_that_died_before_it_was_named_is_not_waited_for_once_its_place_is_taken(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    Agreement.announce_newcomer(store, 4, 3)  # it dies
    with ThreadPoolExecutor(1) as pool:
        place = pool.submit(wait_for_place, job, 1, 2)
        roster = end_of(job)
        assert roster.joined == (7,)
        assert place.result(LONG_S).rank == 2


NEWCOMER = """
import json
import sys
from inprocess.agreement import Agreement
from inprocess.coordination import Access, CoordinationStore, Namespace
from inprocess.joining import Newcomer, Rejoin
from inprocess.settings import RejoinPolicy

access, initial_rank, places, policy = json.loads(sys.argv[1])
store = CoordinationStore(Access.from_document(access))
Newcomer(initial_rank, None).wait_for_place(
    store,
    lambda iteration: Agreement(Namespace(iteration, store), iteration),
    60.0,
    Rejoin(RejoinPolicy.from_text(policy), places, int),
)
"""


@contextlib.contextmanager
def newcomer_process(job: Job, place: int, policy: str) -> Iterator[Callable[[], None]]:
    """A process in the place of this rank waits; the function kills it, and returns when the job can know that."""
    initial_rank = place + job.places
    argument = json.dumps([job.store.access.to_document(), initial_rank, job.places, policy])
    with subprocess.Popen([sys.executable, "-c", NEWCOMER, argument]) as process:

        def kill() -> None:
            process.kill()
            process.wait(LONG_S)
            eventually(lambda: initial_rank not in Agreement.newcomers(job.store))

        try:
            eventually(lambda: initial_rank in Agreement.newcomers(job.store))
            yield kill
        finally:
            process.kill()


def test_a_restart_is_without_one_that_was_killed_while_it_waited(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    with newcomer_process(job, 1, "next-restart") as kill:
        kill()
        job.ranks[1].interrupt(InterruptionRecord(1, Interruption.EXCEPTION))
        assert end_of(job).joined == ()


def test_the_restart_that_one_has_asked_for_is_without_it_if_it_was_killed_since(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    with newcomer_process(job, 1, "now") as kill:
        assert job.ranks[0].wait_outcome(LONG_S) is IterationOutcome.INTERRUPTED
        kill()
        assert end_of(job).joined == ()


def test_one_that_was_killed_makes_no_job_complete(store: CoordinationStore) -> None:
    job = Job(store, 4, 2, (2, 4))
    with newcomer_process(job, 3, "next-restart") as kill:
        kill()
        assert not job.newcomer(2)(), "the job has 3 of 4 ranks with it, so it waits for the fourth"


def test_one_that_waits_for_long_is_named(store: CoordinationStore) -> None:
    job = Job(store, 3, 2, (2, 3))
    with newcomer_process(job, 1, "next-restart"):
        job.ranks[1].interrupt(InterruptionRecord(1, Interruption.EXCEPTION))
        assert end_of(job).joined == (4,)


@pytest.mark.parametrize(
    ("text", "delay_s"), [("now", 0.0), ("next-restart", None), ("after=90", 90.0), ("after=0.5", 0.5)]
)
def test_the_policies(text: str, delay_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RejoinPolicy.from_text(text) == RejoinPolicy(delay_s)
    assert Wrapper(rejoin=text).rejoin == text
    assert Wrapper().rejoin is None
    monkeypatch.setenv("INPROCESS_REJOIN", "after=7")
    assert Wrapper(rejoin=text).rejoin == "after=7", "the launcher's"


@pytest.mark.parametrize("text", ["", "soon", "after", "after=", "after=-1", "after=nan", "after=inf", "before=3"])
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rejoin must be 'now', 'next-restart', or 'after=SECONDS'"):
        RejoinPolicy.from_text(text)
    with pytest.raises(ValueError, match="rejoin must be"):
        Wrapper(rejoin=text)


def test_a_number_is_no_policy() -> None:
    with pytest.raises(TypeError, match="rejoin must be a str"):
        Wrapper(rejoin=60)  # type: ignore[arg-type]
