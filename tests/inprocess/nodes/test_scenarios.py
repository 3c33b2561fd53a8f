"""Every named scenario; `make test` plays the quick ones, `make test-faults` all.

One by itself:

TESTS=full pytest tests/inprocess/nodes/test_scenarios.py -k 'long-blip'
"""

import re
from collections.abc import Callable

import pytest

from tests.inprocess.nodes.lab import Lab
from tests.inprocess.nodes.play import play
from tests.inprocess.nodes.scenarios import SCENARIOS, Scenario
from tests.support.selection import FULL


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "scenario", [its for its in SCENARIOS if FULL or its.quick], ids=lambda its: re.sub(r"\W+", "-", its.name)
)
def test_scenario(scenario: Scenario, make_lab: Callable[[int], Lab]) -> None:
    report = play(
        make_lab(scenario.nodes),
        scenario.faults,
        ranks_per_node=scenario.ranks_per_node,
        options=scenario.options,
        all_finish=scenario.all_finish,
    )
    print(report.text)
    report.check()


def test_names_are_different() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
