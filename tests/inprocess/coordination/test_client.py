import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from inprocess.coordination import Access, CoordinationStore, Namespace, RestartIndex, StoreServer
from inprocess.coordination.verbs import VerbCall
from inprocess.coordination.wire import Op, pack_number
from inprocess.exception import StaleViewError, StoreError, StoreLostError
from tests.inprocess.coordination.conftest import Connect
from tests.inprocess.coordination.helpers import Relay, check_that_a_forked_child_cannot_use, eventually, greeted

LONG = timedelta(seconds=20)
QUICK = timedelta(milliseconds=200)


@pytest.fixture
def relay(access: Access) -> Iterator[Relay]:
    relay = Relay(access)
    yield relay
    relay.close()


def test_a_change_whose_answer_is_lost_is_applied_once(
    connect: Connect, relay: Relay, client: CoordinationStore
) -> None:
    relayed = connect(relay.access)
    for round_ in range(5):
        relay.swallow_answers = round_ % 3
        assert relayed.add("sum", 1) == round_ + 1
        relay.swallow_answers = 1
        relayed.append("log", "x")
    assert client.get("log") == b"xxxxx"
    relay.swallow_answers = 1
    assert relayed.compare_set("log", "xxxxx", "y") == b"y"


def test_threads_that_are_switched_between_at_every_bytecode(
    client: CoordinationStore, pool: ThreadPoolExecutor
) -> None:
    """A change must not be taken for a late copy because one of another thread, made later, was sent earlier."""

    def add() -> None:
        for _ in range(1000):
            client.add("sum", 1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for adding in [pool.submit(add) for _ in range(8)]:
            adding.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert client.get("sum") == b"8000"


def test_a_wait_goes_on_over_a_new_connection(
    server: StoreServer, connect: Connect, relay: Relay, client: CoordinationStore, pool: ThreadPoolExecutor
) -> None:
    waiting = pool.submit(connect(relay.access).wait, ["key"], LONG)
    for count in (1, 2, 3):
        eventually(lambda count=count: server.request_count == count)  # type: ignore[misc]
        relay.cut()
    client.set("key", "x")
    waiting.result(20)


def test_a_server_that_is_gone(connect: Connect, server: StoreServer) -> None:
    client = connect(patience=QUICK)
    client.set("key", "x")
    server.close()
    with pytest.raises(StoreLostError, match=f"server at 127.0.0.1:{client.access.port}"):
        client.get("key")


def test_connecting_gives_up_in_time(connect: Connect, server: StoreServer) -> None:
    server.close()
    with pytest.raises(StoreError, match="refused"):
        connect(connect_timeout=QUICK)


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
    assert server.client_count == 1


def test_an_exception_while_waiting(server: StoreServer, connect: Connect, client: CoordinationStore) -> None:
    waiting = connect()
    results: list[object] = []

    def work() -> None:
        try:
            waiting.wait(["key"], LONG)
        except _Thrown:
            results.append("thrown")
        results.append(waiting.get("other key", LONG))

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: server.request_count == 1)
    _throw(thread)
    client.set("key", "x")  # the wait returns, and the exception appears
    eventually(lambda: results == ["thrown"])
    client.set("other key", "x")
    thread.join()
    assert results == ["thrown", b"x"]


# -- a server that is out of reach -------------------------------------------------------------------------------------


def test_a_store_that_is_lost_stays_lost(
    server: StoreServer, connect: Connect, relay: Relay, client: CoordinationStore, pool: ThreadPoolExecutor
) -> None:
    lonely = connect(relay.access, patience=QUICK)
    waiting = pool.submit(lonely.wait, ["absent"], LONG)
    eventually(lambda: server.request_count == 1)
    relay.close()
    with pytest.raises(StoreLostError, match=r"the server at .* was silent for 0\.2 s"):
        waiting.result(20)
    with pytest.raises(StoreLostError):
        lonely.set("key", "x")
    assert lonely.lost
    assert not client.check(["key"])
    assert not client.lost


def test_a_server_that_is_stopped_is_lost_after_the_patience_and_not_before(access: Access, connect: Connect) -> None:
    """It is in a process that still accepts connections, and says nothing."""
    patience_s = 1.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        relay = Relay(access)
        client = connect(relay.access, patience=timedelta(seconds=patience_s), ping_interval=timedelta(seconds=0.1))
        client.set("key", "x")
        begin = time.monotonic()
        relay._target = replace(access, port=silent.getsockname()[1])
        relay.cut()
        with pytest.raises(StoreLostError):
            client.get("absent", LONG)
        assert time.monotonic() - begin >= 0.9 * patience_s
        relay.close()


def test_an_interruption_shorter_than_the_patience_costs_nothing(
    connect: Connect, relay: Relay, client: CoordinationStore
) -> None:
    relayed = connect(relay.access, patience=LONG)
    for round_ in range(20):
        assert relayed.add("sum", 1) == round_ + 1
        relay.cut()
    assert client.get("sum") == b"20"


def test_pings_keep_a_client_that_asks_nothing(connect: Connect) -> None:
    impatient = StoreServer(Access("127.0.0.1", 0), silence_s=0.5)
    there = impatient.start()
    pinging = connect(there, ping_interval=timedelta(seconds=0.05))
    with greeted(there) as mute:
        assert impatient.client_count == 2
        assert mute.recv(1000) == b""
    assert impatient.client_count == 1
    pinging.set("key", "x")
    impatient.close()


# -- other processes ---------------------------------------------------------------------------------------------------


def test_a_forked_child_has_no_connection(server: StoreServer, client: CoordinationStore) -> None:
    check_that_a_forked_child_cannot_use(client)
    assert server.client_count == 1


def test_a_forked_child_does_not_keep_the_connection_open(server: StoreServer, connect: Connect) -> None:
    client = connect()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    client.close()
    eventually(lambda: server.client_count == 0)
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)


def test_clearing_a_namespace(client: CoordinationStore) -> None:
    RestartIndex(client).begin()
    store = Namespace(0, client)
    store.send_heartbeat(0, "1")
    store.arrive("set", "x")
    store.add("sum", 1)
    store.clear()
    assert client.num_keys() == 1  # the restart index
    assert store.members("set") == frozenset()


def test_requests_that_are_sent_together_are_applied_in_order_and_once(
    connect: Connect, relay: Relay, client: CoordinationStore
) -> None:
    namespace = Namespace(0, connect(relay.access))
    RestartIndex(client).begin()
    calls = [
        VerbCall(Op.APPEND, ("log",), (b"x",)),
        VerbCall(Op.ADD, ("log",), (pack_number(1),)),  # fails: it is no number
        VerbCall(Op.COMPARE_SET, ("outcome",), (b"", b"done")),
    ]
    assert namespace.perform_all([calls[0], calls[2]]) == [(), (b"done",)]
    relay.swallow_answers = 1
    with pytest.raises(StoreError, match="not a number"):
        namespace.perform_all(calls)
    assert client.get("0/log") == b"xx"
    RestartIndex(client).advance(0)
    with pytest.raises(StaleViewError):
        namespace.perform_all(calls)
    assert client.get("0/log") == b"xx"
