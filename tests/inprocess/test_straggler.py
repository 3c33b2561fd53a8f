"""Ranks that are slower than the others, or than they were: who is named, and who is not."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from inprocess import CallWrapper, Wrapper
from inprocess.straggler import Detector, SectionSummary, StragglerReport
from inprocess.straggler.comparison import Contribution
from inprocess.straggler.durations import LEAST_SAMPLES, MOST_SAMPLES
from tests.inprocess.coordination.helpers import eventually
from tests.inprocess.restarting import PATIENT, logged
from tests.support import rank_values, run_ranks

SHORT_S, LONG_S = 0.03, 0.2


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def manual(store: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Detector:
    return Detector(store, rank=rank, world_size=world_size, interval=None, **options)


def train(detector: Detector, seconds: float, executions: int = LEAST_SAMPLES) -> None:
    """Steps with a section of a given length."""
    for _ in range(executions):
        with detector.section("forward"):
            time.sleep(seconds)
        detector.step()


def published(detector: Detector, **sections: float) -> None:
    """A summary with these medians."""
    for name, seconds in sections.items():
        for _ in range(LEAST_SAMPLES):
            detector.record(name, seconds)
    detector.publish()


def named(report: StragglerReport | None, **thresholds: float) -> list[tuple[int, str, str]]:
    assert report is not None
    return [(each.rank, each.section, each.kind) for each in report.identify_stragglers(**thresholds)]


# -- real ranks --------------------------------------------------------------------------------------------------------


def test_the_rank_that_takes_longer_in_a_section_is_named() -> None:
    def main(rank: int, world_size: int) -> Any:
        called: list[Any] = []
        with logged() as lines, Detector(interval=None, on_change=lambda *found: called.append(found)) as detector:
            for _ in range(LEAST_SAMPLES + 1):
                with detector.section("forward"):
                    time.sleep(LONG_S if rank == 1 else SHORT_S)
                dist.barrier()  # so the steps of all ranks are as long as those of the slow one
                detector.step()
            detector.publish()
            dist.barrier()
            report = detector.report()
            if rank != 0:
                return report, lines
            assert report is not None
            (call,) = called
            assert call[0] is report
            return named(report), call[1][0].rank, report.relative["forward"], report.individual, lines

    results = [each.value for each in run_ranks(main, 3)]
    assert results[1:] == [(None, []), (None, [])]
    found, called_with, relative, individual, lines = results[0]
    assert found == [(1, "forward", "relative")]
    assert called_with == 1
    assert relative[1] < 0.7 < min(relative[0], relative[2])
    assert set(individual["forward"].values()) == {1.0}
    (line,) = lines
    assert line.startswith("WARNING stragglers: rank 1 in 'forward': ")


def test_none_is_named_if_all_are_alike() -> None:
    def main(rank: int, world_size: int) -> Any:
        with logged() as lines, Detector(interval=None) as detector:
            train(detector, 0.1, LEAST_SAMPLES + 1)
            detector.publish()
            dist.barrier()
            report = detector.report()
            return None if report is None else (named(report), sorted(report.relative), report.silent, lines)

    assert run_ranks(main, 2)[0].value == ([], ["forward", "step"], (), [])


def test_the_thread_publishes_and_rank_0_compares() -> None:
    def main(rank: int, world_size: int) -> Any:
        told = threading.Event()
        found: list[Any] = []

        def on_change(report: StragglerReport, stragglers: Any) -> None:
            found.extend((each.rank, each.section, each.kind) for each in stragglers)
            told.set()

        store = dist.distributed_c10d._get_default_store()
        with Detector(interval=timedelta(seconds=0.05), on_change=on_change) as detector:
            for _ in range(LEAST_SAMPLES):
                detector.record("forward", LONG_S if rank == 1 else SHORT_S)
            if rank == 0:
                assert told.wait(30), "no straggler was named"
                store.set("told", "yes")
            store.wait(["told"], timedelta(seconds=30))
        return found, [thread.name for thread in threading.enumerate() if "straggler" in thread.name]

    first, second = (each.value for each in run_ranks(main, 2))
    assert first == ([(1, "forward", "relative")], [])
    assert second == ([], [])


def test_a_restart_begins_new_statistics_and_forgets_who_has_left() -> None:
    def main(rank: int, world_size: int) -> Any:
        reports: list[Any] = []
        kept: list[Detector] = []

        @Wrapper(**PATIENT)
        def function(call: CallWrapper | None = None) -> None:
            assert call is not None
            now = int(os.environ["RANK"])
            detector = Detector(call.store, interval=None)
            kept.append(detector)
            slow = call.iteration == 0 and rank == 2
            published(detector, forward=LONG_S if slow else SHORT_S)
            if call.iteration == 1:
                published(kept[0], forward=LONG_S)  # of the iteration before: without effect
            assert call.state.store.arrive("published", str(rank)) <= call.state.world_size
            call.state.store.wait_size("published", call.state.world_size, timedelta(seconds=30))
            report = detector.report()
            if now == 0:
                assert report is not None
                reports.append((report.restart_index, list(report.ranks), report.silent, named(report)))
            if call.iteration == 0:
                call.state.store.arrive("reported", str(rank))
                call.state.store.wait_size("reported", call.state.world_size, timedelta(seconds=30))
                if rank == 2:
                    os._exit(3)
                while True:
                    time.sleep(60)

        function()
        return reports

    first, second, _ = rank_values(main, 3, returncodes={2: None})
    assert first == [(0, [0, 1, 2], (), [(2, "forward", "relative")]), (1, [0, 1], (), [])]
    assert second == []


def test_the_thread_of_an_iteration_ends_with_it_also_if_the_host_of_the_store_is_killed() -> None:
    def main(rank: int, world_size: int) -> Any:
        kept: list[Detector] = []  # which no garbage collection ends
        told = threading.Event()

        def threads() -> int:
            return sum(thread.name == "inprocess-stragglers" for thread in threading.enumerate())

        def is_dead(store: Any) -> bool:
            try:
                store.check(["anything"])
            except RuntimeError:
                return True
            return False

        @Wrapper(**PATIENT)
        def function(call: CallWrapper | None = None) -> int:
            assert call is not None
            store = call.store
            if call.iteration == 0:
                call.state.store.arrive("begun", str(rank))
                call.state.store.wait_size("begun", world_size, timedelta(seconds=30))
                if rank == 0:
                    os._exit(3)
                eventually(lambda: is_dead(store))
            kept.append(Detector(store, interval=timedelta(seconds=0.05), on_change=lambda *_: told.set()))
            while call.iteration == 0:
                time.sleep(1)
            eventually(lambda: threads() == 1)
            for _ in range(LEAST_SAMPLES):
                kept[-1].record("forward", LONG_S if rank == 1 else SHORT_S)
            if rank == 1:  # which is rank 0 now
                assert told.wait(30)
            call.state.store.arrive("ended", str(rank))
            call.state.store.wait_size("ended", world_size - 1, timedelta(seconds=30))
            return threads()

        return function()

    assert rank_values(main, 3, returncodes={0: None}) == [None, 1, 1]


def test_a_forked_child_publishes_nothing(store: dist.Store) -> None:
    detector = manual(store)
    published(detector, forward=SHORT_S)
    before = store.get("inprocess.straggler/0/0")
    child = os.fork()
    if not child:
        published(detector, forward=LONG_S)
        os._exit(0)
    os.waitpid(child, 0)
    assert store.get("inprocess.straggler/0/0") == before


# -- who is compared with whom -----------------------------------------------------------------------------------------


def test_a_rank_is_compared_with_its_own_past(store: dist.Store) -> None:
    detector = manual(store)
    train(detector, SHORT_S)
    detector.publish()
    assert named(detector.report()) == []
    train(detector, LONG_S)
    detector.publish()
    assert (0, "forward", "individual") in named(detector.report())
    train(detector, LONG_S / 100)
    detector.publish()
    assert named(detector.report()) == [], "it is faster than ever"


def test_a_rank_that_publishes_no_more_is_silent_and_not_named(store: dist.Store) -> None:
    ranks = [manual(store, rank, 3) for rank in range(3)]
    published(ranks[1], forward=LONG_S)
    for expected in ((2,), (2,), (2,), (1, 2)):
        published(ranks[0], forward=SHORT_S)
        report = ranks[0].report()
        assert report is not None
        assert report.silent == expected
        assert named(report) == ([] if 1 in expected else [(1, "forward", "relative")])
    published(ranks[1], forward=LONG_S)
    assert named(ranks[0].report()) == [(1, "forward", "relative")]


def test_of_two_ranks_the_slower_one_and_of_many_not_those_beside_a_fast_one(store: dist.Store) -> None:
    def compared(*medians: float) -> list[int]:
        own = dist.PrefixStore(str(medians), store)
        ranks = [manual(own, rank, len(medians)) for rank in range(len(medians))]
        for detector, median_s in zip(ranks, medians, strict=True):
            published(detector, forward=median_s)
        return [rank for rank, _, _ in named(ranks[0].report())]

    assert compared(1.0, 2.0) == [1]
    assert compared(1.0, 1.4) == []
    assert compared(0.1, 1.0, 1.0, 1.1) == []
    assert compared(0.0, 0.0) == []
    assert compared(0.0, 1.0) == [1]


def test_groups_are_compared_among_themselves(store: dist.Store) -> None:
    ranks = [manual(store, rank, 4, group=f"stage {rank // 2}") for rank in range(4)]
    for detector, median_s in zip(ranks, (1.0, 1.0, 3.0, 9.0), strict=True):
        published(detector, forward=median_s)
    report = ranks[0].report()
    assert named(report) == [(3, "forward", "relative")]
    assert report is not None
    assert report.relative["forward"] == {0: 1.0, 1: 1.0, 2: 1.0, 3: pytest.approx(1 / 3)}


def test_a_section_that_costs_little_of_a_step_is_not_named() -> None:
    def report(step_s: float) -> StragglerReport:
        step = SectionSummary(100, step_s, step_s)
        fast, slow = SectionSummary(200, 0.001, 0.001), SectionSummary(200, 0.003, 0.001)
        sections = [{"step": step, "data": fast}, {"step": step, "data": slow}]
        return StragglerReport(0, {rank: Contribution("", each) for rank, each in enumerate(sections)}, ())

    assert named(report(0.3)) == [(1, "data", "individual"), (1, "data", "relative")]  # twice 2 ms of 300 ms
    assert named(report(0.5)) == []
    assert report(0.5).relative["data"] == {0: 1.0, 1: pytest.approx(1 / 3)}


def test_thresholds(store: dist.Store) -> None:
    ranks = [manual(store, rank, 2, relative_threshold=0.9) for rank in range(2)]
    with logged() as lines:
        for median_s, line in ((0.12, "WARNING stragglers: rank 1 in 'forward': 0.12 s, other ranks take 0.1 s"),) * 2:
            published(ranks[0], forward=0.1)
            published(ranks[1], forward=median_s)
            report = ranks[0].report()
            assert len(lines) == 1, "the same stragglers are logged once"
            assert lines[0].startswith(line)
        published(ranks[1], forward=0.1)
        ranks[0].report()
    assert lines[1:] == ["WARNING there are no stragglers any more"]
    assert named(report) == []
    assert named(report, relative=0.9) == [(1, "forward", "relative")]
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="a threshold of scores is above 0 and at most 1"):
            manual(store, relative_threshold=wrong)
        with pytest.raises(ValueError, match="a threshold of scores is above 0 and at most 1"):
            named(report, individual=wrong)


# -- what is measured --------------------------------------------------------------------------------------------------


def test_few_executions_say_nothing(store: dist.Store) -> None:
    detector = manual(store)
    for _ in range(LEAST_SAMPLES - 1):
        detector.record("forward", 1.0)
    for executions in (None, LEAST_SAMPLES):
        detector.publish()
        report = detector.report()
        assert report is not None
        found = report.ranks[0].sections.get("forward")
        assert (found and found.count) == executions
        detector.record("forward", 1.0)


def test_an_execution_that_an_exception_interrupts_does_not_count(store: dist.Store) -> None:
    detector = manual(store)
    published(detector, forward=1.0)
    with pytest.raises(RuntimeError, match="a fault"), detector.section("forward"):
        raise RuntimeError("a fault")
    detector.publish()
    report = detector.report()
    assert report is not None
    assert report.ranks[0].sections["forward"].count == LEAST_SAMPLES


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_what_is_no_duration_is_refused(store: dist.Store, seconds: float) -> None:
    with pytest.raises(ValueError, match="section 'forward' cannot take"):
        manual(store).record("forward", seconds)


def test_memory_is_bounded(store: dist.Store) -> None:
    detector = manual(store)
    with logged() as lines:
        for name in range(200):
            published(detector, **{f"section {name}": 1.0})
    assert [line for line in lines if "more than 64 sections" in line] == lines
    assert len(lines) == 1
    for _ in range(3 * MOST_SAMPLES):
        detector.record("section 0", 5.0)
    for _ in range(MOST_SAMPLES):
        detector.record("section 0", 2.0)
    detector.publish()
    report = detector.report()
    assert report is not None
    sections = report.ranks[0].sections
    assert len(sections) == 64
    assert sections["section 0"] == SectionSummary(4 * MOST_SAMPLES + LEAST_SAMPLES, 2.0, 1.0)


# -- stores and threads ------------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_logged_once_and_tried_again(store: dist.Store) -> None:
    class Failing:
        works = threading.Event()
        asked = threading.Semaphore(0)

        def __getattr__(self, name: str) -> Any:
            self.asked.release()
            if not self.works.is_set():
                raise ConnectionError("the store is away")
            return getattr(store, name)

    failing = Failing()
    with (
        logged() as lines,
        Detector(failing, rank=0, world_size=1, interval=timedelta(seconds=0.01)) as detector,
    ):
        for _ in range(5):
            assert failing.asked.acquire(timeout=30)
        failing.works.set()
        eventually(lambda: store.check(["inprocess.straggler/0/0"]))
        detector.close()
    assert [line for line in lines if "has failed" in line] == lines
    assert len(lines) == 1


def test_a_detector_that_is_not_closed_ends_with_its_object(store: dist.Store) -> None:
    detector = Detector(store, rank=0, world_size=1, interval=timedelta(seconds=60))
    thread = next(thread for thread in threading.enumerate() if thread.name == "inprocess-stragglers")
    del detector
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_without_a_process_group_it_asks_for_a_store() -> None:
    with pytest.raises(ValueError, match="init_process_group first, or pass one"):
        Detector()


def test_a_rank_that_is_none_is_refused(store: dist.Store) -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        manual(store, 2, 2)
    with pytest.raises(ValueError, match="interval must be above 0"):
        Detector(store, rank=0, world_size=1, interval=timedelta(0))
