from collections.abc import Iterator

import pytest

from tests.support.forked_ranks import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """Runs functions on several ranks: `ranks.run(function, world_size)`."""
    server = RankServer()
    yield server
    server.close()
