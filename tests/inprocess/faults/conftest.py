"""One nursery for all jobs of a test run."""

from collections.abc import Iterator

import pytest

from tests.inprocess.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that forks all ranks."""
    nursery = Nursery()
    yield nursery
    nursery.close()
