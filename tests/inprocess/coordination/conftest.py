import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inprocess.coordination import CoordinationStore, Host, StoreServer
from tests.inprocess.coordination.helpers import SESSION
from tests.support import LeakCheck

Connect = Callable[..., CoordinationStore]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    check = LeakCheck()
    yield
    check.check()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0, session=SESSION)
    server.start()
    yield server
    server.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(*hosts: Host, **options: Any) -> CoordinationStore:
            return stack.enter_context(CoordinationStore(hosts, session=SESSION, **options))

        yield connect


@pytest.fixture
def client(server: StoreServer, connect: Connect) -> CoordinationStore:
    return connect(server.host)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
