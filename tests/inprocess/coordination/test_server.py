import errno
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from inprocess.coordination import CoordinationStore, StoreServer
from inprocess.exception import StoreError, StoreTimeoutError
from tests.inprocess.coordination.conftest import Connect
from tests.inprocess.coordination.helpers import SESSION, eventually

LONG = timedelta(seconds=20)


def test_who_waits_asks_once(
    server: StoreServer, client: CoordinationStore, connect: Connect, pool: ThreadPoolExecutor
) -> None:
    waits: list[Future[Any]] = [
        pool.submit(client.wait, ["a", "b"], LONG),
        pool.submit(client.wait_size, "set", 2, LONG),
        pool.submit(client.get, "b", LONG),
    ]
    eventually(lambda: server.request_count == 3)
    other = connect(server.host)
    other.set("a", "1")
    other.arrive("set", "x")
    assert not any(wait.done() for wait in waits)
    other.arrive("set", "y")
    other.set("b", "2")
    assert [wait.result(20) for wait in waits] == [None, 2, b"2"]
    assert server.request_count == 3 + 4


def test_timeouts_end_in_their_order(client: CoordinationStore, pool: ThreadPoolExecutor) -> None:
    ended: list[int] = []

    def wait(milliseconds: int) -> None:
        with pytest.raises(StoreTimeoutError, match="absent"):
            client.wait(["absent"], timedelta(milliseconds=milliseconds))
        ended.append(milliseconds)

    for waiting in [pool.submit(wait, milliseconds) for milliseconds in (300, 100, 200)]:
        waiting.result(20)
    assert ended == [100, 200, 300]


def test_barrier_of_64_threads(server: StoreServer, client: CoordinationStore) -> None:
    with ThreadPoolExecutor(64) as pool:
        for round_ in range(3):
            arrivals = [
                pool.submit(client.barrier, [rank], f"{round_}", 64, LONG, timedelta(seconds=1)) for rank in range(64)
            ]
            for arrival in arrivals:
                arrival.result(30)
    assert server.client_count == 1


def test_changes_of_many_threads_and_clients(server: StoreServer, connect: Connect, pool: ThreadPoolExecutor) -> None:
    clients = [connect(server.host) for _ in range(4)]

    def change(index: int) -> None:
        for round_ in range(50):
            clients[index % 4].add("sum", 1)
            clients[index % 4].append("log", f"{index} {round_}\n")

    for job in [pool.submit(change, index) for index in range(8)]:
        job.result(30)
    assert clients[0].get("sum") == b"400"
    lines = clients[1].get("log").decode().splitlines()
    assert [line for line in lines if line.startswith("3 ")] == [f"3 {round_}" for round_ in range(50)]
    assert len(lines) == 400


def test_client_count(server: StoreServer, connect: Connect) -> None:
    first, second = connect(server.host), connect(server.host)
    first.check(["x"])
    second.check(["x"])
    assert server.client_count == 2
    first.close()
    eventually(lambda: server.client_count == 1)
    with pytest.raises(StoreError, match="closed"):
        first.check(["x"])


def test_the_port_can_be_used_again_at_once(server: StoreServer, client: CoordinationStore) -> None:
    client.set("key", "x")
    second = StoreServer(*server.address, session="next")
    with pytest.raises(OSError, match="in use") as caught:
        second.start()
    assert caught.value.errno == errno.EADDRINUSE
    closing = threading.Timer(0.1, server.close)
    closing.start()
    third = StoreServer(*server.address, session="next")
    third.start(bind_timeout=20)
    closing.join()
    third.close()


def test_stop_listening_keeps_those_who_are_there(
    server: StoreServer, client: CoordinationStore, connect: Connect
) -> None:
    server.stop_listening()
    successor = StoreServer(*server.address, session="next")
    successor.start(bind_timeout=20)
    client.set("key", "x")
    assert client.get("key") == b"x"
    with pytest.raises(StoreError, match="another session"):
        connect(server.host, connect_timeout=timedelta(milliseconds=50))
    successor.close()


def test_a_client_waits_for_its_session(server: StoreServer, pool: ThreadPoolExecutor) -> None:
    host = server.host
    connecting = pool.submit(CoordinationStore, [host], session="next", timeout=LONG)
    eventually(lambda: not connecting.done())
    server.close()
    successor = StoreServer(host.name, host.port, session="next")
    successor.start(bind_timeout=20)
    connecting.result(20).close()
    successor.close()


def test_values_are_returned_by_add_only_for_numbers(client: CoordinationStore) -> None:
    client.set("text", "abc")
    with pytest.raises(StoreError, match="not a number"):
        client.add("text", 1)
    assert client.get("text") == b"abc"


def test_large_values(client: CoordinationStore) -> None:
    value = bytes(range(256)) * (32 << 10)
    client.set("large", value)
    assert client.get("large") == value
    with pytest.raises(ValueError, match="limit"):
        client.set("too large", bytes(33 << 20))
    assert client.num_keys() == 1


def test_close_is_quick_with_waiters(server: StoreServer, connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect(server.host, patience=timedelta(milliseconds=200))
    waiting = pool.submit(client.wait, ["absent"], LONG)
    eventually(lambda: server.request_count == 1)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 1
    with pytest.raises(StoreError, match=rf"no host .*:{server.address[1]}"):
        waiting.result(20)


def test_a_server_may_be_closed_without_start() -> None:
    StoreServer("127.0.0.1", 0, session=SESSION).close()
