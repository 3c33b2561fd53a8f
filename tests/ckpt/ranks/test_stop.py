"""All ranks stop at the same step, or all leave: threads over a real store, in seeded schedules."""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.ranks.stop import Outcome, StopAgreement, StopRequest
from tests.support.selection import FULL

_LONG_S = 30.0


@dataclass
class _Schedule:
    """How the ranks of one job behave, all from the seed."""

    seed: int
    world_size: int = field(init=False)
    stride: int = field(init=False)
    asked: dict[int, int] = field(init=False)  # rank -> the step at which it is asked
    silent: int | None = field(init=False)  # takes no part, as if its process was stopped
    looks_s: float = field(init=False)

    def __post_init__(self) -> None:
        numbers = random.Random(self.seed)
        self.world_size = numbers.randint(2, 5)
        self.stride = numbers.choice((1, 1, 3, 10))
        count = numbers.randint(1, self.world_size)
        self.asked = {rank: numbers.randint(0, 30) for rank in numbers.sample(range(self.world_size), count)}
        self.silent = numbers.randrange(self.world_size) if numbers.random() < 0.25 else None
        self.looks_s = numbers.choice((0.0, 0.001, 0.01))


class _Job:
    """Ranks of threads: for each one that trains, and one that looks at the store."""

    def __init__(self, schedule: _Schedule, store: Any) -> None:
        self.schedule = schedule
        self._store = dist.PrefixStore(f"{schedule.seed}", store)
        self._ranks = [StopAgreement(rank, schedule.world_size) for rank in range(schedule.world_size)]
        self._asked = [threading.Event() for _ in self._ranks]
        self._over = [threading.Event() for _ in self._ranks]

    def run(self) -> list[tuple[Outcome, int]]:
        size = self.schedule.world_size
        with ThreadPoolExecutor(2 * size) as pool:
            trained = [pool.submit(self._train, rank) for rank in range(size) if rank != self.schedule.silent]
            looked = [pool.submit(self._look, rank) for rank in range(size) if rank != self.schedule.silent]
            results = [one.result(_LONG_S) for one in trained]
            for one in looked:
                one.result(_LONG_S)
        return results

    def _train(self, rank: int) -> tuple[Outcome, int]:
        numbers = random.Random(f"{self.schedule.seed} {rank}")
        slow = numbers.choice((0.0, 0.0002, 0.002))
        asked_at = self.schedule.asked.get(rank)
        deadline = time.monotonic() + _LONG_S
        try:
            for step in itertools.count(0, self.schedule.stride):
                assert time.monotonic() < deadline, f"rank {rank} was never told to stop"
                time.sleep(slow * numbers.random())
                if asked_at is not None and step >= asked_at:
                    self._asked[rank].set()
                outcome = self._ranks[rank].arrive(step)
                if outcome is not Outcome.GO_ON:
                    return outcome, step
            raise AssertionError
        finally:
            self._over[rank].set()

    def _look(self, rank: int) -> None:
        numbers = random.Random(f"{self.schedule.seed} {rank} looks")
        agreement = self._ranks[rank]
        begin = time.monotonic()
        while not agreement.is_decided:
            own = StopRequest("asked", rank, 9.0) if self._asked[rank].is_set() else None
            known = agreement.look(self._store, own, 0.01)
            if known is not None and self.schedule.silent is not None and time.monotonic() - begin > 0.1:
                agreement.leave(self._store)
            assert time.monotonic() - begin < _LONG_S
            time.sleep(self.schedule.looks_s * numbers.random())
        assert self._over[rank].wait(_LONG_S)


@pytest.fixture(scope="module")
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=_LONG_S), wait_for_workers=False)


@pytest.mark.parametrize("seeds", [range(first, first + 15) for first in range(0, 90 if FULL else 30, 15)])
def test_all_stop_at_the_same_step_or_all_leave(seeds: range, store: Any) -> None:
    for seed in seeds:
        schedule = _Schedule(seed)
        if schedule.silent is not None and not set(schedule.asked) - {schedule.silent}:
            continue  # only the silent rank was asked, so no other one knows
        results = _Job(schedule, store).run()
        assert len(set(results)) == 1 or {outcome for outcome, _ in results} == {Outcome.LEAVE}, schedule
        assert (schedule.silent is None) == (results[0][0] is Outcome.STOP), schedule


def test_a_rank_that_passed_a_step_proposes_a_later_one() -> None:
    store = dist.HashStore()
    behind, ahead = StopAgreement(0, 2), StopAgreement(1, 2)
    assert behind.arrive(3) is Outcome.GO_ON
    assert behind.look(store, StopRequest("a signal", 0, 5.0), 0.0) == StopRequest("a signal", 0, 5.0)
    for step in range(3, 10):
        assert ahead.arrive(step) is Outcome.GO_ON
    assert ahead.look(store, None, 0.0) == StopRequest("a signal", 0, 5.0)
    assert not ahead.is_decided
    behind.look(store, None, 0.0)
    ahead.look(store, None, 0.0)
    for agreement in (behind, ahead):
        assert agreement.is_decided
    assert [behind.arrive(step) for step in range(4, 12)].index(Outcome.STOP) == 7
    assert [ahead.arrive(step) for step in range(10, 12)] == [Outcome.GO_ON, Outcome.STOP]


def test_a_held_step_is_not_passed_before_the_decision() -> None:
    store = dist.HashStore()
    first, second = StopAgreement(0, 2), StopAgreement(1, 2)
    first.look(store, StopRequest("a signal", 0, 5.0), 0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.arrive, 1)
        assert not waiting.done()
        second.leave(store)
        assert not waiting.done(), "its other thread has not looked yet"
        first.look(store, None, 0.0)
        assert waiting.result(_LONG_S) is Outcome.LEAVE
    second.look(store, None, 0.0)
    assert second.leaves


def test_the_last_one_to_count_itself_is_told_that_the_others_left() -> None:
    store = dist.HashStore()
    first, second = StopAgreement(0, 2), StopAgreement(1, 2)
    first.look(store, StopRequest("a signal", 0, 5.0), 0.0)
    first.leave(store)
    second.look(store, None, 0.0)
    assert first.leaves
    assert second.leaves


def test_a_step_that_a_rank_does_not_reach() -> None:
    store = dist.HashStore()
    first, second = StopAgreement(0, 2), StopAgreement(1, 2)
    first.look(store, StopRequest("a signal", 0, 5.0), 0.0)
    second.look(store, None, 0.0)
    first.leave(store)
    assert second.arrive(1) is Outcome.STOP
    second.look(store, None, 0.0)
    assert [agreement.arrive(1) for agreement in (first, second)] == [Outcome.LEAVE] * 2


def test_steps_that_take_long_are_proposed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step_s, expected in ((10.0, 7), (0.5, 10), (0.01, 206)):
        store, alone = dist.HashStore(), StopAgreement(0, 1)
        for step in (3, 4, 5, 6):
            now += step_s
            assert alone.arrive(step) is Outcome.GO_ON
        alone.look(store, StopRequest("a signal", 0, 5.0), 2.0)
        stops = [step for step in range(7, 300) if alone.arrive(step) is Outcome.STOP]
        assert stops[0] == pytest.approx(expected, abs=1)
