"""`Tree` over random jobs and random sequences of faults, against the slow model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from inprocess.rank_assignment import Layer, LayerFlag
from tests.inprocess.rank_assignment.jobs import Job
from tests.inprocess.rank_assignment.tree_model import Model

FILTERS: list[Callable[[int], int] | None] = [None, lambda n: n - n % 2, lambda n: n - n % 3, lambda n: min(n, 4)]


@dataclass(frozen=True)
class Plan:
    """A job and what happens to it: positions in the list of live ranks, modulo its length, fail together."""

    layers: list[Layer]
    paths: list[tuple[str, ...]]
    filter_: Callable[[int], int] | None
    faults: list[list[int]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.integers(1, 12))
    depth = draw(st.integers(1, 3))
    columns = [["job"] * world_size]
    for _ in range(depth - 1):
        if draw(st.booleans()):
            size = draw(st.integers(1, world_size))
            columns.append([str(rank // size) for rank in range(world_size)])
        else:
            keys = draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size))
            columns.append([str(key) for key in keys])
    layers = []
    for column in columns:
        least = draw(st.integers(1, 4))
        flag = draw(st.sampled_from([None, *LayerFlag, LayerFlag.RESERVE | LayerFlag.BACKFILL]))
        most = draw(st.one_of(st.none(), st.integers(least, 8)))
        layers.append(Layer(least, most, lambda state, column=column: column[state.rank], flag))
    faults = draw(st.lists(st.lists(st.integers(0, 11), max_size=4), max_size=6))
    return Plan(layers, list(zip(*columns, strict=True)), draw(st.sampled_from(FILTERS)), faults)


def compare(job: Job, model: Model) -> None:
    expected = {rank.initial: (rank.rank, rank.active) for rank in model.live()}
    assert {initial: (state.rank, state.active_rank) for initial, state in job.states.items()} == expected


def check_limits(job: Job, plan: Plan) -> None:
    """No group has more active ranks than it may, and none that came through a restart is too small."""
    for depth, layer in enumerate(plan.layers, start=1):
        for group in {plan.paths[rank][:depth] for rank in job.states}:
            members = [rank for rank in job.states if plan.paths[rank][:depth] == group]
            assert len(members) >= layer.min_ranks
            assert layer.max_ranks is None or sum(rank in job.active for rank in members) <= layer.max_ranks


@settings(max_examples=500, deadline=None, print_blob=True)
@given(plans())
def test_random_faults(plan: Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = Job(plan.layers, len(plan.paths), plan.filter_)
    model = Model(plan.layers, plan.paths, plan.filter_)
    compare(job, model)
    for fault in plan.faults:
        if not job.states:
            break
        terminated = {position % len(job.states) for position in fault}
        before = job.active
        job.restart(terminated)
        model.restart(terminated)
        compare(job, model)
        check_limits(job, plan)
        if plan.filter_ is None and all(layer.has(LayerFlag.BACKFILL) for layer in plan.layers):
            stayed = {
                rank: number for rank, number in before.items() if rank in job.states and number < len(job.active)
            }
            assert stayed.items() <= job.active.items()
