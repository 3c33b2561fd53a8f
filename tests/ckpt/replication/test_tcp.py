"""The transport over TCP between real sockets: what it moves, and what becomes of every failure."""

import contextlib
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from ckpt.replication import connection as connections
from ckpt.replication.connection import BLOCK_BYTES, Connection, Limiter
from ckpt.replication.held_replicas import ReplicaMemory
from ckpt.replication.replica import PEERS, PROTOCOL, Address, Piece, Replica, StoreReplica, TransportError
from ckpt.replication.tcp import TcpTransport
from ckpt.replication.tcp_server import TcpServer
from tests.ckpt.replication.support import (
    HOST,
    SECRET,
    UNLIMITED,
    Harm,
    Relay,
    bytes_held,
    content,
    read,
    send,
    serving,
    staged,
)
from tests.support import LeakCheck
from tests.support.seeds import random_bytes, seed_of
from tests.support.selection import FULL

SIZE = 2 * BLOCK_BYTES + 12345


def test_a_share_of_several_pieces_is_stored_and_read(leak_check: LeakCheck) -> None:
    data = content("slot", 3 * BLOCK_BYTES)
    with serving() as (memory, server), staged(data) as region:
        pieces = [Piece(region, 4096, 2 * BLOCK_BYTES), Piece(region, 0, 17), Piece(region, BLOCK_BYTES + 1, 4096)]
        expected = b"".join(data[piece.offset : piece.offset + piece.nbytes] for piece in pieces)
        replica = Replica("run/7", 3, len(expected), len(expected))
        transport = TcpTransport(HOST, SECRET)
        transport.store(server.address, replica, pieces, keep=None, limiter=Limiter(None))
        assert bytes_held(memory, replica) == expected
        with transport.open(server.address) as remote:
            for offset, nbytes in ((0, 1), (replica.nbytes - 1, 1), (4095, 70_000), (0, replica.nbytes)):
                found = bytearray(nbytes)
                remote.read_into(replica, offset, memoryview(found))
                assert found == expected[offset : offset + nbytes]


def test_the_traffic_is_that_of_the_bytes() -> None:
    data = content("traffic", 16 * BLOCK_BYTES)
    with serving() as (_, server), Relay(server.address) as relay:
        send(relay.address, "1", data)
        assert len(data) < sum(relay.passed.values()) < 1.001 * len(data)


def test_a_refused_read_leaves_the_connection_usable() -> None:
    data = content("1", SIZE)
    with serving() as (_, server):
        replica = send(server.address, "1", data)
        with TcpTransport(HOST, SECRET).open(server.address) as remote:
            memory = memoryview(bytearray(10))
            for wrong, offset in (
                (Replica("2", 0, SIZE, SIZE), 0),
                (Replica("1", 0, SIZE + 1, SIZE + 1), 0),
                (replica, SIZE - 9),
            ):
                with pytest.raises(TransportError, match=r"does not have|are not in a replica"):
                    remote.read_into(wrong, offset, memory)
            remote.read_into(replica, SIZE - 10, memory)
            assert memory == data[-10:]


# -- who is served -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_it_never_listens_everywhere(host: str) -> None:
    with pytest.raises(ValueError, match="every address"):
        TcpTransport(host, SECRET)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 characters"):
        TcpTransport(HOST, "short")


def test_it_listens_only_where_it_is_told(leak_check: LeakCheck) -> None:
    memory = ReplicaMemory(UNLIMITED)
    server = TcpTransport("127.0.0.2", SECRET).serve(memory)
    assert server.address.host == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, server.address.port), 5)
    server.close()
    server.close()
    memory.close()


def test_a_client_without_the_secret_is_told_nothing(leak_check: LeakCheck) -> None:
    data = content("1", SIZE)
    with serving() as (memory, server):
        replica = send(server.address, "1", data)
        stranger = TcpTransport(HOST, "another secret, of another job, as long as that")
        with pytest.raises(TransportError, match="ended the greeting"):
            stranger.open(server.address)
        with staged(data) as region, pytest.raises(TransportError, match="ended the greeting"):
            stranger.store(
                server.address, Replica("2", 0, SIZE, SIZE), [Piece(region, 0, SIZE)], keep=None, limiter=Limiter(None)
            )
        assert memory.replicas() == [replica]


def test_a_holder_without_the_secret_gets_nothing(leak_check: LeakCheck) -> None:
    """It sees a proof that is worth nothing elsewhere, and no byte of the replica."""
    received = bytearray()

    def pretend() -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(PROTOCOL + bytes(16))
            while len(received) < 48:
                received.extend(client.recv(1000))
            client.sendall(bytes(32))
            while more := client.recv(1000):
                received.extend(more)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(TransportError, match="does not know the secret"):
            send(Address(HOST, listener.getsockname()[1]), "1", content("1", SIZE))
        thread.join()
    assert len(received) == 48


def test_a_proof_cannot_be_played_back() -> None:
    """What one connection has sent is refused on another: each has its own nonces."""
    with serving() as (_, server):
        sent = bytearray()
        with socket.create_server((HOST, 0)) as listener, socket.create_connection(_pair(server.address)) as upstream:

            def record() -> None:
                client, _ = listener.accept()
                with client:
                    client.sendall(upstream.recv(32, socket.MSG_WAITALL))
                    sent.extend(client.recv(48, socket.MSG_WAITALL))

            thread = threading.Thread(target=record)
            thread.start()
            with pytest.raises(TransportError):
                TcpTransport(HOST, SECRET).open(Address(HOST, listener.getsockname()[1]))
            thread.join()
            with socket.create_connection(_pair(server.address)) as other:
                other.settimeout(10)
                other.recv(32, socket.MSG_WAITALL)
                other.sendall(sent)
                assert other.recv(1) == b""
            upstream.settimeout(10)
            upstream.sendall(sent)  # the connection it was meant for takes it, once
            assert len(upstream.recv(32, socket.MSG_WAITALL)) == 32


def test_what_is_no_greeting_is_not_read_further() -> None:
    with serving() as (memory, server):
        with socket.create_connection(_pair(server.address)) as sock:
            sock.settimeout(10)
            assert sock.recv(32, socket.MSG_WAITALL).startswith(PROTOCOL)
            sock.sendall(random_bytes(48))
            assert _is_closed(sock)
        assert memory.replicas() == []


def test_strangers_cannot_keep_others_out(leak_check: LeakCheck) -> None:
    """More connections than may be open without a proof: the oldest are closed, and a peer is still served."""
    data = content("1", SIZE)
    with serving() as (memory, server):
        assert isinstance(server, TcpServer)
        strangers = [socket.create_connection(_pair(server.address)) for _ in range(100)]
        replica = send(server.address, "1", data)
        assert memory.replicas() == [replica]
        assert server.connection_count[0] <= 64
        strangers[0].settimeout(10)
        assert strangers[0].recv(32, socket.MSG_WAITALL).startswith(PROTOCOL)
        assert strangers[0].recv(1) == b""
        for sock in strangers:
            sock.close()


def test_a_silent_stranger_is_closed(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    monkeypatch.setattr(connections, "GREETING_S", 0.1)
    with serving() as (_, server), socket.create_connection(_pair(server.address)) as sock:
        sock.settimeout(10)
        sock.recv(32, socket.MSG_WAITALL)
        assert sock.recv(1) == b""


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_message_that_another_puts_into_a_connection_is_not_taken(leak_check: LeakCheck) -> None:
    """Messages are signed: whoever can write into a connection of others, but has not the secret, cannot use it."""
    data = content("1", SIZE)
    with serving() as (memory, server):
        kept = send(server.address, "1", data)
        connection = Connection.to(server.address, 10.0)
        connection.connect(server.address)
        connection.greet_holder(SECRET)
        body = PEERS.encode(StoreReplica(1, Replica("2", 0, 1, 1), None))
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        sock.sendall(len(body).to_bytes(4, "big") + bytes(32) + body)
        with pytest.raises(ConnectionError):
            connection.receive()
        sock.close()
        connection.close()
        assert memory.replicas() == [kept]


def _harms(kinds: tuple[str, ...]) -> list[Harm]:
    """Harm at every byte of greeting, messages and headers, and at some bytes of the blocks."""
    sizes = {True: SIZE + 3 * 8 + 48 + 130, False: 32 + 32 + 2 * 48}
    chosen = random.Random(seed_of("HARMS_SEED"))
    harms = []
    for kind in kinds:
        for upwards in (True, False):
            early = range(220 if upwards else sizes[False])
            late = [chosen.randrange(sizes[upwards]) for _ in range(60)]
            positions = [*early, *late] if FULL else chosen.sample([*early], 14) + late[:6]
            harms += [Harm(kind, upwards, at) for at in positions]  # type: ignore[arg-type]
    return harms


def test_a_connection_that_ends_or_changes_at_any_byte(leak_check: LeakCheck) -> None:
    """The holder has the replica, and all of it is right, or the sender is told that it is not there.

    In both cases the snapshot to keep is there, and the next transfer succeeds.
    """
    old, new = content("old", SIZE), content("new", SIZE)
    for harm in _harms(("cut", "flip")):
        with serving(silence_s=5.0) as (memory, server):
            kept = send(server.address, "old", old)
            with Relay(server.address, harm) as relay:
                try:
                    replica = send(relay.address, "new", new, keep="old", silence_s=1.0)
                except TransportError:
                    pass
                else:
                    assert bytes_held(memory, replica) == new, harm
            assert bytes_held(memory, kept) == old, harm
            for replica in memory.replicas():
                if replica.snapshot == "new":  # a lost answer, or a flipped byte in what it is called
                    assert bytes_held(memory, replica) == new, harm
            replica = send(server.address, "new", new, keep="old")
            assert bytes_held(memory, replica) == new, harm


@pytest.mark.parametrize("upwards", [True, False])
def test_a_peer_that_falls_silent_is_given_up(upwards: bool, leak_check: LeakCheck) -> None:
    """No connection is closed, as when a node loses its power: both ends notice."""
    new = content("new", 8 * BLOCK_BYTES)
    at = {True: [10, 100, BLOCK_BYTES], False: [10, 40, 70]}[upwards]
    for position in at:
        with serving(silence_s=0.5) as (memory, server):
            kept = send(server.address, "old", new)
            with Relay(server.address, Harm("hold", upwards, position)) as relay:
                with pytest.raises(TransportError, match=r"silent|closed|reset|Broken|ended the greeting"):
                    send(relay.address, "new", new, keep="old", silence_s=0.5)
                replica = send(server.address, "newer", new, keep="old")
            assert set(memory.replicas()) >= {kept, replica}


_WAITS = """
import sys
from ckpt.replication.connection import Connection
from ckpt.replication.replica import Address
address = Address(sys.argv[1], int(sys.argv[2]))
connection = Connection.to(address, 2.0)
connection.connect(address)
print("connected", flush=True)
try:
    connection.greet_holder(32 * "x")
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_a_peer_is_not_given_up_because_this_process_was_suspended() -> None:
    """The peer may have been suspended with it, and goes on a little later."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(30)
        command = [sys.executable, "-c", _WAITS, HOST, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
            try:
                assert waiting.stdout is not None
                assert waiting.stdout.readline() == "connected\n"
                time.sleep(0.2)
                waiting.send_signal(signal.SIGSTOP)
                time.sleep(3.0)
                waiting.send_signal(signal.SIGCONT)
                time.sleep(0.3)
                with listener.accept()[0] as holder:
                    holder.sendall(b"?" * 1000)
                    assert waiting.stdout.readline() == "GreetingError\n"  # not TimeoutError: it was heard
            finally:
                waiting.kill()


def test_a_flipped_byte_is_found_when_a_share_is_read() -> None:
    data = content("1", SIZE)
    with serving() as (_, server):
        replica = send(server.address, "1", data)
        with Relay(server.address, Harm("flip", False, 200 + BLOCK_BYTES)) as relay:
            with pytest.raises(TransportError, match="a checksum is wrong"):
                read(relay.address, replica)
            assert read(relay.address, replica) == data


def test_a_holder_that_ends_while_a_share_is_read() -> None:
    data = content("1", SIZE)
    with serving() as (_, server):
        replica = send(server.address, "1", data)
        with Relay(server.address, Harm("cut", False, 200 + BLOCK_BYTES)) as relay, pytest.raises(TransportError):
            read(relay.address, replica)


def test_nothing_listens() -> None:
    with serving() as (_, server):
        address = server.address
    with pytest.raises(TransportError, match="refused"):
        send(address, "1", b"x")


def test_a_holder_without_room_refuses_and_keeps_what_it_has() -> None:
    data = content("1", SIZE)
    with serving(limit_bytes=2 * SIZE + (256 << 10)) as (memory, server):
        first = send(server.address, "1", data, rank=0)
        second = send(server.address, "1", data, rank=1)
        with pytest.raises(TransportError, match="no room for"):
            send(server.address, "2", data, keep="1")
        assert memory.replicas() == [first, second]


_WITHOUT_MEMORY = """
import resource, sys
from ckpt.replication.held_replicas import ReplicaMemory
from ckpt.replication.tcp import TcpTransport
memory = ReplicaMemory(1 << 40)
server = TcpTransport(sys.argv[1], sys.argv[2]).serve(memory)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(server.address.port, flush=True)
sys.stdin.read()
print(memory.allocated_bytes, flush=True)
server.close()
memory.close()
"""


def test_a_holder_that_the_kernel_gives_no_memory_refuses() -> None:
    command = [sys.executable, "-c", _WITHOUT_MEMORY, HOST, SECRET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        address = Address(HOST, int(holder.stdout.readline()))
        with pytest.raises(TransportError, match=r"no memory for \d+ bytes"):
            send(address, "1", bytes(2 << 20))
        replica = send(address, "1", content("1", SIZE))  # it goes on
        assert read(address, replica) == content("1", SIZE)
        holder.stdin.close()
        assert SIZE < int(holder.stdout.readline()) < SIZE + (128 << 10)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_bytes_that_change_while_they_are_sent_are_never_acknowledged() -> None:
    """What has left is what was checked; what has not, if it changes, is found by its checksum."""
    data = content("1", SIZE)
    with serving() as (memory, server), staged(data) as region:

        def change(number: int) -> None:
            if number == 1:
                region.buffer[:4] = bytes(4)  # of the block before this

        replica = Replica("1", 0, SIZE, SIZE)
        transport = TcpTransport(HOST, SECRET)
        pieces = [Piece(region, 0, SIZE)]
        with contextlib.suppress(TransportError):
            transport.store(server.address, replica, pieces, keep=None, limiter=_Interleaved(change))
        assert all(bytes_held(memory, held) == data for held in memory.replicas())


def test_closing_a_holder_ends_all_connections(leak_check: LeakCheck) -> None:
    with serving() as (_, server):
        remote = TcpTransport(HOST, SECRET).open(server.address)
        sock = socket.create_connection(_pair(server.address))
        server.close()
        with pytest.raises(TransportError):
            remote.read_into(Replica("1", 0, SIZE, SIZE), 0, memoryview(bytearray(1)))
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):
                pass
        sock.close()
        remote.close()


def test_stop_ends_a_transfer_that_waits_for_its_peer(leak_check: LeakCheck) -> None:
    with serving() as (_, server), Relay(server.address, Harm("hold", True, 100)) as relay:
        limiter = Limiter(None)
        data = content("1", 8 * BLOCK_BYTES)
        failed: list[str] = []

        def store() -> None:
            with staged(data) as region:
                replica = Replica("1", 0, len(data), len(data))
                try:
                    TcpTransport(HOST, SECRET, 300.0).store(
                        relay.address, replica, [Piece(region, 0, len(data))], keep=None, limiter=limiter
                    )
                except TransportError as error:
                    failed.append(str(error))

        thread = threading.Thread(target=store)
        thread.start()
        while relay.passed[True] < 1 and thread.is_alive():
            select.select([], [], [], 0.01)
        limiter.stop()
        thread.join()
        assert failed


class _Interleaved(Limiter):
    """Calls a function with the number of each block before it is sent."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__(None)
        self._before = before
        self._number = 0

    def wait(self, nbytes: int) -> bool:
        self._before(self._number)
        self._number += 1
        return super().wait(nbytes)


def _pair(address: Address) -> tuple[str, int]:
    return address.host, address.port


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
