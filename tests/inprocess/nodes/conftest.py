"""A laboratory, where one can be made."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.inprocess.faults.nursery import Nursery
from tests.inprocess.nodes.lab import Lab, why_not


@pytest.fixture(scope="session")
def nodes_nursery() -> Iterator[Nursery]:
    """The process that forks the ranks of laboratories."""
    nursery = Nursery("tests.inprocess.nodes.rank:live")
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def _possible() -> str | None:
    return why_not()


@pytest.fixture
def make_lab(_possible: str | None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Lab]]:
    """Return a function that makes a laboratory with `nodes` nodes. Skips the test where that is not possible."""
    if _possible is not None:
        pytest.skip(_possible)
    labs: list[Lab] = []

    def make(nodes: int) -> Lab:
        folder = tmp_path / f"lab{len(labs)}"
        folder.mkdir()
        labs.append(Lab(request.getfixturevalue("nodes_nursery"), folder, nodes))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
