"""One transfer after the other; the newest wins."""

import queue
import threading
from collections.abc import Iterator

import pytest

from ckpt.replication.connection import BLOCK_BYTES, MIN_BANDWIDTH
from ckpt.replication.replica import Address, Piece, Replica
from ckpt.replication.tcp import Sender, Sent, TcpTransport, Transfer
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.replication.support import HOST, SECRET, Harm, Relay, bytes_held, content, serving, staged
from tests.support import LeakCheck

SIZE = 2 * BLOCK_BYTES


@pytest.fixture
def slot() -> Iterator[SharedMemory]:
    with staged(content("slot", SIZE)) as region:
        yield region


def transfer(slot: SharedMemory, snapshot: str, holder: Address, keep: str | None = None) -> Transfer:
    return Transfer(Replica(snapshot, 0, SIZE, SIZE), (Piece(slot, 0, SIZE),), holder, keep)


def test_shares_are_sent_and_reported(slot: SharedMemory, leak_check: LeakCheck) -> None:
    ended: queue.Queue[Sent] = queue.Queue()
    with serving() as (memory, server):
        sender = Sender(TcpTransport(HOST, SECRET), None, ended.put)
        for number in range(3):
            sender.submit(transfer(slot, str(number), server.address, str(number - 1)))
            assert ended.get(timeout=30) == Sent(Replica(str(number), 0, SIZE, SIZE), "")
        assert [replica.snapshot for replica in memory.replicas()] == ["1", "2"]
        assert bytes_held(memory, memory.replicas()[1]) == content("slot", SIZE)
        sender.close()
        sender.close()


def test_the_newest_that_waits_is_sent_and_the_others_are_reported(slot: SharedMemory) -> None:
    ended: queue.Queue[Sent] = queue.Queue()
    with serving() as (_, server):
        transport = _Gated()
        sender = Sender(transport, None, ended.put)
        sender.submit(transfer(slot, "1", server.address))
        assert transport.reached.wait(30)
        for snapshot in ("2", "3", "4"):
            sender.submit(transfer(slot, snapshot, server.address))
        transport.gate.set()
        outcomes = {sent.replica.snapshot: sent.error for sent in (ended.get(timeout=30) for _ in range(4))}
        assert outcomes["1"] == ""
        assert outcomes["4"] == ""
        assert "superseded" in str(outcomes["2"])
        assert "superseded" in str(outcomes["3"])
        assert transport.most_at_once == 1
        sender.close()


def test_a_failure_is_reported_and_the_next_is_sent(slot: SharedMemory) -> None:
    ended: queue.Queue[Sent] = queue.Queue()
    with serving() as (_, server), Relay(server.address, Harm("cut", True, BLOCK_BYTES)) as relay:
        sender = Sender(TcpTransport(HOST, SECRET), None, ended.put)
        sender.submit(transfer(slot, "1", relay.address))
        assert str(relay.address) in str(ended.get(timeout=30).error)
        sender.submit(transfer(slot, "2", relay.address))
        assert ended.get(timeout=30) == Sent(Replica("2", 0, SIZE, SIZE), "")
        sender.close()


def test_close_gives_up_what_is_in_flight(slot: SharedMemory, leak_check: LeakCheck) -> None:
    ended: queue.Queue[Sent] = queue.Queue()
    with serving() as (memory, server):
        sender = Sender(TcpTransport(HOST, SECRET), MIN_BANDWIDTH, ended.put)
        sender.submit(transfer(slot, "1", server.address))
        sender.close()  # two blocks take seconds with this bandwidth
        assert memory.replicas() == []


class _Gated(TcpTransport):
    """Sends when `gate` is set."""

    def __init__(self) -> None:
        super().__init__(HOST, SECRET)
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.most_at_once = 0
        self._running = 0

    def store(self, *arguments: object, **options: object) -> None:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        self.reached.set()
        assert self.gate.wait(30)
        super().store(*arguments, **options)  # type: ignore[arg-type]
        self._running -= 1
