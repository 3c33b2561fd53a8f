"""What the ranks agree on, on the real store server and on a store of torch; and in every order of requests."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from inprocess.absent import AbsentRanks, silent_note
from inprocess.agreement import Agreement, IterationOutcome, Roster, depart
from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.blame import Position
from inprocess.coordination import Access, CoordinationStore, Namespace, RestartIndex, StoreServer
from inprocess.coordination.etcd import EtcdClient
from inprocess.coordination.etcd_gateway import EtcdCluster
from inprocess.exception import BarrierTimeout, StaleViewError, StoreLostError
from inprocess.joining import Newcomer, Place, Rejoin, newcomer_from_environment
from inprocess.repetition import FaultHistory
from inprocess.settings import RejoinPolicy
from inprocess.store import FileStore, PrefixStore
from tests.inprocess.etcd import Etcd, needs_etcd, running_etcd
from tests.support.selection import FULL

LONG_S, CHUNK_S = 20.0, 0.02

Open = Callable[[int], Any]  # the store of an iteration


def record(rank: int, kind: Interruption = Interruption.EXCEPTION, summary: str = "") -> InterruptionRecord:
    return InterruptionRecord(rank, kind, summary)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as etcd:
        yield etcd


_STORES = ["server", "file", pytest.param("etcd", marks=needs_etcd)]

# For tests that wait several times: a wait in a file lasts a second at least.
quick = pytest.mark.parametrize(
    "open_store", _STORES if FULL else [store for store in _STORES if store != "file"], indirect=True
)


@pytest.fixture(params=_STORES)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "etcd":
        cluster = EtcdCluster(tuple(request.getfixturevalue("etcd").endpoints))
        with EtcdClient(cluster, f"test {uuid.uuid4().hex}") as base_client:
            RestartIndex(base_client).begin()
            yield lambda iteration: Namespace(iteration, base_client)
        return
    if request.param == "file":
        base = FileStore(str(tmp_path / "store"), 1)
        RestartIndex(base).begin()
        yield lambda iteration: PrefixStore(iteration, base)
        return
    server = StoreServer(Access("127.0.0.1", 0))
    with CoordinationStore(server.start()) as client:
        RestartIndex(client).begin()
        yield lambda iteration: Namespace(iteration, client)
    server.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def three(open_store: Open) -> list[Agreement]:
    """Three ranks in iteration 0, as the ranks themselves see it. The initial rank is the rank plus 10."""
    agreements = [Agreement(open_store(0), 0, 3) for _ in range(3)]
    for rank, agreement in enumerate(agreements):
        agreement.publish_rank(10 + rank, rank)
    return agreements


class Interrupted:
    """A store on which something happens before a certain request, once."""

    def __init__(self, store: Any, operation: str, key: str, happens: Callable[[], Any]) -> None:
        self._store = store
        self._operation = operation
        self._key = key
        self._happens = [happens]

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)
        if name != self._operation:
            return operation

        def request(key: Any, *rest: Any) -> Any:
            if self._key in str(key) and self._happens:
                self._happens.pop()()
            return operation(key, *rest)

        return request


# -- outcome -----------------------------------------------------------------------------------------------------------


def test_completed_when_the_last_one_arrives(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    waiting = [pool.submit(agreements[rank].complete, 10 + rank, LONG_S, CHUNK_S) for rank in (0, 1)]
    assert agreements[2].wait_outcome(0.05) is None
    assert agreements[2].complete(12, LONG_S, CHUNK_S) is IterationOutcome.COMPLETED
    assert [future.result(LONG_S) for future in waiting] == [IterationOutcome.COMPLETED] * 2
    # Whoever fails now restarts nobody.
    assert agreements[1].interrupt(record(1)) is False
    assert agreements[0].wait_outcome(LONG_S) is IterationOutcome.COMPLETED


def test_a_fault_ends_the_wait_for_the_others(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    waiting = [pool.submit(agreements[rank].complete, 10 + rank, LONG_S, CHUNK_S) for rank in (0, 1)]
    assert agreements[2].interrupt(record(2)) is True
    assert [future.result(LONG_S) for future in waiting] == [IterationOutcome.INTERRUPTED] * 2
    # The last one comes too late to complete it.
    assert agreements[2].complete(12, LONG_S, CHUNK_S) is IterationOutcome.INTERRUPTED
    assert agreements[0].interrupt(record(0)) is True


def test_a_fault_between_the_last_arrival_and_the_decision(open_store: Open) -> None:
    agreements = three(open_store)
    for rank in (0, 1):
        agreements[rank].store.arrive("completion", str(10 + rank))
    store = Interrupted(open_store(0), "compare_set", "outcome", lambda: agreements[0].interrupt(record(0)))
    assert Agreement(store, 0, 3).complete(12, LONG_S, CHUNK_S) is IterationOutcome.INTERRUPTED


def test_completion_between_a_fault_and_its_report(open_store: Open) -> None:
    agreements = three(open_store)

    def others_complete() -> None:
        for rank in range(3):
            agreements[rank].store.arrive("completion", str(10 + rank))
        agreements[0].complete(10, LONG_S, CHUNK_S)

    store = Interrupted(open_store(0), "perform_all", "outcome", others_complete)
    assert Agreement(store, 0, 3).interrupt(record(1)) is False
    assert agreements[2].wait_outcome(LONG_S) is IterationOutcome.COMPLETED


def test_who_should_decide_dies_before(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].store.arrive("completion", "10")

    def die() -> None:
        raise KeyboardInterrupt

    agreements[1].store.arrive("completion", "11")
    with pytest.raises(KeyboardInterrupt):
        Agreement(Interrupted(open_store(0), "compare_set", "outcome", die), 0, 3).complete(12, LONG_S, CHUNK_S)
    assert agreements[0].complete(10, LONG_S, CHUNK_S) is IterationOutcome.COMPLETED


def test_nobody_waits_for_ever_for_completion(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].store.arrive("completion", "10")
    with pytest.raises(BarrierTimeout, match=r"iteration 0: 2 of 3 ranks came to completion .*: initial ranks 10, 12"):
        agreements[2].complete(12, 0.1, CHUNK_S)


def _beats(agreement: Agreement, silent_s: dict[int, float]) -> None:
    for rank, seconds in silent_s.items():
        agreement.store.set(f"heartbeat/{rank}", f"7 {silent_note(seconds)} ")


def test_who_is_absent_without_progress_is_given_up_not_who_waits(open_store: Open) -> None:
    agreements = three(open_store)
    _beats(agreements[0], {0: 4.0, 1: 9.0, 2: 50.0})  # the last one only waits
    agreements[2].store.arrive("completion", "12")
    absent = AbsentRanks(agreements[0], "completion_timeout", 0.1, soft_s=8.0, most=None)
    assert agreements[0].complete(10, 0.1, CHUNK_S, absent.look) is IterationOutcome.INTERRUPTED
    (reason,) = agreements[0].records()
    assert (reason.rank, reason.interruption) == (1, Interruption.UNRESPONSIVE)
    assert "no progress for 9 s" in reason.summary
    assert "completion_timeout=0.1 s" in reason.summary
    for rank in (0, 2):
        agreements[rank].arrive_at_end(10 + rank)
    assert agreements[0].wait_roster(10, LONG_S) == Roster(frozenset({1}), frozenset({11}))


@quick
def test_who_makes_progress_is_waited_for(
    open_store: Open, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    agreements = three(open_store)
    _beats(agreements[0], {0: 7.0, 1: 7.9})
    looked: Queue[list[int]] = Queue()
    absent = AbsentRanks(agreements[2], "completion_timeout", 0.1, soft_s=8.0, most=None)

    def look(ranks: list[int], waited_s: float) -> None:
        absent.look(ranks, waited_s)
        looked.put(ranks)

    waiting = pool.submit(agreements[2].complete, 12, 0.1, CHUNK_S, look)
    try:
        assert [looked.get(timeout=LONG_S) for _ in range(3)] == [[0, 1]] * 3
        assert not waiting.done()
    finally:
        agreements[1].interrupt(record(1))
    assert waiting.result(LONG_S) is IterationOutcome.INTERRUPTED
    assert agreements[2].records() == (record(1),)
    assert "waiting for rank 0,1 for " in caplog.text
    assert "longer than completion_timeout=0.1 s: it still makes progress" in caplog.text


@quick
def test_at_the_end_of_an_iteration_progress_is_not_waited_for_indefinitely(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(record(0))
    _beats(agreements[0], {1: 0.0})
    agreements[0].mark_departed(10)  # it died, and cannot look after those that are absent
    agreements[0].arrive_at_end(10)
    absent = AbsentRanks(agreements[2], "barrier_timeout", 0.1, soft_s=8.0, most=10)
    began = time.monotonic()
    assert agreements[2].wait_roster(12, 0.1, CHUNK_S, absent.look) == Roster(frozenset({0, 1}), frozenset({10, 11}))
    assert time.monotonic() - began > 1.0


@quick
def test_who_was_absent_comes_while_it_is_given_up(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(record(0))
    _beats(agreements[0], {2: 9.0})
    agreements[1].arrive_at_end(11)

    def come() -> None:
        assert agreements[2].wait_roster(12, LONG_S) == Roster(frozenset(), frozenset())

    slow = Agreement(Interrupted(open_store(0), "perform_all", "records", come), 0, 3)
    absent = AbsentRanks(slow, "barrier_timeout", 0.1, soft_s=8.0, most=10)
    assert slow.wait_roster(10, 0.1, CHUNK_S, absent.look) == Roster(frozenset(), frozenset())


def test_spares_learn_that_somebody_is_done(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    assert agreements[0].wait_done(0.05) is False
    waiting = pool.submit(agreements[0].wait_done, LONG_S)
    agreements[1].announce_done()
    assert waiting.result(LONG_S) is True


# -- reason ------------------------------------------------------------------------------------------------------------


def test_the_last_call_ends_when_all_have_answered(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(record(0))
    waiting = [pool.submit(agreements[rank].last_call, 10 + rank, LONG_S) for rank in (0, 1)]
    agreements[2].interrupt(record(2, summary="of the same incident"))
    began = time.monotonic()
    assert agreements[2].last_call(12, LONG_S) == (record(0), record(2))
    assert [future.result(LONG_S) for future in waiting] == [(record(0), record(2))] * 2
    assert time.monotonic() - began < LONG_S / 2
    # Too late to be listed: all ranks must see the same reason.
    agreements[1].interrupt(record(1))
    assert agreements[0].last_call(10, LONG_S) == (record(0), record(2))


def test_the_last_call_does_not_wait_for_the_dead(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(record(0, Interruption.TERMINATED))
    for identity in (10, 11):
        agreements[2].mark_departed(identity)
        agreements[2].arrive_at_end(identity)
    began = time.monotonic()
    assert agreements[2].last_call(12, LONG_S) == (record(0, Interruption.TERMINATED),)
    assert time.monotonic() - began < LONG_S / 2


def test_the_last_call_does_not_wait_longer_than_it_may(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(record(0))
    assert agreements[0].last_call(10, 0.05) == (record(0),)
    agreements[1].interrupt(record(1))
    assert agreements[1].last_call(11, 0.05) == (record(0),)


def test_records_are_listed_once_and_broken_ones_are_left_out(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].store.append("records", str(record(1))[:20] + "\n")
    for _ in range(2):
        agreements[0].interrupt(record(0, summary="a\nb"))
    assert agreements[0].last_call(10, 0.0) == (record(0),)


def test_reports_that_are_damaged_are_left_out(open_store: Open) -> None:
    agreements = three(open_store)
    for rank in (0, 1):
        agreements[rank].interrupt(record(rank, Interruption.SOFT_TIMEOUT))
    for damaged in ('{"rank": 1, "wai\n', "[]\n", '{"rank": "x"}\n', b"\xff\n"):
        for key in ("records", "positions"):
            agreements[0].store.append(key, damaged)
    agreements[0].report_position(0, Position(0, waits=True, function="a.py in f", line="a.py:1 in f"), "")
    agreements[2].report_position(2, Position(2, waits=False, function="b.py in g", line="b.py:7 in g"), "")
    for rank, agreement in enumerate(agreements):
        assert [each.rank for each in agreement.last_call(10 + rank, 0.0)] == [1]


# -- roster ------------------------------------------------------------------------------------------------------------


def test_the_roster_is_closed_when_all_stand_at_the_end(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    waiting = pool.submit(agreements[0].wait_roster, 10, LONG_S, CHUNK_S)
    agreements[0].arrive_at_end(10)
    agreements[0].mark_departed(11)
    agreements[0].arrive_at_end(11)
    assert agreements[2].is_at_end(11)
    assert not agreements[2].is_at_end(12)
    agreements[2].arrive_at_end(12)
    roster = Roster(frozenset({1}), frozenset({11}))
    assert waiting.result(LONG_S) == roster
    # Who is declared lost afterwards is lost in the next iteration.
    with suppress(StaleViewError):  # a store of torch knows no guards
        agreements[0].mark_departed(12)
    with suppress(StaleViewError):
        agreements[0].arrive_at_end(12)
    assert agreements[2].wait_roster(12, LONG_S) == roster
    assert agreements[2].was_left_behind(11)
    assert not agreements[2].was_left_behind(12)


def test_the_wait_for_the_roster_names_who_has_come(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].arrive_at_end(10)
    with pytest.raises(BarrierTimeout, match=r"iteration_barrier .*: initial ranks 10, 12"):
        agreements[2].wait_roster(12, 0.1, CHUNK_S)


def test_the_roster_has_the_history_of_the_faults(open_store: Open) -> None:
    fault = replace(record(1, summary="ValueError: 1"), place="a.py:1 in f")
    counts = (1, 2, 2, 3)  # the third restart was asked for by one that joins, in the fourth one waits
    for iteration, ages in enumerate(((0.0,), (61.0, 0.0), (122.0, 61.0), (183.0, 122.0, 0.0))):
        agreements = [Agreement(open_store(iteration), iteration, 2) for _ in range(2)]
        for rank, agreement in enumerate(agreements):
            agreement.publish_rank(10 + rank, rank)
        if iteration >= 2:
            Agreement.announce_newcomer(open_store(0).base_store, 18 + iteration, 3)
        agreements[1].interrupt(replace(fault, interruption=Interruption.NEWCOMER) if iteration == 2 else fault)
        for rank, pings in enumerate((5, 3)):
            agreements[rank].report_progress({"step": 7, "pings": pings, "seconds": 60 + rank})
            agreements[rank].arrive_at_end(10 + rank)
        first, second = (agreements[rank].wait_roster(10 + rank, LONG_S).faults for rank in range(2))
        assert first == second
        assert first.counts == {"ValueError at a.py:1 in f": counts[iteration]}
        assert first.latest == (() if iteration == 2 else tuple(first.counts))
        assert first.ages == ages
        assert first.progress == {"step": 7, "pings": 5}


def test_who_should_write_the_roster_dies_before(open_store: Open) -> None:
    agreements = three(open_store)
    for rank in (0, 1):
        agreements[rank].arrive_at_end(10 + rank)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Agreement(Interrupted(open_store(0), "compare_set", "roster", die), 0, 3).arrive_at_end(12)
    assert agreements[0].wait_roster(10, LONG_S, CHUNK_S) == Roster(frozenset(), frozenset())


def test_a_rank_that_vanished_before_it_had_a_name(open_store: Open) -> None:
    """Its neighbour knows the dense rank only."""
    agreements = [Agreement(open_store(0), 0, 3) for _ in range(3)]
    for rank in (0, 2):
        agreements[rank].publish_rank(10 + rank, rank)
    assert [agreements[0].identity_of(rank) for rank in range(3)] == [10, -2, 12]
    agreements[0].mark_departed(-2)
    for identity in (-2, 10, 12):
        agreements[0].arrive_at_end(identity)
    assert agreements[2].wait_roster(12, LONG_S) == Roster(frozenset({1}), frozenset({-2}))


@quick
def test_another_one_closes_the_roster_and_goes_on_meanwhile(open_store: Open) -> None:
    """The last one to arrive is about to write the roster; another one, which looks just then, does it and goes on."""
    agreements = three(open_store)
    agreements[0].interrupt(record(0))
    for rank in (0, 1):
        agreements[rank].arrive_at_end(10 + rank)
    store = Interrupted(open_store(0), "compare_set", "roster", lambda: agreements[1].wait_roster(11, LONG_S))
    last = Agreement(store, 0, 3)
    last.arrive_at_end(12)
    assert last.wait_roster(12, LONG_S) == Roster(frozenset(), frozenset())


@quick
def test_the_roster_before_is_deleted_while_the_last_one_reads_it(open_store: Open) -> None:
    end(three(open_store))
    agreements = [Agreement(open_store(1), 1, 3) for _ in range(3)]
    for rank, agreement in enumerate(agreements):
        agreement.publish_rank(10 + rank, rank)
    agreements[0].interrupt(record(0))
    for rank in (0, 1):
        agreements[rank].arrive_at_end(10 + rank)

    def go_on() -> None:
        agreements[1].wait_roster(11, LONG_S)
        open_store(0).clear()  # as rank 0 does at the beginning of the next iteration

    store = Interrupted(open_store(1), "none", "", lambda: None)
    store.base_store = Interrupted(store.base_store, "get_within", "0/roster", go_on)
    last = Agreement(store, 1, 3)
    thread = threading.Thread(target=last.arrive_at_end, args=(12,), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "it waits for what was deleted"
    assert last.wait_roster(12, LONG_S) == Roster(frozenset(), frozenset())


def end(agreements: list[Agreement]) -> Roster:
    """All ranks go to the end of the iteration; returns the roster, which all have seen."""
    agreements[0].interrupt(record(0))
    for rank, agreement in enumerate(agreements):
        agreement.arrive_at_end(10 + rank)
    # Not by the last call, which comes before the end: a newcomer that finds its place begins the next iteration.
    assert agreements[0].find_reason() == (record(0),)
    (roster,) = {agreement.wait_roster(10 + rank, LONG_S) for rank, agreement in enumerate(agreements)}
    return roster


ONE_FAULT = FaultHistory(ages=(0.0,))


def never() -> Rejoin:
    return Rejoin(RejoinPolicy.from_text("next-restart"), 3, int)


def place_of(open_store: Open, initial_rank: int) -> Place | None:
    newcomer = Newcomer(initial_rank, None)
    return newcomer.wait_for_place(open_store(0).base_store, lambda i: Agreement(open_store(i), i), LONG_S, never())


def test_newcomers_are_numbered_behind_all_others(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    base = open_store(0).base_store
    waiting = {initial_rank: pool.submit(place_of, open_store, initial_rank) for initial_rank in (21, 20)}
    while base.members("joining") != {"20", "21"}:
        time.sleep(0.01)
    agreements[1].mark_departed(11)
    initial_ranks = (10, 11, 12, 20, 21)
    assert end(agreements) == Roster(frozenset({1}), frozenset({11}), (20, 21), initial_ranks)
    for rank, initial_rank in ((3, 20), (4, 21)):
        place = waiting[initial_rank].result(LONG_S)
        assert place == Place(0, rank, 5, frozenset({1}), initial_ranks, (record(0),), ONE_FAULT)
    # They are named once, also by those who do not know yet that they have joined.
    second = [Agreement(open_store(1), 1, 2) for _ in range(2)]
    for rank, agreement in enumerate(second):
        agreement.publish_rank(10 + rank, rank)
    assert end(second).joined == ()


def test_a_newcomer_that_left_again_is_not_named(open_store: Open) -> None:
    agreements = three(open_store)
    base = open_store(0).base_store
    Agreement.announce_newcomer(base, 20, 3)
    Agreement.announce_newcomer(base, 21, 3)
    base.arrive("departed", "20")
    assert end(agreements).joined == (21,)


def test_a_newcomer_that_is_slow_finds_its_place_later(open_store: Open) -> None:
    """It announced itself and was named; it looks when the job is in the next iteration."""
    agreements = three(open_store)
    Agreement.announce_newcomer(open_store(0).base_store, 20, 3)
    assert end(agreements).joined == (20,)
    place = place_of(open_store, 20)
    assert place == Place(0, 3, 4, frozenset(), (10, 11, 12, 20), (record(0),), ONE_FAULT)
    assert RestartIndex(open_store(0).base_store).current() == 1


def test_a_newcomer_is_not_needed_when_the_job_completes(open_store: Open, pool: ThreadPoolExecutor) -> None:
    agreements = three(open_store)
    waiting = pool.submit(place_of, open_store, 20)
    for rank in range(3):
        agreements[rank].store.arrive("completion", str(10 + rank))
    assert agreements[0].complete(10, LONG_S, CHUNK_S) is IterationOutcome.COMPLETED
    assert waiting.result(LONG_S) is None


@quick
def test_a_newcomer_does_not_wait_for_a_job_that_is_gone(open_store: Open) -> None:
    three(open_store)[0].store.set("heartbeat/0", "1")
    newcomer = Newcomer(20, None)
    with pytest.raises(StoreLostError, match="no process of it is left"):
        newcomer.wait_for_place(open_store(0).base_store, lambda i: Agreement(open_store(i), i), 0.5, never())


def test_what_the_environment_says_of_a_newcomer_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert newcomer_from_environment() is None
    monkeypatch.setenv("INPROCESS_JOIN", "7")
    monkeypatch.setenv("INPROCESS_JOINED_FILE", str(tmp_path / "joined"))
    newcomer = newcomer_from_environment()
    assert newcomer is not None
    assert newcomer.initial_rank == 7
    newcomer.report_joined()
    assert (tmp_path / "joined").exists()
    assert newcomer_from_environment() is None
    monkeypatch.setenv("INPROCESS_JOIN", "first")
    with pytest.raises(ValueError, match=r"INPROCESS_JOIN .* not 'first'"):
        newcomer_from_environment()


def test_a_death_between_two_iterations(open_store: Open, pool: ThreadPoolExecutor) -> None:
    """The roster of the first is without it, in the second it never appears: its dense rank is the one missing."""
    agreements = three(open_store)
    for rank, agreement in enumerate(agreements):
        agreement.interrupt(record(rank))
        agreement.arrive_at_end(10 + rank)
    assert agreements[0].wait_roster(10, LONG_S) == Roster(frozenset(), frozenset())
    second = [Agreement(open_store(1), 1, 3) for _ in range(3)]
    for rank in (0, 2):
        second[rank].publish_rank(10 + rank, rank)
    speaks = pool.submit(
        depart, lambda i: Agreement(open_store(i), i), 0, 11, [record(1, Interruption.TERMINATED)], LONG_S
    )
    for rank in (0, 2):
        assert second[rank].wait_outcome(LONG_S) is IterationOutcome.INTERRUPTED
    waiting = pool.submit(second[0].wait_roster, 10, LONG_S, CHUNK_S)
    second[0].arrive_at_end(10)
    second[2].arrive_at_end(12)  # the last one: the roster follows
    speaks.result(LONG_S)
    assert second[2].records() == (record(1, Interruption.TERMINATED),)
    assert waiting.result(LONG_S) == Roster(frozenset({1}), frozenset({11}))


def test_a_death_after_completion_is_not_reported(open_store: Open) -> None:
    agreements = three(open_store)
    for rank in range(3):
        agreements[rank].store.arrive("completion", str(10 + rank))
    agreements[0].complete(10, LONG_S, CHUNK_S)
    depart(lambda i: Agreement(open_store(i), i), 0, 11, [record(1, Interruption.TERMINATED)], 0.0)
    assert not agreements[0].is_at_end(11)


def test_many_at_once(open_store: Open, pool: ThreadPoolExecutor) -> None:
    """Eight ranks, two of which fail and one of which goes, all at the same time: all see the same."""
    start = threading.Barrier(8)

    def rank_main(rank: int) -> Any:
        agreement = Agreement(open_store(0), 0, 8)
        agreement.publish_rank(rank, rank)
        start.wait(LONG_S)
        if rank in (2, 5):
            agreement.interrupt(record(rank))
        else:
            agreement.complete(rank, LONG_S, CHUNK_S)
        outcome = agreement.wait_outcome(LONG_S)
        records = agreement.last_call(rank, LONG_S)
        if rank == 7:
            agreement.mark_departed(rank)
        agreement.arrive_at_end(rank)
        return outcome, records, agreement.wait_roster(rank, LONG_S, CHUNK_S)

    results = [future.result(LONG_S) for future in [pool.submit(rank_main, rank) for rank in range(8)]]
    assert results == results[:1] * 8
    outcome, records, roster = results[0]
    assert outcome is IterationOutcome.INTERRUPTED
    assert {r.rank for r in records} == {2, 5}
    assert roster == Roster(frozenset({7}), frozenset({7}))


# -- old views ---------------------------------------------------------------------------------------------------------


def _restarted(store: Any) -> None:
    """The job goes on to iteration 1, without who is still in 0."""
    RestartIndex(store.base_store).advance(0)


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[Open]:
    server = StoreServer(Access("127.0.0.1", 0))
    with CoordinationStore(server.start()) as client:
        RestartIndex(client).begin()
        yield lambda iteration: Namespace(iteration, client)
    server.close()


def test_who_comes_back_to_an_old_iteration_can_change_nothing_there(guarded: Open) -> None:
    frozen, *_ = three(guarded)
    _restarted(guarded(0))
    for act in (
        lambda: frozen.interrupt(record(0)),
        lambda: frozen.publish_rank(10, 0),
        lambda: frozen.announce_done(),
        lambda: frozen.complete(10, LONG_S, CHUNK_S),
        lambda: frozen.mark_departed(11),
        lambda: frozen.arrive_at_end(10),
        lambda: frozen.wait_roster(10, LONG_S, CHUNK_S),
        lambda: frozen.wait_outcome(LONG_S),
    ):
        with pytest.raises(StaleViewError, match="the others went on without this process"):
            act()
    assert frozen.was_left_behind(10)


def test_who_waits_for_an_outcome_learns_that_the_others_went_on(guarded: Open, pool: ThreadPoolExecutor) -> None:
    frozen, *_ = three(guarded)
    waiting = pool.submit(frozen.wait_outcome, LONG_S)
    _restarted(guarded(0))
    with pytest.raises(StaleViewError):
        waiting.result(LONG_S)


def test_the_restart_index_only_grows(guarded: Open) -> None:
    index = RestartIndex(guarded(0).base_store)
    assert index.current() == 0
    for _ in range(2):  # any number of processes say so
        index.advance(0)
    assert index.current() == 1
    index.advance(1)
    for late in (lambda: index.advance(0), lambda: index.begin()):
        with pytest.raises(StaleViewError):
            late()


def test_a_thousand_reports_make_a_short_reason(guarded: Open) -> None:
    agreement = Agreement(guarded(0), 0, 1)
    agreement.publish_rank(0, 0)
    for rank in range(1000):
        agreement.interrupt(replace(record(rank, summary="ValueError: everywhere"), detail="x" * 3000))
    records = agreement.last_call(0, LONG_S)
    assert [each.rank for each in records] == list(range(1000))
    assert len(agreement.store.get("reason")) < 20_000
    assert [len(each.detail) for each in records[:2]] == [3000, 0]  # the first of each kind is shown


@quick
def test_one_rank_of_those_who_waited_long_enough_decides_the_reason(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(replace(record(0), detail="where"))
    agreements[1].store.compare_set("reason/1", "", "12")  # another one decides, and dies before it has
    (told,) = agreements[0].last_call(10, 0.0)
    assert told.detail == "where"
    assert agreements[0].store.get("reason/2") == b"10"
    assert agreements[1].last_call(11, 0.0) == (told,)


def test_a_hang_before_a_rank_has_published_itself(open_store: Open) -> None:
    agreements = [Agreement(open_store(0), 0, 3) for _ in range(3)]
    for rank in (0, 1):
        agreements[rank].publish_rank(10 + rank, rank)
    agreements[0].interrupt(record(2, Interruption.SOFT_TIMEOUT))
    agreements[0].report_position(0, Position(0, waits=False, function="a.py in f", line="a.py:1 in f"), "")
    reasons: Queue[Any] = Queue()
    thread = threading.Thread(target=lambda: reasons.put(agreements[0].last_call(10, 0.1)), daemon=True)
    thread.start()
    assert reasons.get(timeout=LONG_S) == (record(2, Interruption.SOFT_TIMEOUT),)


def test_a_rank_is_told_that_it_hangs(open_store: Open) -> None:
    agreements = three(open_store)
    agreements[0].interrupt(record(1, Interruption.SOFT_TIMEOUT))
    assert [bool(agreement.reported_hang(rank)) for rank, agreement in enumerate(agreements)] == [False, True, False]
