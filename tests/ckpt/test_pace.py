"""How often to save: what policies want, and that all ranks save the same steps."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.costs import Costs
from ckpt.engine.schedule import Schedule
from ckpt.events import Event, PaceChanged
from ckpt.options import Snapshots
from ckpt.pace import Measured, pace_of
from ckpt.ranks.collectives import Ranks
from tests.support import run_ranks

HOUR_S = 3600.0


def test_what_each_policy_wants() -> None:
    measured = Measured(cost_s=2.0, latency_s=7.0, trained_s=18 * HOUR_S, faults=3)
    assert ckpt.Seconds(600).interval_s(measured) == ckpt.Seconds(timedelta(minutes=10)).interval_s(measured) == 600
    assert ckpt.Continuous().interval_s(measured) == 7
    assert ckpt.Continuous(gap=timedelta(seconds=30)).interval_s(measured) == 37
    assert ckpt.Budget(0.005).interval_s(measured) == 400
    assert ckpt.Optimal(mtbf=6 * HOUR_S).interval_s(measured) == pytest.approx((2 * 2 * 6 * HOUR_S) ** 0.5, rel=0.01)
    assert ckpt.Optimal().interval_s(measured) == ckpt.Optimal(mtbf=6 * HOUR_S).interval_s(measured)  # (6 + 18) / 4
    either = ckpt.Steps(500) | ckpt.Seconds(600) | ckpt.Budget(0.005)
    assert either.interval_s(measured) == 400
    assert [either.is_due_at(step, step - 1) for step in (1000, 1001)] == [True, False]
    assert not ckpt.Steps(500).needs_agreement
    assert either.needs_agreement


@pytest.mark.parametrize("mtbf_s", [30.0, 600.0, 3 * HOUR_S])
@pytest.mark.parametrize("cost_s", [0.05, 1.0, 20.0])
def test_the_interval_is_the_one_that_loses_least(cost_s: float, mtbf_s: float) -> None:
    """The expected time for a second of work, where faults are a Poisson process (Daly 2006, equation 13)."""
    from math import exp

    def expected(between_s: float) -> float:
        work_s = between_s - cost_s
        return mtbf_s * (exp(between_s / mtbf_s) - 1) / work_s

    chosen = ckpt.Optimal(mtbf_s).interval_s(Measured(cost_s=cost_s))
    best = min(expected(cost_s + mtbf_s * 2 ** (n / 32)) for n in range(-400, 200))
    assert chosen > 0
    assert expected(max(chosen, 1.01 * cost_s)) <= 1.02 * best


def test_the_first_save_does_not_wait_for_the_first_fault() -> None:
    """Before a save was measured it is due within a minute, and long before a fault is likely."""
    assert ckpt.Optimal().interval_s(Measured()) == 60
    assert ckpt.Optimal(30.0).interval_s(Measured()) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ckpt.Steps(0), "Steps: count must be a whole number of steps of at least 1, not 0"),
        (lambda: ckpt.Seconds(-1), "Seconds: every must be positive"),
        (lambda: ckpt.Budget(1.5), "a part of training time, such as 0.005, not 1.5"),
        (lambda: ckpt.Continuous(gap="1"), "Continuous: gap must be a number of seconds or a timedelta"),
        (lambda: ckpt.Optimal(mtbf=0), "Optimal: mtbf must be positive"),
        (lambda: ckpt.Checkpointer("root", save_every=0), "save_every must be a whole number of steps"),
        (lambda: ckpt.Checkpointer("root", save_every="often"), "save_every must be a whole number of steps"),
        (lambda: Snapshots(every=True), "Snapshots: every must be a whole number of steps"),
    ],
)
def test_what_is_no_policy_is_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_numbers_and_durations_stand_for_policies() -> None:
    assert pace_of("save_every", 500) == ckpt.Steps(500)
    assert pace_of("save_every", timedelta(minutes=5)) == ckpt.Seconds(timedelta(minutes=5))


# -- with a clock of its own -------------------------------------------------------------------------------------------


class _Job:
    """A job of one process in simulated time: steps take `step_s`, a save `stall_s`, and slow steps until published."""

    def __init__(self, save_every: ckpt.Pace, tmp_path: Path, snapshots: Snapshots | None = None) -> None:
        self.now = 1000.0
        self.step_s, self.stall_s, self.slow_s, self.latency_s = 1.0, 0.25, 0.125, 4.0
        self.saved: list[tuple[int, float]] = []
        self.kept: list[int] = []
        self._published_at = 0.0
        self.evaluates: set[int] = set()  # steps behind which there is an evaluation
        self.fails: set[int] = set()  # saves, by their number, that wait for long, and then fail
        with ckpt.Checkpointer(tmp_path, save_every=save_every, snapshots=snapshots) as real:
            settings = real._parts.settings
        self.schedule = Schedule(settings, Ranks(), lambda: range(self.is_in_flight), lambda: self.now)

    @property
    def is_in_flight(self) -> bool:
        return self.now < self._published_at

    def train(self, steps: range) -> list[int]:
        before = len(self.saved)
        for step in steps:
            self.now += self.step_s + (self.slow_s if self.is_in_flight else 0.0)
            with self.schedule.due(step) as action:
                if action == "save":
                    self.saved.append((step, self.now))
                    if len(self.saved) in self.fails:
                        self.now += 600.0
                        self.schedule.save_failed()
                        continue
                    self.now += self.stall_s
                    self._published_at = self.now + self.latency_s
                elif action == "snapshot":
                    self.kept.append(step)
            if step in self.evaluates:
                self.now += 300.0
        return [step for step, _ in self.saved[before:]]

    @property
    def gaps(self) -> list[float]:
        return [after - before for (_, before), (_, after) in zip(self.saved, self.saved[1:], strict=False)]


def test_saves_are_as_far_apart_as_was_asked(tmp_path: Path) -> None:
    job = _Job(ckpt.Seconds(60), tmp_path)
    job.train(range(1, 1000))
    assert all(58 <= gap <= 63 for gap in job.gaps)
    assert len(job.gaps) > 10
    job.step_s = 7.0  # the next appointments know that soon
    job.train(range(1000, 1400))
    assert all(gap <= 60 + 2 * 7.5 for gap in job.gaps[-20:])


@pytest.mark.parametrize("stride", [10, 4096, -1], ids=str)
def test_the_numbers_of_steps_may_grow_by_any_amount(tmp_path: Path, stride: int) -> None:
    """Such as samples or tokens, or every tenth step; a second epoch may count from 1 again."""
    job = _Job(ckpt.Seconds(60), tmp_path)
    job.train(range(10_000, 10_000 + 1000 * stride, stride))
    assert all(58 <= gap <= 63 for gap in job.gaps)
    assert len(job.gaps) > 10


def test_the_step_after_a_multiple_is_saved_where_that_is_passed_over(tmp_path: Path) -> None:
    job = _Job(ckpt.Steps(100), tmp_path, Snapshots(every=50))
    assert job.train(range(1, 500, 33)) == [100, 232, 331, 430]
    assert job.kept == [67, 166, 265, 364, 463]
    job.schedule.restored(None)
    assert job.train(range(232, 500, 33)) == [331, 430]
    assert job.train(range(1, 301, 300)) == []  # a second epoch counts anew: there is no step before its first one
    assert job.train(range(301, 302)) == [301]


def test_a_save_begins_when_the_one_before_is_published(tmp_path: Path) -> None:
    job = _Job(ckpt.Continuous(), tmp_path)
    job.train(range(1, 200))
    assert all(job.latency_s <= gap <= job.latency_s + 4 * job.step_s for gap in job.gaps[1:])
    assert len(job.gaps) > 20


def test_saves_stay_within_the_budget(tmp_path: Path) -> None:
    job = _Job(ckpt.Budget(0.01), tmp_path)
    job.train(range(1, 5000))
    cost_s = job.stall_s + 4 * job.slow_s  # four slow steps until it is published
    taken = len(job.saved) * cost_s / (job.now - 1000.0)
    assert 0.007 <= taken <= 0.0115


def test_an_evaluation_beside_a_save_is_not_its_cost(tmp_path: Path) -> None:
    job = _Job(ckpt.Budget(0.005), tmp_path)
    first = job.train(range(1, 100))[0]
    again = _Job(ckpt.Budget(0.005), tmp_path)
    again.evaluates = {first}
    again.train(range(1, 5000))
    assert again.gaps[0] < 4000
    assert len(again.saved) > 5


def test_the_time_of_a_save_that_fails_is_not_its_cost(tmp_path: Path) -> None:
    job = _Job(ckpt.Budget(0.01), tmp_path)
    job.fails = {3}
    job.train(range(1, 2000))
    assert max(job.gaps) < 1000
    recorded = job.schedule.measured
    assert recorded is not None
    assert recorded["save"]["cost_s"] < 2


def test_a_rank_may_be_behind_as_long_as_the_timeout(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, save_every=ckpt.Continuous(), timeout=100) as real:
        settings = real._parts.settings
    store, now = dist.HashStore(), 1000.0  # type: ignore[attr-defined]
    first, second = (Schedule(settings, _Two(rank, store), list, lambda: now) for rank in (0, 1))
    steps = range(1, 200)  # half a second each, so there is an appointment at each
    found = []
    for schedule in (first, second):
        for step in steps:
            now += 0.5
            with schedule.due(step) as action:
                found.append(action)
    assert found[: len(steps)] == found[len(steps) :]


class _Two(Ranks):
    """One of two ranks, which have a store and no process group."""

    rank, world_size = 0, 2

    def __init__(self, rank: int, store: Any) -> None:
        super().__init__()
        self.rank, self._store = rank, store

    def __call__(self, payload: bytes) -> list[bytes]:
        return [b"row", b"row"]

    def store(self) -> Any:
        return self._store


def test_optimal_follows_the_cost(tmp_path: Path) -> None:
    events: list[Event] = []
    with ckpt.observe(events.append):
        job = _Job(ckpt.Optimal(mtbf=HOUR_S), tmp_path)
        job.train(range(1, 2000))
        first = job.gaps[-1]
        job.stall_s = 20.0
        job.train(range(2000, 9000))
    assert first == pytest.approx((2 * 0.75 * HOUR_S) ** 0.5, abs=15)
    assert job.gaps[-1] == pytest.approx((2 * 20.5 * HOUR_S) ** 0.5, rel=0.1)
    told = [event for event in events if isinstance(event, PaceChanged)]
    assert told
    assert told[-1].cost_s > 10 * told[0].cost_s
    assert told[-1].mtbf_s > 6 * HOUR_S  # as the job observes it


def test_steps_and_policies_together(tmp_path: Path) -> None:
    job = _Job(ckpt.Steps(100) | ckpt.Seconds(33), tmp_path, Snapshots(every=ckpt.Seconds(5)))
    saved = job.train(range(1, 501))
    assert {100, 200, 300, 400, 500} <= set(saved)
    assert len(saved) > 12
    assert len(job.kept) > 50
    assert not set(job.kept) & set(saved)


def test_measurements_go_on_after_the_job_was_started_again(tmp_path: Path) -> None:
    job = _Job(ckpt.Optimal(), tmp_path)
    job.train(range(1, 500))
    recorded = json.loads(json.dumps(job.schedule.measured))
    assert recorded["save"]["cost_s"] == pytest.approx(0.75)
    assert recorded["save"]["faults"] == 0
    again = _Job(ckpt.Optimal(), tmp_path)
    again.schedule.restored(recorded)
    again.train(range(500, 510))
    now = again.schedule.measured
    assert now is not None
    assert now["save"]["faults"] == 1
    assert now["save"]["cost_s"] == recorded["save"]["cost_s"]
    assert now["save"]["trained_s"] == recorded["save"]["trained_s"] + 9 * again.step_s
    again.schedule.restored(recorded)  # the same process goes back: no fault, and it knows more
    again.train(range(500, 502))
    assert again.schedule.measured is not None
    assert again.schedule.measured["save"]["faults"] == 1


@pytest.mark.parametrize("number", ["x", -1, True, None, float("nan"), float("inf"), [], 10**400])
def test_a_record_of_a_stranger_is_unknown(number: Any) -> None:
    costs = Costs(time.monotonic)
    costs.restored(dict.fromkeys(("cost_s", "latency_s", "trained_s", "faults"), number), 0)
    assert costs.measured == Measured()


# -- real jobs ---------------------------------------------------------------------------------------------------------


def _train(root: str, steps: int, slow: int) -> tuple[list[int], dict[str, Any]]:
    """Train on all ranks; rank `slow` comes late to each step, and no collective keeps the ranks together."""
    rank = dist.get_rank()
    state = {"w": torch.full((64,), float(rank)), "step": 0}
    saved = []
    with ckpt.Checkpointer(root, save_every=ckpt.Continuous() | ckpt.Steps(10), timeout=60) as checkpointer:
        begin = checkpointer.restore(state) or 0
        for step in range(begin + 1, begin + steps + 1):
            state["step"] = step
            if rank == slow:
                time.sleep(0.002)
            saved += checkpointer.step(state, step)
        checkpointer.maybe_finalize(blocking=True)
        found = checkpointer.all_steps()
        report = checkpointer.last_restore
    return found, {} if report is None or report.pace is None else dict(report.pace)


def _train_in_two_groups(rank: int, world_size: int, root: str) -> list[list[int]]:
    found = []
    state = {"w": torch.ones(4)}
    with ckpt.Checkpointer(root, save_every=ckpt.Seconds(0.2), timeout=8) as checkpointer:
        for first in (1, 101):
            for step in range(first, first + 100):
                time.sleep(0.01)
                checkpointer.step(state, step)
            checkpointer.maybe_finalize(blocking=True)
            found.append([saved for saved in checkpointer.all_steps() if saved >= first])
            dist.barrier()
            dist.destroy_process_group()
            files = dist.FileStore(f"{root}.{first}", world_size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=files)
    return found


def test_saves_go_on_when_the_process_groups_are_made_anew(tmp_path: Path) -> None:
    first, second = run_ranks(_train_in_two_groups, 2, str(tmp_path / "root"), timeout=100)
    assert first.value == second.value
    assert all(first.value)


@pytest.fixture(params=[0, 1], ids=["rank 0 is slow", "rank 1 is slow"])
def slow(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_all_ranks_save_the_same_steps(tmp_path: Path, slow: int) -> None:
    def job(rank: int, world_size: int, root: str, slow: int) -> Any:
        return _train(root, 120, slow), _train(root, 40, 1 - slow)

    first, second = run_ranks(job, 2, str(tmp_path), slow)
    assert first.value == second.value
    (steps, nothing), (later, recorded) = first.value
    assert set(range(10, 121, 10)) <= set(steps)
    assert set(steps) - set(range(10, 121, 10))  # some by appointment
    assert nothing == {}
    assert set(later) > set(steps)
    assert recorded["save"]["trained_s"] > 0
