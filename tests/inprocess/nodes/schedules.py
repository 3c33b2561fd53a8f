"""Random schedules of faults, each from a number: the same number gives the same schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.inprocess.nodes.faults import Fault, Kind
from tests.inprocess.nodes.program import PHASES, Options

_SHAPES = ((2, 1), (2, 2), (3, 1), (3, 2))
_LATEST_S = 2.0
_SHORTEST_S, _LONGEST_S = 0.3, 6.0
_FOR_GOOD = 0.3  # how often a link stays as bad as it is
_IN_A_PHASE = 0.25  # how often an exception comes first, and a fault in the restart after it
_PAUSE_S = 0.5
_PATIENT: dict[str, Any] = {"soft_timeout_s": 12.0, "hard_timeout_s": 18.0, "barrier_timeout_s": 20.0}


@dataclass(frozen=True)
class Schedule:
    """One job, and faults of different nodes, so that the end of one is not the end of another."""

    seed: int
    nodes: int
    ranks_per_node: int
    faults: Sequence[Fault]
    options: Options = field(default_factory=Options)

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults))
        return f"schedule {self.seed}: {self.nodes} nodes with {self.ranks_per_node} rank(s) each: {faults}"


def schedule(seed: int) -> Schedule:
    """Return the schedule for a number."""
    rng = random.Random(seed)
    nodes, ranks_per_node = rng.choice(_SHAPES)
    places = rng.sample(range(nodes), rng.randint(1, min(3, nodes)))
    phase = rng.choice(PHASES) if len(places) > 1 and rng.random() < _IN_A_PHASE else None
    faults = [_fault(rng, node, ranks_per_node) for node in places]
    if phase is not None:
        first, second, *others = faults
        rank = places[0] * ranks_per_node + rng.randrange(ranks_per_node)
        begin_s = first.begin_s
        others = [Fault(its.kind, its.at, its.begin_s + begin_s, its.lasts_s) for its in others]
        second = Fault(second.kind, second.at, lasts_s=second.lasts_s, during=phase)
        faults = [Fault(Kind.EXCEPTION, rank, begin_s), second, *others]
    pauses = {} if phase is None else {phase: _PAUSE_S}
    if any(its.kind in (Kind.DELAY, Kind.SLOW) for its in faults):
        # A process group takes dozens of round trips to make: what takes longer than the soft timeout never gets made.
        return Schedule(seed, nodes, ranks_per_node, faults, Options(**_PATIENT, pauses=pauses))
    return Schedule(seed, nodes, ranks_per_node, faults, Options(pauses=pauses))


def _fault(rng: random.Random, node: int, ranks_per_node: int) -> Fault:
    kind = rng.choice(list(Kind))
    plain = Fault(kind, node)
    at = node * ranks_per_node + rng.randrange(ranks_per_node) if plain.is_of_rank else node
    lasts_s = rng.uniform(_SHORTEST_S, _LONGEST_S) if plain.can_end else None
    if plain.is_of_link and rng.random() < _FOR_GOOD:
        lasts_s = None
    return Fault(kind, at, rng.uniform(0.0, _LATEST_S), lasts_s)
