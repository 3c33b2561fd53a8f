"""Shares that are read on other nodes: connections that end between two reads, and more readers than connections."""

import os
import signal
from contextlib import ExitStack, closing

import pytest

from ckpt.keeper.trainer_side import Keeper
from ckpt.replication import tcp_server
from ckpt.replication.replica import Address, Replica
from ckpt.replication.replica_process import ReplicaWorker
from ckpt.replication.tcp import RemoteHolder, TcpTransport
from ckpt.saving.remote_share import RemoteShare
from ckpt.storage.regular_files import DamagedFileError
from inprocess.ipc.deadline import Deadline
from tests.ckpt.replication.support import HOST, SECRET, content, send, serving
from tests.inprocess.coordination.helpers import eventually
from tests.support import LeakCheck

_SIZE = 100_000
_DATA = content("share", _SIZE)


def _share(holder: Address, replica: Replica) -> RemoteShare:
    return RemoteShare(TcpTransport(HOST, SECRET, 10.0), holder, replica)


def test_a_connection_that_the_holder_has_closed_is_made_again(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    monkeypatch.setattr(tcp_server, "_IDLE_S", 0.05)
    with serving() as (_, server):
        replica = send(server.address, "1", _DATA)
        with closing(_share(server.address, replica)) as share:
            assert share.read(10, 1000) == _DATA[10:1010]
            eventually(lambda: server.connection_count == (0, 0))
            assert share.read(0, _SIZE) == _DATA


def test_more_readers_than_a_holder_has_connections(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    """Each reader keeps its connection; the holder ends the one that was not used for longest."""
    monkeypatch.setattr(tcp_server, "_MOST_PEERS", 2)
    with serving() as (_, server), ExitStack() as closes:
        replica = send(server.address, "1", _DATA)
        shares = [closes.enter_context(closing(_share(server.address, replica))) for _ in range(5)]
        for _ in range(2):
            for share in shares:
                assert share.read(10, 1000) == _DATA[10:1010]


def test_what_cannot_be_read_is_damaged(leak_check: LeakCheck) -> None:
    with serving() as (_, server):
        replica = send(server.address, "1", _DATA)
        share = _share(server.address, replica)
        assert share.read(0, 10) == _DATA[:10]
    with pytest.raises(DamagedFileError, match="cannot be read: the holder of replicas at"):
        share.read(0, 10)
    share.close()


class _Counting(TcpTransport):
    """Counts the connections that were tried."""

    opened = 0

    def open(self, holder: Address) -> RemoteHolder:
        self.opened += 1
        return super().open(holder)


def test_a_holder_that_does_not_answer_is_waited_for_once(leak_check: LeakCheck) -> None:
    """By all shares of a restore together."""
    keeper = Keeper()
    with ExitStack() as stack:
        stack.callback(keeper.close, Deadline(20.0))
        worker = stack.enter_context(closing(ReplicaWorker(keeper, 0.0)))
        address = worker.admit(HOST, SECRET, None, 1 << 30)
        eventually(lambda: worker.pid is not None)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        transport, failed = _Counting(HOST, SECRET, 0.3), dict[Address, str]()
        shares = [RemoteShare(transport, address, Replica("1", rank, _SIZE, _SIZE), failed) for rank in range(3)]
        for share in shares:
            for _ in range(2):
                with pytest.raises(DamagedFileError, match="silent for too long"):
                    share.read(0, 10)
        os.kill(worker.pid, signal.SIGCONT)
    assert transport.opened == 1
