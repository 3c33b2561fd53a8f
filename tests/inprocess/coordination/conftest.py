import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from inprocess.coordination import Access, CoordinationStore, StoreServer
from tests.support import LeakCheck

Connect = Callable[..., CoordinationStore]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    check = LeakCheck()
    yield
    check.check()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(Access("127.0.0.1", 0))
    yield server
    server.close()


@pytest.fixture
def access(server: StoreServer) -> Access:
    return server.start()


@pytest.fixture
def connect(access: Access) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(to: Access = access, **options: Any) -> CoordinationStore:
            quick = {"ping_interval": timedelta(seconds=100)}  # so that what goes over the connection is known
            return stack.enter_context(CoordinationStore(to, **(quick | options)))

        yield connect


@pytest.fixture
def client(connect: Connect) -> CoordinationStore:
    return connect()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
