"""One nursery for all jobs of a test run."""

from collections.abc import Iterator

import pytest

from tests.inprocess.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where ranks come from."""
    nursery = Nursery()
    yield nursery
    nursery.close()
