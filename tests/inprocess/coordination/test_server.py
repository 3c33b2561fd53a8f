import contextlib
import errno
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from inprocess.coordination import Access, CoordinationStore, StoreServer
from inprocess.coordination.server_process import ServerProcess
from inprocess.coordination.wire import PROTOCOL, FrameReader, Op, encode, pack_number, proof
from inprocess.exception import StoreError, StoreTimeoutError
from inprocess.ipc.proofs import fresh_nonce
from tests.inprocess.coordination.conftest import Connect
from tests.inprocess.coordination.helpers import eventually, greeted

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
    other = connect()
    other.set("a", "1")
    other.arrive("set", "x")
    assert not any(wait.done() for wait in waits)
    other.arrive("set", "y")
    other.set("b", "2")
    assert [wait.result(20) for wait in waits] == [None, 2, b"2"]
    assert server.request_count == 3 + 4


def test_a_change_of_a_client_that_does_not_read_its_answer_ends_the_wait_of_others(
    server: StoreServer, access: Access, client: CoordinationStore
) -> None:
    keys = [f"{number}" for number in range(40)]
    value = bytes(4_000_000)
    with ThreadPoolExecutor(len(keys)) as pool:
        waits = {key: pool.submit(client.wait, [key], LONG) for key in keys}
        eventually(lambda: server.request_count == len(keys))
        with contextlib.suppress(OSError), greeted(access) as sock:
            for id, key in enumerate(keys, 1):
                sock.sendall(encode(Op.COMPARE_SET, id, b"", b"", pack_number(0), key.encode(), b"", value))
        eventually(lambda: server.client_count == 1)
        there = [key for key in keys if client.check([key])]
        for key in keys[len(there) :]:
            client.set(key, "")
        for wait in waits.values():
            wait.result(30)
    assert 0 < len(there) < len(keys), "the connection is closed when its answers are too large together"


def test_timeouts_end_in_their_order(client: CoordinationStore, pool: ThreadPoolExecutor) -> None:
    ended: list[int] = []

    def wait(milliseconds: int) -> None:
        with pytest.raises(StoreTimeoutError, match="absent"):
            client.wait(["absent"], timedelta(milliseconds=milliseconds))
        ended.append(milliseconds)

    for waiting in [pool.submit(wait, milliseconds) for milliseconds in (900, 100, 500)]:
        waiting.result(20)
    assert ended == [100, 500, 900]


def test_a_wait_of_no_time_tells_what_is(client: CoordinationStore) -> None:
    client.set("there", "x")
    for _ in range(100):
        client.wait(["there"], timedelta(0))
        with pytest.raises(StoreTimeoutError):
            client.wait(["absent"], timedelta(0))


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
    clients = [connect() for _ in range(4)]

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
    first, second = connect(), connect()
    first.check(["x"])
    second.check(["x"])
    assert server.client_count == 2
    first.close()
    eventually(lambda: server.client_count == 1)
    with pytest.raises(StoreError, match="closed"):
        first.check(["x"])


def test_a_port_that_is_taken(server: StoreServer, access: Access) -> None:
    second = StoreServer(access)
    with pytest.raises(OSError, match="in use") as caught:
        second.start()
    assert caught.value.errno == errno.EADDRINUSE
    server.close()
    third = StoreServer(access)
    assert third.start() == access
    third.close()


def test_a_port_that_becomes_free_is_waited_for(server: StoreServer, access: Access) -> None:
    second = StoreServer(access)

    def ends() -> bool:  # asked after each attempt
        server.close()
        return True

    assert second.start(port_wait_s=30, is_wanted=ends) == access
    second.close()


def test_a_port_is_not_waited_for_without_need(access: Access) -> None:
    second = StoreServer(access)
    with pytest.raises(OSError, match=f"port {access.port} is still in use"):
        second.start(port_wait_s=600, is_wanted=lambda: False)


def test_the_process_names_a_port_that_stays_in_use(access: Access) -> None:
    process = ServerProcess(access, clients=1, silence_s=60, port_wait_s=0.1)
    process.start()
    with pytest.raises(StoreError, match=rf"port {access.port} is still in use by another program.* after 0.1 s"):
        process.wait_started()


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_it_listens_where_it_is_told_to_and_nowhere_else() -> None:
    server = StoreServer(Access("127.0.0.2", 0))
    port = server.start().port
    socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    server.close()


@pytest.mark.parametrize("wrong", [{"secret": "guessed"}, {"job": "the one before"}])
def test_who_does_not_know_the_secret_is_refused_at_once(
    server: StoreServer, access: Access, connect: Connect, wrong: dict[str, str]
) -> None:
    with pytest.raises(StoreError, match="serves another job"):
        connect(replace(access, **wrong))
    assert server.client_count == 0
    assert server.request_count == 0


def test_a_proof_cannot_be_said_again(server: StoreServer, access: Access) -> None:
    """What one connection has proved is worth nothing on another one."""
    nonce, client = fresh_nonce(), b"me"

    def challenge(sock: socket.socket) -> bytes:
        reader = FrameReader()
        reader.feed(sock.recv(1000))
        return next(reader.frames()).fields[1]

    with socket.create_connection((access.host, access.port)) as first:
        hello = encode(Op.HELLO, 0, client, nonce, proof(access, b"client", challenge(first), nonce, client))
        first.sendall(hello)
        eventually(lambda: server.client_count == 1)
        with socket.create_connection((access.host, access.port)) as second:
            challenge(second)
            second.sendall(hello)
            reader = FrameReader()
            reader.feed(second.recv(1000))
            assert next(reader.frames()).op is Op.REFUSED
            assert second.recv(1000) == b""
    assert server.request_count == 0


def test_a_server_that_does_not_know_the_secret_is_not_trusted(access: Access) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def play() -> None:
            sock, _ = impostor.accept()
            sock.sendall(encode(Op.CHALLENGE, 0, PROTOCOL, fresh_nonce()))
            sock.recv(1000)
            sock.sendall(encode(Op.WELCOME, 0, bytes(32)))
            sock.recv(1000)
            sock.close()

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(StoreError, match="does not know the secret"):
            CoordinationStore(replace(access, port=impostor.getsockname()[1]))
        thread.join()


def test_many_who_prove_nothing_keep_nobody_out(
    server: StoreServer, access: Access, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inprocess.coordination.server._MOST_STRANGERS", 8)
    strangers = [socket.create_connection((access.host, access.port)) for _ in range(20)]
    connect().set("key", "x")
    for stranger in strangers:
        stranger.close()


def test_who_proves_nothing_is_dropped(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inprocess.coordination.server._GREETING_S", 0.2)
    with socket.create_connection((access.host, access.port), timeout=20) as stranger:
        while stranger.recv(1000):
            pass


_SERVER = """
import sys
from inprocess.coordination import Access, StoreServer
server = StoreServer(Access("127.0.0.1", 0, "job", 32 * "x"), silence_s=2.5)
print(server.start().port, flush=True)
sys.stdin.readline()
print(server.client_count, flush=True)
sys.stdin.readline()
"""
_CLIENT = """
import sys
from datetime import timedelta
from inprocess.coordination import Access, CoordinationStore
access = Access("127.0.0.1", int(sys.argv[1]), "job", 32 * "x")
with CoordinationStore(access, patience=timedelta(seconds=60), ping_interval=timedelta(seconds=0.3)) as client:
    print("connected", flush=True)
    sys.stdin.readline()
    client.set("key", "x")
    print(client.get("key").decode(), flush=True)
"""


def test_a_server_that_was_suspended_itself_drops_no_client() -> None:
    """All are stopped for longer than the limit, and the client goes on later. Without clients the server may end."""
    with contextlib.ExitStack() as stack:

        def start(program: str, *arguments: str) -> Any:
            command = [sys.executable, "-c", program, *arguments]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            return process

        def answer_of(process: Any) -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return str(process.stdout.readline())

        server = start(_SERVER)
        client = start(_CLIENT, server.stdout.readline().strip())
        assert client.stdout.readline() == "connected\n"
        for process in (client, server):
            process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        server.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert answer_of(server) == "1\n"
        client.send_signal(signal.SIGCONT)
        assert answer_of(client) == "x\n"


def test_a_member_that_attends_leaves_with_its_connection(server: StoreServer, connect: Connect) -> None:
    client, other, again = connect(), connect(), connect()
    for each in (other, again):
        assert each.attend("set", "x") == 1
    other.close()
    eventually(lambda: server.client_count == 2)
    assert client.members("set") == {"x"}, "another connection has it"
    again.close()
    eventually(lambda: not client.members("set"))


def test_a_member_that_attends_leaves_when_it_is_silent() -> None:
    server = StoreServer(Access("127.0.0.1", 0), silence_s=8.0)
    access = server.start()
    silent = CoordinationStore(access, ping_interval=timedelta(seconds=100))
    with CoordinationStore(access, ping_interval=timedelta(seconds=0.1)) as client:
        assert [silent.attend("set", "x"), client.attend("set", "y"), client.arrive("set", "z")] == [1, 2, 3]
        eventually(lambda: client.members("set") == {"y", "z"})
        assert server.client_count == 2, "the connection is still there"
        assert silent.attend("set", "x") == 3
    silent.close()
    server.close()


def test_a_limit_of_descriptors_that_is_too_low_is_named() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    server = StoreServer(Access("127.0.0.1", 0))
    with pytest.raises(StoreError, match=f"needs {hard + 64} file descriptors, but this process may have {hard}"):
        server.start(clients=hard)


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_are_returned_by_add_only_for_numbers(client: CoordinationStore) -> None:
    client.set("text", "abc")
    with pytest.raises(StoreError, match="not a number"):
        client.add("text", 1)
    assert client.get("text") == b"abc"


def test_large_values(client: CoordinationStore) -> None:
    value = bytes(range(256)) * (16 << 10)
    client.set("large", value)
    assert client.get("large") == value
    with pytest.raises(StoreError, match="limit is 4194304"):
        client.append("large", "x")
    with pytest.raises(ValueError, match="limit"):
        client.set("too large", bytes(9 << 20))
    assert client.num_keys() == 1


def test_a_store_that_is_full_says_so(client: CoordinationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inprocess.coordination.contents._MOST_BYTES", 1000)
    client.set("a", bytes(900))
    with pytest.raises(StoreError, match="the store is full"):
        client.set("b", bytes(200))
    client.delete_key("a")
    client.set("b", bytes(900))


def test_close_is_quick_with_waiters(server: StoreServer, connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect(patience=timedelta(milliseconds=200))
    waiting = pool.submit(client.wait, ["absent"], LONG)
    eventually(lambda: server.request_count == 1)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 10, "the waiter has longer"
    with pytest.raises(StoreError, match="the coordination store is lost"):
        waiting.result(20)


def test_a_server_may_be_closed_without_start() -> None:
    StoreServer(Access("127.0.0.1", 0)).close()


def test_values_that_are_too_large_together_are_an_error_of_their_reader_alone(
    client: CoordinationStore, connect: Connect, pool: ThreadPoolExecutor, server: StoreServer
) -> None:
    reader = connect()
    keys = ["a", "b", "c"]
    waiting = pool.submit(reader.multi_get, keys, LONG)
    eventually(lambda: server.request_count == 1)
    for key in keys:
        client.set(key, bytes(4 << 20))  # the last one, too, although it makes the answer to the reader
    for reading in (waiting, pool.submit(reader.multi_get, keys, LONG)):
        with pytest.raises(StoreError, match="the limit is 8388608"):
            reading.result(20)
    assert server.client_count == 2


def test_a_client_that_does_not_read_its_answers_is_dropped(server: StoreServer, access: Access) -> None:
    """Whatever it asks for in one message: what is queued for it is limited before it is made."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with CoordinationStore(access) as client:
        client.set("large", bytes(4 << 20))
        with greeted(access) as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.sendall(b"".join(encode(Op.GET, id, b"", b"", b"large") for id in range(1, 1000)))
            eventually(lambda: server.client_count == 1)
        assert client.get("large") == bytes(4 << 20)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 1 << 20, "kilobytes; all answers together have 4 GB"
