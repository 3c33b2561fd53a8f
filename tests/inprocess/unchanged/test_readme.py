"""README's example of the wrapper runs as it is printed, under torchrun and alone."""

from pathlib import Path

import pytest

from tests.inprocess.unchanged.starting import Way, run_program


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("way", "ranks"), [(Way.TORCHRUN, 2), (Way.ALONE, 1)], ids=["torchrun", "alone"])
def test_the_example_of_readme(way: Way, ranks: int, tmp_path: Path) -> None:
    run_program("readme", way, tmp_path, ranks=ranks, faults="0:0:1:exception")
