"""The simulated job, beside what is known in closed form."""

import math
from dataclasses import replace

import pytest

from tools.bench.goodput.simulation import (
    Downtime,
    Kind,
    Outcome,
    System,
    Tier,
    estimate,
    simulate,
    with_best_intervals,
)

_SEED = 11
_ALWAYS = dict.fromkeys(Kind, math.inf)
_NO_TIME = dict.fromkeys(Kind, 0.0)
_STORAGE = Tier("storage", 10.0, 0.0, 0.0, _NO_TIME, _ALWAYS, interval=50)
_MEMORY = Tier("memory", 0.0, 0.0, 0.0, _NO_TIME, {**_ALWAYS, Kind.NODE: 1.0, Kind.JOB: 0.0}, interval=1)


_DOWN = Downtime(60.0, 240.0)


def _system(*tiers: Tier, down: Downtime = _DOWN) -> System:
    return System("one", 6.0, tiers, dict.fromkeys(Kind, down))


def _only(kind: Kind, mean_s: float) -> dict[Kind, float]:
    return {**dict.fromkeys(Kind, 0.0), kind: 1 / mean_s}


def _rework(outcome: Outcome) -> float:
    return outcome.lost_s / outcome.faults


def test_without_faults_only_states_cost_time() -> None:
    memory = replace(_MEMORY, cost_s=0.3, interval=7)
    outcome = simulate(_system(memory, _STORAGE), dict.fromkeys(Kind, 0.0), 100, _SEED)
    assert outcome.goodput == pytest.approx(1 / (1 + 0.3 / (7 * 6.0) + 10.0 / (50 * 6.0)))
    assert (outcome.faults, outcome.lost_s, outcome.error) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("mean_s", "down", "cost_s", "interval"),
    [
        (6 * 3600.0, Downtime(0.0, 600.0), 300.0, 570),  # the figures of Daly's own example
        (900.0, Downtime(100.0, 500.0), 300.0, 90),  # a job that hardly advances
        (1800.0, Downtime(60.0, 240.0), 1.0, 30),
        (50_000.0, Downtime(0.0, 0.0), 20.0, 200),
    ],
)
def test_one_kind_of_fault_and_one_tier_is_dalys_formula(
    mean_s: float, down: Downtime, cost_s: float, interval: int
) -> None:
    """J. T. Daly, FGCS 22 (2006): the time of work T is M exp(R/M) (exp((t + d)/M) - 1) T/t."""
    system = _system(replace(_STORAGE, cost_s=cost_s, interval=interval), down=down)
    outcome = simulate(system, _only(Kind.NODE, mean_s), 10_000, _SEED)
    work_s, down_s = interval * system.step_s, down.detect_s + down.restart_s
    known = work_s / (mean_s * math.exp(down_s / mean_s) * math.expm1((work_s + cost_s) / mean_s))
    assert outcome.error < 0.02
    assert outcome.goodput == pytest.approx(known, abs=4 * outcome.error), f"seed {_SEED}"


def test_kinds_with_different_downtimes_add_up() -> None:
    """Where faults during a recovery hardly ever happen, a fault costs the mean of the downtimes, weighted by rates."""
    down = {kind: Downtime(0.0, 10.0) for kind in Kind} | {Kind.HANG: Downtime(600.0, 10.0)}
    system = replace(_system(_STORAGE), down=down)
    outcome = simulate(system, {Kind.EXCEPTION: 3e-6, Kind.HANG: 1e-6}, 10_000, _SEED)
    assert outcome.detecting_s / outcome.faults == pytest.approx(600 / 4, rel=0.03)
    assert outcome.restarting_s / outcome.faults == pytest.approx(10, rel=0.03)


@pytest.mark.parametrize("lag_s", [0.0, 100.0])
def test_on_average_half_an_interval_and_the_lag_are_lost(lag_s: float) -> None:
    system = _system(replace(_STORAGE, cost_s=0.0, lag_s=lag_s))
    outcome = simulate(system, _only(Kind.PROCESS, 1e6), 10_000, _SEED)
    assert _rework(outcome) == pytest.approx(50 * 6.0 / 2 + lag_s, rel=0.02)


def test_a_step_that_is_kept_in_memory_is_the_only_one_lost() -> None:
    storage = replace(_STORAGE, cost_s=0.0)
    outcome = simulate(_system(_MEMORY, storage), _only(Kind.PROCESS, 1e6), 10_000, _SEED)
    assert _rework(outcome) == pytest.approx(6.0 / 2, rel=0.02)


def test_memory_does_not_help_when_the_job_is_lost() -> None:
    rates = _only(Kind.JOB, 20_000.0)
    assert simulate(_system(_MEMORY, _STORAGE), rates, 500, _SEED) == simulate(_system(_STORAGE), rates, 500, _SEED)


def test_after_the_loss_of_the_job_there_is_nothing_in_memory_until_it_is_kept_anew() -> None:
    rare = replace(_MEMORY, interval=10**6)
    rates = {Kind.JOB: 1e-5, Kind.PROCESS: 1e-4}
    assert simulate(_system(rare, _STORAGE), rates, 500, _SEED) == simulate(_system(_STORAGE), rates, 500, _SEED)


def test_two_lost_nodes_in_one_recovery_take_the_memory_one_does_not() -> None:
    sturdy = replace(_MEMORY, survives={**_MEMORY.survives, Kind.NODE: math.inf})
    often, rare = _only(Kind.NODE, 400.0), _only(Kind.NODE, 1e7)
    for rates, differ in ((often, True), (rare, False)):
        one, any_number = (simulate(_system(tier, _STORAGE), rates, 2000, _SEED) for tier in (_MEMORY, sturdy))
        assert (one.goodput < any_number.goodput) == differ
        assert one.goodput <= any_number.goodput


def test_the_seed_decides_the_faults() -> None:
    system, rates = _system(_MEMORY, _STORAGE), _only(Kind.NODE, 20_000.0)
    assert simulate(system, rates, 200, _SEED) == simulate(system, rates, 200, _SEED)
    assert simulate(system, rates, 200, _SEED) != simulate(system, rates, 200, _SEED + 1)


def test_all_time_is_accounted_for() -> None:
    rates = {Kind.EXCEPTION: 1e-4, Kind.NODE: 2e-4, Kind.JOB: 5e-5}
    memory = replace(_MEMORY, cost_s=0.2, lag_s=9.0, interval=3, restore_s=dict.fromkeys(Kind, 4.0))
    outcome = simulate(_system(memory, _STORAGE), rates, 3000, _SEED)
    assert min(outcome.losses.values()) > 0
    assert outcome.useful_s % 6.0 == 0
    assert outcome.useful_s + sum(outcome.losses.values()) == pytest.approx(outcome.seconds)
    assert 0 < outcome.goodput < 1


_BASE = _system(replace(_MEMORY, cost_s=0.05, interval=4, lag_s=1.0), _STORAGE)
_RATES = {Kind.EXCEPTION: 2e-5, Kind.NODE: 5e-5, Kind.JOB: 1e-5}


@pytest.mark.parametrize(
    "worse",
    [
        replace(_BASE, down=dict.fromkeys(Kind, Downtime(600.0, 240.0))),
        replace(_BASE, tiers=(replace(_BASE.tiers[0], cost_s=2.0), _STORAGE)),
        replace(_BASE, tiers=(replace(_BASE.tiers[0], interval=200), _STORAGE)),
        replace(_BASE, tiers=(_BASE.tiers[0], replace(_STORAGE, cost_s=100.0))),
        replace(_BASE, tiers=(replace(_BASE.tiers[0], restore_s=dict.fromkeys(Kind, 500.0)), _STORAGE)),
        replace(_BASE, tiers=(_STORAGE,)),
    ],
    ids=["detection", "cost of memory", "interval", "cost of storage", "restore", "no memory"],
)
def test_what_costs_more_gives_less(worse: System) -> None:
    better, less = (simulate(system, _RATES, 6_000, _SEED) for system in (_BASE, worse))
    assert less.goodput < better.goodput - 4 * (less.error + better.error)
    assert estimate(worse, _RATES) < estimate(_BASE, _RATES)


def test_more_faults_give_less() -> None:
    found = [simulate(_BASE, {k: n * rate for k, rate in _RATES.items()}, 4_000, _SEED) for n in (1, 2, 4, 8)]
    assert sorted(found, key=lambda outcome: -outcome.goodput) == found


def test_the_estimate_is_near_the_simulation_where_faults_are_rare() -> None:
    rates = {kind: rate / 10 for kind, rate in _RATES.items()}
    outcome = simulate(_BASE, rates, 10_000, _SEED)
    assert estimate(_BASE, rates) == pytest.approx(outcome.goodput, abs=4 * outcome.error + 1e-4)


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_the_best_interval_of_one_tier_is_near_youngs() -> None:
    rates = _only(Kind.NODE, 1e6)
    (tier,) = with_best_intervals(_system(_STORAGE), rates).tiers
    assert tier.interval * 6.0 == pytest.approx(math.sqrt(2 * 10.0 * 1e6), rel=0.2)


def test_a_state_is_not_begun_before_it_may() -> None:
    slow = replace(_STORAGE, least_s=100_000.0)
    (tier,) = with_best_intervals(_system(slow), _only(Kind.NODE, 1e6)).tiers
    assert tier.interval * 6.0 >= 100_000.0


@pytest.mark.parametrize("rates", [_RATES, {kind: 8 * rate for kind, rate in _RATES.items()}], ids=["rare", "often"])
def test_no_other_intervals_are_clearly_better(rates: dict[Kind, float]) -> None:
    best = with_best_intervals(_BASE, rates)
    outcome = simulate(best, rates, 4_000, _SEED)
    for number in range(2):
        for factor in (0.3, 3.0):
            tiers = list(best.tiers)
            tiers[number] = replace(tiers[number], interval=max(1, round(factor * tiers[number].interval)))
            other = simulate(replace(best, tiers=tuple(tiers)), rates, 4_000, _SEED)
            assert other.goodput <= outcome.goodput + 3 * (outcome.error + other.error), (number, factor)
