"""README's example of the wrapper runs as it is printed, under torchrun and alone, and goes on after a fault."""

from pathlib import Path

import pytest

from tests.inprocess.unchanged.starting import Way, run_program


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("way", "ranks"), [(Way.TORCHRUN, 2), (Way.ALONE, 1)], ids=["torchrun", "alone"])
def test_the_example_of_readme(way: Way, ranks: int, tmp_path: Path) -> None:
    ended = run_program("readme", way, tmp_path, ranks=ranks, faults="0:0:250:exception")
    for (done,) in ended.lines("done"):
        assert done["step"] == 300
        assert done["steps"] < 400, "after the fault it goes on from step 200, or 100 where that was not written yet"
