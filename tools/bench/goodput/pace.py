"""`ckpt.Optimal` against fixed intervals in simulated jobs: what both lose.

The policy sees what a job sees: costs of saves that scatter, their latency, and the faults so far. The same seed gives
the faults of all intervals.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from ckpt.pace import Measured, Optimal
from tools.bench.goodput.assumptions import BASE, SCENARIOS, Job, rates

_REMEMBERED = 8  # saves, as the job remembers them
_SCATTER = 0.5  # a cost is up to so much more or less than the mean
_PER_OCTAVE, _OCTAVES = 2, 2  # of the sweep, to both sides of Young's interval

Interval = Callable[[Measured], float]


@dataclass(frozen=True)
class PacedJob:
    """A job: what a save costs, how long it takes, what a fault costs beside lost work, all in seconds."""

    name: str
    cost_s: float
    latency_s: float
    restart_s: float
    mtbf_s: float


def _mtbf_s(gpus: int) -> float:
    return 1 / sum(rates(Job(gpus, 4e11), SCENARIOS[BASE]).values())


SETTINGS = (
    PacedJob("1,024 GPUs, saves of a second", 1.0, 20.0, 60.0, _mtbf_s(1024)),
    PacedJob("16,384 GPUs, staged saves", 0.5, 20.0, 120.0, _mtbf_s(16384)),
    PacedJob("100,000 GPUs, staged saves, slow storage", 0.5, 120.0, 120.0, _mtbf_s(100_000)),
    PacedJob("16,384 GPUs, blocking saves", 30.0, 30.0, 400.0, _mtbf_s(16384)),
    PacedJob("a fault every ten minutes", 5.0, 10.0, 30.0, 600.0),
)
"""Rates of faults as in the rest of this simulation (Llama 3, see `assumptions`), but for the last one."""


def lost(job: PacedJob, interval: Interval, faults: int, seed: int) -> float:
    """Return the share of time that is not spent on steps that count, over so many faults."""
    rng, costs_rng = random.Random(seed), random.Random(seed + 1)
    costs: deque[float] = deque(maxlen=_REMEMBERED)
    useful_s = passed_s = cost_s = 0.0
    for number in range(faults):
        fault_s, begun_s, trained_s = rng.expovariate(1 / job.mtbf_s), 0.0, 0.0
        kept_s = 0.0
        while True:
            known = Measured(fmean(costs) if costs else None, job.latency_s, passed_s + begun_s, number)
            between_s = max(interval(known), job.latency_s, cost_s)  # a save waits for the one before
            if begun_s + between_s >= fault_s:
                break
            begun_s, trained_s = begun_s + between_s, trained_s + between_s - cost_s
            cost_s = job.cost_s * costs_rng.uniform(1 - _SCATTER, 1 + _SCATTER)
            costs.append(cost_s)
            if begun_s + job.latency_s <= fault_s:
                kept_s = trained_s
        useful_s += kept_s
        passed_s += fault_s + job.restart_s
        cost_s = 0.0
    return 1 - useful_s / passed_s


def best_fixed(job: PacedJob, faults: int, seed: int) -> tuple[float, float]:
    """Return the interval of a sweep around Young's that loses least, in seconds, and what it loses."""
    young_s = (2 * job.cost_s * job.mtbf_s) ** 0.5
    tried = [young_s * 2 ** (n / _PER_OCTAVE) for n in range(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1)]
    found = [(lost(job, lambda _, fixed_s=fixed_s: fixed_s, faults, seed), fixed_s) for fixed_s in tried]  # type: ignore[misc]
    least, fixed_s = min(found)
    return fixed_s, least


def table(faults: int, seed: int) -> list[tuple[str, float, float, float]]:
    """Return name, best fixed interval, what that loses, and what `Optimal` loses that observes faults."""
    rows = []
    for job in SETTINGS:
        fixed_s, least = best_fixed(job, faults, seed)
        rows.append((job.name, fixed_s, least, lost(job, Optimal().interval_s, faults, seed)))
    return rows
