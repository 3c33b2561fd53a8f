"""What happens to clients when the process of their server dies, hangs, or cannot be reached."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.coordination import CoordinationStore, Host, Namespace
from inprocess.exception import StoreError
from tests.inprocess.coordination.conftest import Connect
from tests.inprocess.coordination.helpers import Relay, ServerProcess, eventually, server_processes

LONG = timedelta(seconds=20)
CHUNK = timedelta(milliseconds=500)


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    with server_processes(3) as servers:
        yield servers


@pytest.fixture
def join(servers: list[ServerProcess], connect: Connect) -> Callable[[], CoordinationStore]:
    """Connect a client that knows all servers."""

    def join() -> CoordinationStore:
        client = connect(servers[0].host, patience=timedelta(seconds=2))
        for server in servers[1:]:
            client.register_host(server.host)
        return client

    return join


Join = Callable[[], CoordinationStore]


def _mirrored(servers: list[ServerProcess], client: CoordinationStore) -> None:
    """Have the standbys follow the primary, and wait until they have its contents."""
    for server in servers[1:]:
        server.follow(client.hosts)
    eventually(lambda: servers[0].state().mirrors == len(servers) - 1)


def test_a_blocked_wait_is_asked_again(servers: list[ServerProcess], join: Join, pool: ThreadPoolExecutor) -> None:
    first, second = join(), join()
    waits: list[Future[Any]] = [pool.submit(first.wait, ["key"], LONG), pool.submit(first.wait_for_interrupted, LONG)]
    eventually(lambda: servers[0].state().requests == 2 * 2 + 2)
    servers[0].kill()
    second.set("key", "x")
    second.record_interrupted([InterruptionRecord(1, Interruption.EXCEPTION)])
    assert [wait.result(20) for wait in waits] == [None, True]
    assert first.get_interruption_records() == (InterruptionRecord(1, Interruption.EXCEPTION),)
    assert first.current_host == second.current_host == servers[1].host


@pytest.mark.parametrize("kind", ["barrier", "reentrant_barrier"])
def test_a_barrier_with_half_of_the_ranks(
    servers: list[ServerProcess], join: Join, pool: ThreadPoolExecutor, kind: str
) -> None:
    clients = [join() for _ in range(4)]
    before = servers[0].state().requests

    def arrive(rank: int) -> None:
        getattr(Namespace(1, clients[rank]), kind)([rank], "name", 4, LONG, LONG)

    arrivals = [pool.submit(arrive, rank) for rank in range(2)]
    eventually(lambda: servers[0].state().requests == before + 4)
    servers[0].kill()
    arrivals += [pool.submit(arrive, rank) for rank in (2, 3)]
    for arrival in arrivals:
        arrival.result(20)


def test_the_last_arrival_may_be_unanswered(servers: list[ServerProcess], join: Join, pool: ThreadPoolExecutor) -> None:
    clients = [join() for _ in range(2)]
    waiting = pool.submit(clients[0].reentrant_barrier, [0], "name", 2, LONG, CHUNK)
    clients[1].reentrant_barrier([1], "name", 2, timedelta(0))
    servers[0].kill()
    waiting.result(20)
    clients[1].reentrant_barrier([1], "name", 2, LONG)
    assert clients[1].members("reentrant_barrier/name") == {"0", "1"}


def test_adds_are_applied_once_over_two_deaths(
    servers: list[ServerProcess], join: Join, pool: ThreadPoolExecutor
) -> None:
    clients = [join() for _ in range(3)]

    def add(index: int) -> None:
        for round_ in range(300):
            clients[index % 3].add("sum", 1)
            clients[index % 3].append("log", f"{index} {round_}\n")

    jobs = [pool.submit(add, index) for index in range(6)]
    for server, reached in ((servers[0], 300), (servers[1], 900)):
        eventually(lambda reached=reached: clients[0].add("sum", 0) >= reached)  # type: ignore[misc]
        server.kill()
    for job in jobs:
        job.result(30)
    assert clients[0].add("sum", 0) == 1800
    lines = clients[1].get("log").decode().splitlines()
    assert len(lines) == len(set(lines)) == 1800
    assert clients[2].current_host == servers[2].host


def test_what_a_client_left_behind_survives(servers: list[ServerProcess], join: Join, connect: Connect) -> None:
    first, other = join(), join()
    _mirrored(servers, first)
    gone = connect(servers[0].host)
    gone.record_terminated_ranks([7])
    gone.reentrant_barrier([7], "name", 2, timedelta(0))
    gone.add("sum", 5)
    assert gone.compare_set("decision", "", "gone") == b"gone"
    gone.close()
    servers[0].kill()
    assert other.compare_set("decision", "", "other") == b"gone"
    assert other.get_terminated_ranks() == {7}
    assert other.add("sum", 1) == 6
    other.reentrant_barrier([1], "name", 2, LONG)
    eventually(lambda: servers[1].state().mirrors == 1)
    servers[1].kill()
    assert first.get_terminated_ranks() == {7}
    assert first.add("sum", 1) == 7


def test_mirrors_do_not_apply_the_journal_again(
    servers: list[ServerProcess], join: Join, pool: ThreadPoolExecutor
) -> None:
    clients = [join() for _ in range(2)]
    _mirrored(servers, clients[0])

    def add(index: int) -> None:
        for _ in range(300):
            clients[index % 2].add("sum", 1)

    jobs = [pool.submit(add, index) for index in range(4)]
    eventually(lambda: clients[0].add("sum", 0) >= 300)
    servers[0].kill()
    for job in jobs:
        job.result(30)
    assert clients[0].add("sum", 0) == 1200


def test_forgotten_namespaces_do_not_come_back(servers: list[ServerProcess], join: Join) -> None:
    client = join()
    for iteration in (1, 2):
        Namespace(iteration, client).set("key", "x")
        Namespace(iteration, client).arrive("set", "m")
    Namespace(1, client).clear()
    servers[0].kill()
    assert not client.check(["1/key"])
    assert client.members("1/set") == frozenset()
    assert client.check(["2/key"])
    assert client.refresh_hosts() == tuple(server.host for server in servers)


def test_a_broken_connection_is_no_dead_server(servers: list[ServerProcess], connect: Connect) -> None:
    relay = Relay(servers[0].host)
    client = connect(relay.host)
    for server in servers[1:]:
        client.register_host(server.host)
    client.add("sum", 1)
    relay.cut()
    assert client.add("sum", 1) == 2
    assert client.current_host == relay.host
    assert not servers[1].state().active
    relay.close()


def test_a_standby_refuses_while_an_earlier_host_lives(
    servers: list[ServerProcess], join: Join, connect: Connect
) -> None:
    known = join()
    _mirrored(servers, known)
    relay = Relay(servers[0].host)
    cut_off = connect(relay.host, patience=timedelta(milliseconds=300))
    for server in servers[1:]:
        cut_off.register_host(server.host)
    relay.close()
    with pytest.raises(StoreError, match="an earlier host lives"):
        cut_off.set("key", "x")
    assert not any(server.state().active for server in servers[1:])
    known.set("key", "y")
    assert known.current_host == servers[0].host
    servers[0].kill()
    cut_off.set("key", "x")
    assert known.get("key") == b"x"


def test_a_hanging_server_is_left_and_steps_down(
    servers: list[ServerProcess], join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inprocess.coordination.client._ANSWER_S", 0.3)
    first, second = join(), join()
    second.set("before", "x")
    servers[0].stop()
    first.set("key", "x")
    assert first.current_host == servers[1].host
    servers[0].resume()
    assert second.get("key", LONG) == b"x"
    assert second.get("before") == b"x"
    assert second.current_host == servers[1].host
    assert not servers[0].state().active


def test_all_hosts_are_gone(servers: list[ServerProcess], connect: Connect) -> None:
    client = connect(servers[0].host, patience=timedelta(milliseconds=200))
    client.register_host(servers[1].host)
    for server in servers:
        server.kill()
    with pytest.raises(StoreError, match=rf"no host .*:{servers[0].host.port} .*:{servers[1].host.port} "):
        client.set("key", "x")


def test_a_new_client_finds_the_server_that_took_over(
    servers: list[ServerProcess], join: Join, connect: Connect
) -> None:
    client = join()
    servers[0].kill()
    client.set("key", "x")
    late = CoordinationStore.from_spec(client.spec())
    assert late.get("key") == b"x"
    late.close()
    with pytest.raises(StoreError, match="refused"):
        connect(Host(0, "127.0.0.1", servers[0].host.port), connect_timeout=timedelta(milliseconds=100))
