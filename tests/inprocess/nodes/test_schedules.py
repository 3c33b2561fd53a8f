"""Random schedules of faults: NODES_SCHEDULES of them, beginning with number NODES_SEED.

One by itself:

    NODES_SEED=17 NODES_SCHEDULES=1 pytest -s tests/inprocess/nodes/test_schedules.py

Several are played at a time by `pytest -n`.
"""

import os
from collections.abc import Callable

import pytest

from tests.inprocess.nodes.faults import Kind
from tests.inprocess.nodes.lab import Lab
from tests.inprocess.nodes.play import play
from tests.inprocess.nodes.schedules import schedule

_FIRST = int(os.environ.get("NODES_SEED", "0"))
_COUNT = int(os.environ.get("NODES_SCHEDULES", "1"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT), ids=lambda seed: f"seed-{seed}")
def test_schedule(seed: int, make_lab: Callable[[int], Lab]) -> None:
    plan = schedule(seed)
    print(plan)
    lab = make_lab(plan.nodes)
    report = play(lab, plan.faults, ranks_per_node=plan.ranks_per_node, options=plan.options)
    print(report.text)
    report.check()


def test_a_number_is_a_schedule() -> None:
    plans = [schedule(seed) for seed in range(300)]
    assert plans == [schedule(seed) for seed in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(Kind)
    assert {len(plan.faults) for plan in plans} == {1, 2, 3}
    for plan in plans:
        nodes = [its.at // plan.ranks_per_node if its.is_of_rank else its.at for its in plan.faults]
        assert len(set(nodes)) == len(nodes) and set(nodes) <= set(range(plan.nodes)), plan  # noqa: PT018
