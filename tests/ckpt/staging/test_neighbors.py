"""Slots are passed to the neighbours on a node, and outlive who made them."""

import contextlib
import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt.staging import neighbors
from ckpt.staging.neighbors import SlotExchange
from inprocess.ipc.process import Process
from inprocess.ipc.shared_memory import SharedMemory
from tests.support import LeakCheck


class _Ranks:
    """Threads as ranks. `drop` ranks are in the collective and do nothing more."""

    def __init__(self, rank: int, world_size: int, board: dict[int, bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = world_size
        self._board = board
        self._barrier = barrier

    def __call__(self, payload: bytes) -> list[bytes]:
        self._board[self.rank] = payload
        self._barrier.wait(20)
        return [self._board[rank] for rank in range(self.world_size)]


def _exchange(world_size: int, act: Callable[[_Ranks], object]) -> list[object]:
    board: dict[int, bytes] = {}
    barrier = threading.Barrier(world_size)
    results: list[object] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = act(_Ranks(rank, world_size, board, barrier))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_sees_what_the_others_stage(world_size: int, leak_check: LeakCheck) -> None:
    own = [[SharedMemory.create(f"slot-{rank}-{i}", 4096 * (i + 1)) for i in range(2)] for rank in range(world_size)]
    results = _exchange(world_size, lambda ranks: SlotExchange(ranks).run(own[ranks.rank]))  # type: ignore[arg-type]
    for rank, taken in enumerate(results):
        assert isinstance(taken, dict), taken
        assert set(taken) == set(range(world_size)) - {rank}
        for other, regions in taken.items():
            assert [region.size for region in regions] == [4096, 8192]
            assert not any(os.get_inheritable(region.fd) for region in regions)
            own[other][1].buffer[rank] = 100 + rank
            assert regions[1].buffer[rank] == 100 + rank
    for regions in own:
        for region in regions:
            region.close()  # what others have of it stays
    for taken in results:
        assert isinstance(taken, dict)
        for regions in taken.values():
            assert regions[1].buffer[4] in (0, 104)
            for region in regions:
                region.close()


def _offer(address: str, process: Process) -> bytes:
    """Return the contribution of a rank to the collective."""
    return json.dumps([neighbors.node(), address, "a token", *dataclasses.astuple(process)]).encode()


def test_who_cannot_be_reached_is_left_out(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    regions = [SharedMemory.create("slot", 4096), SharedMemory.create("slot", 4096)]

    def act(ranks: _Ranks) -> object:
        if ranks.rank == 1:  # gone, directly behind the collective
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
                return ranks(ranks_offer)
        return SlotExchange(ranks).run([regions[0]])  # type: ignore[arg-type]

    monkeypatch.setattr(neighbors, "_TIMEOUT_S", 0.3)
    ranks_offer = _offer("an unused address", Process.here())
    first, _ = _exchange(2, act)
    assert first == {}
    for region in regions:
        region.close()


_NEIGHBOUR = """
import dataclasses, json, os, signal, socket, sys
from inprocess.ipc.process import Process
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(f"\\0ckpt-{sys.argv[1]}")
listener.listen(8)
if sys.argv[2] == "with a child":
    if os.fork() == 0:  # as a worker of a DataLoader: it has the socket, and outlives the neighbour
        sys.stdin.read()
        os._exit(0)
print(json.dumps(dataclasses.astuple(Process.here())), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("kind", ["alone", "with a child"])
def test_a_neighbour_that_was_killed_is_not_waited_for(
    kind: str, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    """Killed behind the collective: it neither gives its slots, nor takes these."""
    monkeypatch.setattr(neighbors, "_TIMEOUT_S", 600.0)
    address = uuid.uuid4().hex

    def act(ranks: _Ranks) -> object:
        if ranks.rank == 1:
            return ranks(_offer(address, process))
        exchange = SlotExchange(ranks)  # type: ignore[arg-type]
        victim.kill()
        victim.wait()
        with SharedMemory.create("slot", 4096) as region:
            return exchange.run([region])

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", _NEIGHBOUR, address, kind]
    with subprocess.Popen(command, text=True, **pipes) as victim:  # type: ignore[call-overload]
        process = Process(*json.loads(victim.stdout.readline()))
        taken, _ = _exchange(2, act)
        assert taken == {}


def test_a_neighbour_that_is_killed_while_it_is_waited_for_is_left(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    """A child of it has inherited the socket, so that the connection stays."""
    monkeypatch.setattr(neighbors, "_TIMEOUT_S", 600.0)
    address = uuid.uuid4().hex
    wait_for = SlotExchange._wait_for

    def kill_first(exchange: SlotExchange, *arguments: Any) -> None:
        killed.append(victim.pid)
        victim.kill()
        victim.wait()
        wait_for(exchange, *arguments)

    def act(ranks: _Ranks) -> object:
        if ranks.rank == 1:
            return ranks(_offer(address, process))
        with SharedMemory.create("slot", 4096) as region:
            return SlotExchange(ranks).run([region])  # type: ignore[arg-type]

    killed: list[int] = []
    monkeypatch.setattr(SlotExchange, "_wait_for", kill_first)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", _NEIGHBOUR, address, "with a child"]
    with subprocess.Popen(command, text=True, **pipes) as victim:  # type: ignore[call-overload]
        process = Process(*json.loads(victim.stdout.readline()))
        taken, _ = _exchange(2, act)
        assert (taken, killed) == ({}, [victim.pid])


def test_a_neighbour_that_is_stopped_is_waited_for_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    monkeypatch.setattr(neighbors, "_TIMEOUT_S", 0.5)
    address = uuid.uuid4().hex

    def act(ranks: _Ranks) -> object:
        if ranks.rank == 1:
            return ranks(_offer(address, process))
        with SharedMemory.create("slot", 4096) as region:
            return SlotExchange(ranks).run([region])  # type: ignore[arg-type]

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, address, "alone"], text=True, **pipes) as victim:  # type: ignore[call-overload]
        try:
            process = Process(*json.loads(victim.stdout.readline()))
            taken, _ = _exchange(2, act)
            assert taken == {}
            assert "rank 1 cannot be shared: it has not answered within 0.5 s" in caplog.text
        finally:
            victim.kill()


def test_a_neighbour_that_has_closed_is_left_out_without_a_warning(
    caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    """As at the end of a program, when a restore has just begun to share slots in the background."""
    closed = threading.Event()

    def act(ranks: _Ranks) -> object:
        exchange = SlotExchange(ranks)  # type: ignore[arg-type]
        if ranks.rank == 1:
            exchange.close()
            closed.set()
            return None
        assert closed.wait(20)
        with SharedMemory.create("slot", 4096) as region:
            threading.Timer(0.1, exchange.cancel).start()  # it does not wait for a neighbour to connect
            return exchange.run([region])

    assert _exchange(2, act) == [{}, None]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_rank_without_descriptors_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leak_check: LeakCheck
) -> None:
    """It takes part in the collective, in which the others wait for it."""
    own = [SharedMemory.create("slot", 4096) for _ in range(3)]
    listen = SlotExchange._listen

    def refused(exchange: SlotExchange) -> None:
        if exchange.rank == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        listen(exchange)

    monkeypatch.setattr(SlotExchange, "_listen", refused)
    first, second, third = _exchange(3, lambda ranks: SlotExchange(ranks).run([own[ranks.rank]]))  # type: ignore[arg-type]
    assert second == {}
    assert isinstance(first, dict)
    assert isinstance(third, dict)
    assert (set(first), set(third)) == ({2}, {0})
    assert "rank 1 is not shared with its neighbours: [Errno 24] Too many open files" in caplog.text
    for region in (*own, *first[2], *third[0]):
        region.close()


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    """Thrown in while the neighbours' slots are taken; the others do without."""
    own = [[SharedMemory.create("slot", 4096)] for _ in range(3)]
    take = SlotExchange._take

    def interrupted(exchange: SlotExchange, neighbour: Any) -> list[SharedMemory]:
        if threading.current_thread() is victim[0] and neighbour.rank == 2:
            raise KeyboardInterrupt
        return take(exchange, neighbour)

    victim: list[threading.Thread] = []

    def act(ranks: _Ranks) -> object:
        if ranks.rank == 0:
            victim.append(threading.current_thread())
        while not victim:
            pass
        return SlotExchange(ranks).run(own[ranks.rank])  # type: ignore[arg-type]

    monkeypatch.setattr(SlotExchange, "_take", interrupted)
    monkeypatch.setattr(neighbors, "_TIMEOUT_S", 1.0)
    first, *others = _exchange(3, act)
    assert isinstance(first, KeyboardInterrupt)
    for taken in others:
        assert isinstance(taken, dict)
        for regions in taken.values():
            for region in regions:
                region.close()
    for regions in own:
        regions[0].close()


def test_a_neighbour_that_never_gives_can_be_left(leak_check: LeakCheck) -> None:
    """As after a fault: rank 1 has met the others and hangs."""
    regions = [SharedMemory.create("slot", 4096) for _ in range(2)]
    hanging: list[SlotExchange] = []

    def act(ranks: _Ranks) -> object:
        exchange = SlotExchange(ranks)  # type: ignore[arg-type]
        if ranks.rank == 1:
            hanging.append(exchange)
            return None
        threading.Timer(0.2, exchange.cancel).start()
        begin = time.monotonic()
        assert exchange.run([regions[0]]) == {}
        return time.monotonic() - begin

    took, _ = _exchange(2, act)
    assert isinstance(took, float), took
    assert took < neighbors._TIMEOUT_S
    cancelled = hanging[0]
    cancelled.cancel()
    assert cancelled.run([regions[1]]) == {}
    for region in regions:
        region.close()


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_neighbour_that_leaves_is_not_waited_for(
    is_connected: bool, monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    """As after an error between the meeting and `run`; a child that it has forked since has its socket."""
    monkeypatch.setattr(neighbors, "_TIMEOUT_S", 60.0)
    wait_for = SlotExchange._wait_for
    connected, has_left = threading.Event(), threading.Event()

    def wait(exchange: SlotExchange, *arguments: Any) -> None:
        connected.set()
        wait_for(exchange, *arguments)

    def act(ranks: _Ranks) -> object:
        exchange = SlotExchange(ranks)  # type: ignore[arg-type]
        if ranks.rank == 0:
            assert is_connected or has_left.wait(20)
            return exchange.run([region])
        assert exchange._listener is not None
        with contextlib.closing(exchange._listener.dup()):  # as the child has it
            assert not is_connected or connected.wait(20)
            exchange.cancel()
            has_left.set()
            assert answered.wait(20)
        return exchange.run([region])

    answered = threading.Event()
    give = SlotExchange._give

    def note(exchange: SlotExchange, regions: list[SharedMemory]) -> None:
        give(exchange, regions)
        if exchange.rank == 0:
            answered.set()

    monkeypatch.setattr(SlotExchange, "_wait_for", wait)
    monkeypatch.setattr(SlotExchange, "_give", note)
    with SharedMemory.create("slot", 4096) as region:
        assert _exchange(2, act) == [{}, {}]


_STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
listening = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()]
connections = []
for name in sys.argv[1:]:
    assert f"@ckpt-{name}" in listening
    try:
        for _ in range(1000):
            connections.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connections[-1].setblocking(False)
            connections[-1].connect(f"\\0ckpt-{name}")
    except BlockingIOError:
        pass  # its queue is full
print(len(connections), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _another_user(names: list[str]) -> Iterator[None]:
    """Have a process of another user connect to these addresses as often as it can, and say nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _STRANGER, *names], text=True, cwd="/", **pipes) as stranger:  # type: ignore[call-overload]
        assert int(stranger.stdout.readline()) > 128 * len(names)
        yield
        stranger.stdin.close()
        assert stranger.wait(20) == 0


@contextlib.contextmanager
def _this_user(names: list[str]) -> Iterator[None]:
    """Connect as this user, and say nothing, or what no rank says."""
    with contextlib.ExitStack() as stack:
        for name in names:
            for said in (b"", b"x", b"y" * 32, b"z" * 100):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.connect(f"\0ckpt-{name}")
                if said:
                    connection.send(said)
        yield


@pytest.mark.parametrize("strangers", [_another_user, _this_user])
def test_strangers_take_no_neighbours_place(
    strangers: Callable[[list[str]], contextlib.AbstractContextManager[None]], leak_check: LeakCheck
) -> None:
    """They find the addresses in /proc/net/unix, and connect before the neighbours do."""
    own = [SharedMemory.create(f"slot-{rank}", 4096) for rank in range(3)]
    exchanges: dict[int, SlotExchange] = {}
    met, connected = threading.Barrier(4), threading.Event()

    def act(ranks: _Ranks) -> object:
        exchanges[ranks.rank] = SlotExchange(ranks)  # type: ignore[arg-type]
        met.wait(20)
        assert connected.wait(20)
        return exchanges[ranks.rank].run([own[ranks.rank]])

    def connect() -> None:
        met.wait(20)
        try:
            with strangers([exchange._name for exchange in exchanges.values()]):
                connected.set()
                ended.wait(40)
        finally:
            connected.set()

    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect)
        try:
            results = _exchange(3, act)
        finally:
            ended.set()
        connecting.result()
    for rank, taken in enumerate(results):
        assert isinstance(taken, dict), taken
        assert set(taken) == {0, 1, 2} - {rank}
        for regions in taken.values():
            regions[0].close()
    for region in own:
        region.close()
