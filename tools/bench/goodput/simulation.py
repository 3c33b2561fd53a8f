"""A synchronous job that is stopped by faults: its goodput by simulation, a first-order estimate, the best intervals.

    steps, states kept ──▶ fault ──▶ detect ──▶ restart ──▶ restore ──▶ steps again, from the newest state that is left
                                     ▲                         │
                                     └──── another fault ◀─────┘

Faults of each kind are a Poisson process with a rate of its own, also while the job recovers from another fault: the
recovery then begins again, without the states that the new fault takes. A state that was not complete when the fault
came is lost. A step that was not finished is lost, too.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise, product
from operator import itemgetter
from statistics import stdev

_BATCHES = 20  # of a simulation, for its standard error
_PER_OCTAVE, _OCTAVES = 4, 6  # of the intervals that are tried


class Kind(StrEnum):
    """What a fault takes: nothing, a process, a node with its memory, or all processes of the job."""

    EXCEPTION = "exception"
    HANG = "hang"
    PROCESS = "death of a process"
    NODE = "loss of a node"
    JOB = "loss of the job"


@dataclass(frozen=True)
class Tier:
    """States that are kept in one place.

    After each `interval` steps a state is kept, which takes `cost_s` of training; it can be restored from `lag_s`
    later on, within `restore_s` after a fault of a kind. Between two states there must be `least_s` of steps.
    `survives` says how many faults of a kind in one recovery leave what is kept.
    """

    name: str
    cost_s: float
    lag_s: float
    least_s: float
    restore_s: Mapping[Kind, float]
    survives: Mapping[Kind, float]
    interval: int = 1

    def period_s(self, step_s: float) -> float:
        """Return the seconds of the steps between two states."""
        return self.interval * step_s


@dataclass(frozen=True)
class Downtime:
    """Seconds from a fault until it is noticed, and from then until a state can be restored."""

    detect_s: float
    restart_s: float


@dataclass(frozen=True)
class System:
    """A way to keep states and to restart, for one job.

    Of tiers whose newest states are equally new the first is restored. The last one survives everything.
    """

    name: str
    step_s: float
    tiers: tuple[Tier, ...]
    down: Mapping[Kind, Downtime]


@dataclass(frozen=True)
class Outcome:
    """Seconds of a simulated job by what they were spent on, and the number of its faults.

    `error` is the standard error of `goodput`. Time that is `lost` was spent on steps that were done again.
    """

    faults: int
    useful_s: float
    saving_s: float
    lost_s: float
    detecting_s: float
    restarting_s: float
    restoring_s: float
    error: float

    @property
    def seconds(self) -> float:
        """All the time that passed."""
        return self.useful_s + sum(self.losses.values())

    @property
    def losses(self) -> dict[str, float]:
        """Seconds that were not spent on steps that count, by what they were spent on."""
        return {
            "saving": self.saving_s,
            "done again": self.lost_s,
            "detecting": self.detecting_s,
            "restarting": self.restarting_s,
            "restoring": self.restoring_s,
        }

    @property
    def goodput(self) -> float:
        return self.useful_s / self.seconds


# -- simulation --------------------------------------------------------------------------------------------------------


def simulate(system: System, rates: Mapping[Kind, float], recoveries: int, seed: int) -> Outcome:
    """Run a job until it has recovered `recoveries` times; if there are no faults, for very many steps.

    `rates` are faults per second. The same seed gives the same faults. With fewer than 20 recoveries the error is
    infinite.
    """
    if not any(rates.values()):
        steps = 1000 * math.lcm(*(tier.interval for tier in system.tiers))
        saving_s = _elapsed_s(system, 0, steps) - steps * system.step_s
        return Outcome(0, steps * system.step_s, saving_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    job = _Job(system, rates, random.Random(seed))
    marks = [(0.0, 0)]
    for _ in range(recoveries):
        job.run_to_fault()
        job.recover()
        marks.append((job.seconds, job.step))
    return job.outcome(_standard_error(system.step_s, marks))


def _standard_error(step_s: float, marks: list[tuple[float, int]]) -> float:
    """Return the standard error of the goodput from batches that are nearly independent; infinite if there are few."""
    size = (len(marks) - 1) // _BATCHES
    if size == 0:
        return math.inf
    ends = marks[::size][: _BATCHES + 1]
    shares = [step_s * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(ends)]
    return stdev(shares) / math.sqrt(len(shares))


class _Job:
    """A job in simulated time. `newest` has the last complete state of each tier, None where there is none."""

    def __init__(self, system: System, rates: Mapping[Kind, float], rng: random.Random) -> None:
        self.seconds = 0.0
        self.step = 0
        self._system = system
        self._kinds = [kind for kind, rate in rates.items() if rate > 0]
        self._sums = list(accumulate(rates[kind] for kind in self._kinds))
        self._rng = rng
        self._newest: list[int | None] = [None] * (len(system.tiers) - 1) + [0]
        self._faults = 0
        self._saving_s = self._detecting_s = self._restarting_s = self._restoring_s = 0.0

    def run_to_fault(self) -> None:
        """Train from the present step until the next fault, and note which states were complete by then."""
        system, first, left_s = self._system, self.step, self._to_fault_s()
        last = _reached(system, first, left_s)
        for number, tier in enumerate(system.tiers):
            if left_s > tier.lag_s:
                state = _reached(system, first, left_s - tier.lag_s) // tier.interval * tier.interval
                if state > first:
                    self._newest[number] = state
        self._saving_s += _elapsed_s(system, first, last) - (last - first) * system.step_s
        self.seconds += left_s
        self.step = last

    def recover(self) -> None:
        """Restore the newest state that is left; further faults meanwhile make the recovery begin again."""
        seen = dict.fromkeys(Kind, 0)
        while True:
            (kind,) = self._rng.choices(self._kinds, cum_weights=self._sums)
            self._faults += 1
            seen[kind] += 1
            for number, tier in enumerate(self._system.tiers):
                if seen[kind] > tier.survives[kind]:
                    self._newest[number] = None
            step, tier = self._best_state()
            down, restore_s = self._system.down[kind], tier.restore_s[kind]
            left_s = self._to_fault_s()
            self._detecting_s += min(down.detect_s, left_s)
            self._restarting_s += min(down.restart_s, max(0.0, left_s - down.detect_s))
            self._restoring_s += min(restore_s, max(0.0, left_s - down.detect_s - down.restart_s))
            self.seconds += min(left_s, down.detect_s + down.restart_s + restore_s)
            if left_s > down.detect_s + down.restart_s + restore_s:
                self.step = step
                return

    def outcome(self, error: float) -> Outcome:
        """Return where the time went; what is left of it was spent on steps that were done again."""
        useful_s = self.step * self._system.step_s
        down = (self._detecting_s, self._restarting_s, self._restoring_s)
        lost_s = self.seconds - useful_s - self._saving_s - sum(down)
        return Outcome(self._faults, useful_s, self._saving_s, lost_s, *down, error)

    def _to_fault_s(self) -> float:
        return self._rng.expovariate(self._sums[-1])

    def _best_state(self) -> tuple[int, Tier]:
        best: tuple[int, Tier] | None = None
        for state, tier in zip(self._newest, self._system.tiers, strict=True):
            if state is not None and (best is None or state > best[0]):
                best = state, tier
        assert best is not None, "the last tier survives everything"
        return best


def _elapsed_s(system: System, first: int, last: int) -> float:
    """Return the seconds from the end of step `first` to the end of step `last`, with the states kept after it."""
    kept = sum(tier.cost_s * (last // tier.interval - first // tier.interval) for tier in system.tiers)
    return (last - first) * system.step_s + kept


def _reached(system: System, first: int, seconds: float) -> int:
    """Return the last step that is over, with the states kept after it, so many seconds after `first` was."""
    last = first + int(seconds / (system.step_s * (1 + _keeping(system))))
    while _elapsed_s(system, first, last + 1) <= seconds:
        last += 1
    while _elapsed_s(system, first, last) > seconds:
        last -= 1
    return last


def _keeping(system: System) -> float:
    """Return the seconds that keeping states adds to a second of steps."""
    return sum(tier.cost_s / tier.period_s(system.step_s) for tier in system.tiers)


# -- intervals ---------------------------------------------------------------------------------------------------------


def estimate(system: System, rates: Mapping[Kind, float]) -> float:
    """Return the goodput to first order: as if no fault came while the job recovers from another.

    A fault of a kind costs its downtime, and on average half the time between two states of the newest tier that
    survives it. See A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
    (HPCA 2025), which estimates the effective training time ratio so.
    """
    keeping = _keeping(system)
    lost = 0.0
    for kind, rate in rates.items():
        left = [tier for tier in system.tiers if tier.survives[kind] >= 1]
        again_s = [tier.period_s(system.step_s) * (1 + keeping) / 2 + tier.lag_s for tier in left]
        newest_s, newest = min(zip(again_s, left, strict=True), key=itemgetter(0))
        down = system.down[kind]
        lost += rate * (down.detect_s + down.restart_s + newest.restore_s[kind] + newest_s)
    return (1 - lost) / (1 + keeping)


def with_best_intervals(system: System, rates: Mapping[Kind, float]) -> System:
    """Return the system with the intervals for which its estimated goodput is highest.

    What is tried lies around the interval of J. W. Young, "A first order approximation to the optimum checkpoint
    interval" (CACM 17:9, 1974): the root of 2 x cost x mean time between faults.
    """
    tried = [_intervals(tier, system.step_s, sum(rates.values())) for tier in system.tiers]
    candidates = (_with_intervals(system, intervals) for intervals in product(*tried))
    return max(candidates, key=lambda candidate: estimate(candidate, rates))


def _intervals(tier: Tier, step_s: float, rate: float) -> list[int]:
    """Return possible intervals of a tier, in steps."""
    least = max(1, math.ceil(tier.least_s / step_s))
    young = math.sqrt(2 * tier.cost_s / rate) / step_s
    factors = (2 ** (n / _PER_OCTAVE) for n in range(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1))
    return sorted({max(least, round(young * factor)) for factor in factors})


def _with_intervals(system: System, intervals: Iterable[int]) -> System:
    pairs = zip(system.tiers, intervals, strict=True)
    return replace(system, tiers=tuple(replace(tier, interval=interval) for tier, interval in pairs))
