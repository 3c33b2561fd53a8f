"""The first examples of the wrapper in README and docs/restart.md run as they are printed, and go on after a fault."""

from pathlib import Path

import pytest

from tests.inprocess.unchanged.starting import Way, run_program, run_with_fault_at
from tests.support.selection import full_only

pytestmark = pytest.mark.timeout(180)

TENTHS = range(1, 51)  # of the first five seconds
_ALWAYS = {"readme": {4}, "restart_guide": {12}}  # in the middle of imports, mostly


@pytest.mark.parametrize(("way", "ranks"), [(Way.TORCHRUN, 2), (Way.ALONE, 1)], ids=["torchrun", "alone"])
def test_the_example_of_readme(way: Way, ranks: int, tmp_path: Path) -> None:
    ended = run_program("readme", way, tmp_path, ranks=ranks, faults="0:0:250:exception")
    for (done,) in ended.lines("done"):
        assert done["step"] == 300
        assert done["steps"] < 400, "after the fault it goes on from step 200, or 100 where that was not written yet"


@pytest.mark.parametrize(
    ("example", "tenths"),
    [
        pytest.param(example, tenths, marks=[] if tenths in always else full_only)
        for example, always in _ALWAYS.items()
        for tenths in TENTHS
    ],
)
def test_an_exception_at_any_time(example: str, tenths: int, tmp_path: Path) -> None:
    """Rank 1 gets it at the line it executes then, or after an import; rank 0 is interrupted wherever it is."""
    ended = run_with_fault_at(example, Way.ENVIRONMENT, tmp_path, f"1:{tenths / 10}:exception", ranks=2)
    assert all(done.get("step", 300) == 300 for (done,) in ended.lines("done"))


@full_only
@pytest.mark.parametrize("tenths", TENTHS[::5])
def test_a_death_at_any_time(tenths: int, tmp_path: Path) -> None:
    ended = run_with_fault_at("readme", Way.ENVIRONMENT, tmp_path, f"1:{tenths / 10}:kill", ranks=2, lost=(1,))
    assert [done["step"] for done in ended.lines("done")[0]] == [300]
