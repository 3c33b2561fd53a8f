import contextlib
import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from inprocess.coordination import CoordinationStore, Host, Namespace, StoreServer
from inprocess.coordination.journal import Entry, Journal
from inprocess.coordination.wire import Op, pack_number
from inprocess.exception import StoreError
from tests.inprocess.coordination.conftest import Connect
from tests.inprocess.coordination.helpers import Relay, eventually

LONG = timedelta(seconds=20)
QUICK = timedelta(milliseconds=200)


@pytest.fixture
def relay(server: StoreServer) -> Iterator[Relay]:
    relay = Relay(server.host)
    yield relay
    relay.close()


def test_a_change_whose_answer_is_lost_is_applied_once(
    connect: Connect, relay: Relay, client: CoordinationStore
) -> None:
    relayed = connect(relay.host)
    for round_ in range(5):
        relay.swallow_answers = round_ % 3
        assert relayed.add("sum", 1) == round_ + 1
        relay.swallow_answers = 1
        relayed.append("log", "x")
    assert client.get("log") == b"xxxxx"
    relay.swallow_answers = 1
    assert relayed.compare_set("log", "xxxxx", "y") == b"y"


def test_a_wait_goes_on_over_a_new_connection(
    server: StoreServer, connect: Connect, relay: Relay, client: CoordinationStore, pool: ThreadPoolExecutor
) -> None:
    waiting = pool.submit(connect(relay.host).wait, ["key"], LONG)
    for count in (1, 2, 3):
        eventually(lambda count=count: server.request_count == count)  # type: ignore[misc]
        relay.cut()
    client.set("key", "x")
    waiting.result(20)


def test_a_server_that_is_gone(connect: Connect, server: StoreServer) -> None:
    client = connect(server.host, patience=QUICK)
    client.set("key", "x")
    server.close()
    with pytest.raises(StoreError, match=rf"no host .*127.0.0.1:{server.address[1]}"):
        client.get("key")


def test_connecting_gives_up_in_time(connect: Connect, server: StoreServer) -> None:
    server.close()
    with pytest.raises(StoreError, match="refused"):
        connect(server.host, connect_timeout=QUICK)


class _Thrown(BaseException):
    pass


def _throw(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Thrown))


# One that is thrown between the making of a socket and its first use leaves it to the interpreter to close it.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_exceptions_at_any_bytecode_leave_the_client_usable(server: StoreServer, client: CoordinationStore) -> None:
    attempted = completed = 0
    stop = threading.Event()

    def work() -> None:
        nonlocal attempted, completed
        while not stop.is_set():
            with contextlib.suppress(_Thrown):
                attempted += 1
                client.add("sum", 1)
                completed += 1
                client.wait(["sum"], LONG)

    thread = threading.Thread(target=work)
    thread.start()
    for round_ in range(200):
        before = completed
        _throw(thread)
        eventually(lambda before=before: completed > before)  # type: ignore[misc]
        if round_ % 20 == 0:
            client.check(["sum"])
    stop.set()
    thread.join()
    assert completed <= client.add("sum", 0) <= attempted
    assert client.spec()["hosts"] == [str(server.host)]
    assert server.client_count == 1


def test_an_exception_while_waiting(
    server: StoreServer, connect: Connect, relay: Relay, client: CoordinationStore
) -> None:
    relayed = connect(relay.host)
    results: list[object] = []

    def work() -> None:
        try:
            relayed.wait(["key"], LONG)
        except _Thrown:
            results.append("thrown")
        results.append(relayed.get("key", LONG))

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: server.request_count == 1)
    _throw(thread)
    relay.cut()  # recv returns, and the exception appears
    eventually(lambda: results == ["thrown"])
    client.set("key", "x")
    thread.join()
    assert results == ["thrown", b"x"]


def test_hosts_are_in_the_order_of_their_positions(connect: Connect, server: StoreServer) -> None:
    first, second = connect(server.host), connect(server.host)
    later = [Host(position, "127.0.0.1", 1000 + position) for position in (1, 2, 3)]
    first.register_host(later[2])
    second.register_host(later[0])
    first.register_host(later[1])
    assert first.refresh_hosts() == second.refresh_hosts() == (server.host, *later)
    assert first.current_host == server.host
    with CoordinationStore.from_spec(first.spec()) as third:
        assert third.hosts == first.hosts
    assert first.local_name == "127.0.0.1"


def _entry(sequence: int, op: Op, *arguments: bytes) -> Entry:
    return Entry(sequence, op, arguments)


class TestJournal:
    def test_keeps_the_last_value_of_a_key_and_all_that_adds_up(self) -> None:
        journal = Journal()
        journal.record(_entry(1, Op.APPEND, b"key", b"lost"))
        for sequence in range(2, 100):
            journal.record(_entry(sequence, Op.SET, b"key", b"value"))
        journal.record(_entry(100, Op.ADD, b"sum", pack_number(1)))
        journal.record(_entry(101, Op.ADD, b"sum", pack_number(1)))
        journal.record(_entry(102, Op.ARRIVE, b"key", b"member"))
        assert [entry.sequence for entry in journal.since(0)] == [99, 100, 101, 102]
        assert [entry.sequence for entry in journal.since(100)] == [101, 102]

    def test_forgets_by_prefix_and_by_deletion(self) -> None:
        journal = Journal()
        for sequence, key in enumerate((b"1/a", b"1/b", b"10/a", b"2"), 1):
            journal.record(_entry(sequence, Op.SET, key, b"x"))
        journal.record(_entry(5, Op.ARRIVE, b"1/set", b"member"))
        journal.forget(b"1/")
        assert [entry.sequence for entry in journal.since(0)] == [3, 4]
        journal.record(_entry(6, Op.DELETE_KEY, b"2"))
        journal.record(_entry(7, Op.DELETE_PREFIX, b"10"))
        assert len(journal) == 0

    @pytest.mark.parametrize("won", [True, False])
    def test_knows_how_a_comparison_ended(self, won: bool) -> None:
        journal = Journal()
        entry = _entry(1, Op.COMPARE_SET, b"key", b"", b"x")
        journal.record(entry)
        journal.settle_compare_set(entry, won=won)
        assert journal.since(0) == ([_entry(1, Op.SET, b"key", b"x")] if won else [])


def test_clearing_a_namespace_empties_the_journal(client: CoordinationStore) -> None:
    for iteration in range(3):
        store = Namespace(iteration, client)
        store.send_heartbeat(0, "1")
        store.arrive("set", "x")
        store.add("sum", 1)
        store.clear()
    assert client.num_keys() == 0
    assert client._links._journal.since(0) == []
