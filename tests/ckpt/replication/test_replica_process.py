"""Replica processes, as trainers use them: what they send, hold and lend, and how they end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ckpt.keeper.trainer_side import Keeper
from ckpt.replication import replica_process
from ckpt.replication.replica import Address, Admit, List, Replica, TransportError
from ckpt.replication.replica_process import ReplicaWorker
from ckpt.replication.tcp import Sent
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.replication.support import HOST, SECRET, Harm, Relay, content, read, staged
from tests.inprocess.coordination.helpers import eventually
from tests.support import LeakCheck

SIZE = 1_000_000
SLOT = SIZE - 1000
ADMIT = (HOST, SECRET, None, 1 << 30)


@contextlib.contextmanager
def workers(number: int, linger_s: float = 0.0) -> Iterator[list[tuple[ReplicaWorker, Address]]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(worker(stack.enter_context(keeper()), linger_s)) for _ in range(number)]
        yield [(each, each.admit(*ADMIT)) for each in made]


@contextlib.contextmanager
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    try:
        yield made
    finally:
        made.close(Deadline(20.0))


@contextlib.contextmanager
def worker(keeper: Keeper, linger_s: float = 0.0) -> Iterator[ReplicaWorker]:
    with contextlib.closing(ReplicaWorker(keeper, linger_s)) as made:
        yield made


def pid_of(worker: ReplicaWorker) -> int:
    eventually(lambda: worker.pid is not None)
    assert worker.pid is not None
    return worker.pid


def ends_of(worker: ReplicaWorker) -> Sent:
    ended: list[Sent] = []
    eventually(lambda: bool(ended.extend(worker.poll()) or ended))
    (end,) = ended
    return end


def send(worker: ReplicaWorker, holder: Address, snapshot: str, keep: str | None = None) -> Replica:
    replica = Replica(snapshot, 0, SLOT, SIZE)
    with staged(content(snapshot, SIZE)) as slot:
        worker.send(replica, slot.fd, holder, keep)
        assert ends_of(worker).error == ""
    return replica


def test_a_slot_is_sent_and_its_holder_has_it_in_memory(leak_check: LeakCheck) -> None:
    with workers(2) as ((sender, _), (holder, address)):
        for number in range(3):
            send(sender, address, str(number), str(number - 1))
        held = holder.held()
        assert [replica.snapshot for replica, _ in held] == ["1", "2"]
        for replica, region in held:
            data = content(replica.snapshot, SIZE)
            assert region.size == SLOT
            assert bytes(region.buffer) == data[:SLOT]
            assert os.pread(region.fd, SIZE - SLOT, SLOT) == data[SLOT:]
            region.close()
        holder.retain(["2"])
        (replica, region) = holder.held()[0]
        assert replica.snapshot == "2"
        region.close()


def test_training_goes_first(leak_check: LeakCheck) -> None:
    with workers(1) as ((worker, _),):
        assert psutil.Process(pid_of(worker)).nice() > psutil.Process().nice()


def test_nothing_grows(leak_check: LeakCheck) -> None:
    with workers(2) as ((sender, _), (holder, address)):
        both = [psutil.Process(pid_of(worker)) for worker in (sender, holder)]
        for number in range(60):
            send(sender, address, str(number), str(number - 1))
            for _, region in holder.held():
                region.close()
            if number == 20:
                eventually(lambda: both[1].num_threads() == 3)
                before = [(each.num_fds(), each.num_threads()) for each in both]
        eventually(lambda: [(each.num_fds(), each.num_threads()) for each in both] == before)


def test_a_slot_is_lent_and_read_from_another_node(leak_check: LeakCheck) -> None:
    with workers(1) as ((worker, address),):
        own = Replica("7", 4, SLOT, SIZE)
        with staged(content("7", SIZE)) as slot:
            worker.lend([(own, slot.fd)])
            worker.lend([(own, slot.fd)])  # once more changes nothing
            assert read(address, own) == content("7", SIZE)
            assert worker.held() == []
            worker.retain([])
            assert worker.held() == []  # it is done by now
            with pytest.raises(TransportError, match="does not have"):
                read(address, own)


def test_another_secret_takes_the_place_of_the_first(leak_check: LeakCheck) -> None:
    with workers(2) as ((sender, _), (holder, address)):
        replica = send(sender, address, "1")
        secret = "the secret of the job after a restart, with another rank 0"
        renewed = holder.admit(HOST, secret, None, 1 << 30)
        with pytest.raises(TransportError):
            read(renewed, replica)
        ((found, region),) = holder.held()
        assert found == replica
        region.close()


def test_an_answer_that_was_not_awaited_is_no_answer_to_a_later_request(leak_check: LeakCheck) -> None:
    with workers(2) as ((sender, _), (holder, address)):
        send(sender, address, "1")
        holder._channel.send(List(0))  # as if an exception of another thread had interrupted `held`
        send(sender, address, "2")
        assert [replica.snapshot for replica, _ in _closed(holder.held())] == ["2"]
        holder._channel.send(List(0))
        holder.admit(*ADMIT)
        assert [replica.snapshot for replica, _ in _closed(holder.held())] == ["2"]


def _closed(held: list[tuple[Replica, SharedMemory]]) -> list[tuple[Replica, SharedMemory]]:
    for _, region in held:
        region.close()
    return held


def test_a_transfer_to_a_holder_that_is_killed_fails_and_is_reported(leak_check: LeakCheck) -> None:
    with workers(2) as ((sender, _), (holder, address)):
        send(sender, address, "1")
        os.kill(pid_of(holder), signal.SIGKILL)
        eventually(lambda: holder.poll() == [] and not holder.alive)
        with staged(content("2", SIZE)) as slot:
            sender.send(Replica("2", 0, SLOT, SIZE), slot.fd, address, "1")
            assert "refused" in ends_of(sender).error
        with pytest.raises(TransportError, match="has ended"):
            holder.held()


def test_a_process_that_does_not_answer_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    monkeypatch.setattr(replica_process, "_ANSWER_S", 0.3)
    with workers(2) as ((sender, _), (holder, address)), staged(content("2", SIZE)) as slot:
        send(sender, address, "1")
        os.kill(pid_of(holder), signal.SIGSTOP)
        with pytest.raises(TransportError, match=rf"pid {pid_of(holder)}\) did not answer in 0.3 s"):
            holder.held()
        with monkeypatch.context() as patch:
            patch.delattr(replica_process, "select")  # nothing waits
            with pytest.raises(TransportError, match="did not answer"):
                holder.held()
            with pytest.raises(TransportError, match="did not answer"):
                holder.lend([(Replica("2", number, SLOT, SIZE), slot.fd) for number in range(3)])
        os.kill(pid_of(holder), signal.SIGCONT)
        found: list[str] = []

        def answers() -> bool:
            with contextlib.suppress(TransportError):
                found.extend(replica.snapshot for replica, _ in _closed(holder.held()))
            return bool(found)

        eventually(answers)
        assert found == ["1"]


def test_what_is_in_flight_is_given_up(leak_check: LeakCheck) -> None:
    with workers(2) as ((holder, address), (sender, _)):
        sender.admit(HOST, SECRET, 64 << 10, 1 << 30)
        with staged(content("1", SIZE)) as slot:  # takes 12 s with this bandwidth
            sender.send(Replica("1", 0, SLOT, SIZE), slot.fd, address, None)
            sender.abort()
            assert "given up" in ends_of(sender).error
        assert holder.held() == []


def test_an_address_of_another_node_cannot_be_used(leak_check: LeakCheck) -> None:
    with keeper() as its_keeper:
        worker = ReplicaWorker(its_keeper, 0.0)
        with pytest.raises(TransportError, match=r"cannot be received at 192\.0\.2\.1"):
            worker.admit("192.0.2.1", SECRET, None, 1 << 30)
        worker.admit(*ADMIT)
        worker.close()
        worker.close()


_TRAINER = """
import ctypes, os, sys
from ckpt.keeper.trainer_side import Keeper
from ckpt.replication.replica_process import ReplicaWorker
keeper = Keeper()
worker = ReplicaWorker(keeper, float(sys.argv[3]))
address = worker.admit(sys.argv[1], sys.argv[2], None, 1 << 30)
while worker.pid is None:
    pass
forked = 0
if "fork" in sys.argv and (forked := ctypes.CDLL(None).fork()) == 0:  # as a library does, unseen by Python
    ctypes.CDLL(None).pause()
if "kill" in sys.argv:
    os.kill(keeper.pid, 9)
print(worker.pid, address.port, forked, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("linger_s", [0.0, 600.0])
def test_a_replica_process_outlives_its_trainer_for_a_while(linger_s: float, leak_check: LeakCheck) -> None:
    command = [sys.executable, "-c", _TRAINER, HOST, SECRET, str(linger_s)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer,
        workers(1) as ((sender, _),),
    ):
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        pid, port, _ = map(int, trainer.stdout.readline().split())
        process = psutil.Process(pid)
        replica = send(sender, Address(HOST, port), "1")
        trainer.stdin.close()
        trainer.wait()
        assert trainer.stdout.read() == ""  # no process that is left has it
        if linger_s:
            assert process.cwd() == "/"
            assert read(Address(HOST, port), replica) == content("1", SIZE)
            process.kill()
        eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("keeper_is_killed", [False, True])
def test_a_forked_child_of_its_trainer_does_not_keep_it(keeper_is_killed: bool, leak_check: LeakCheck) -> None:
    """A child has the channel and may live longer than the trainer."""
    command = [sys.executable, "-c", _TRAINER, HOST, SECRET, "0", "fork", *(["kill"] if keeper_is_killed else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        pid, _, forked = map(int, trainer.stdout.readline().split())
        process = psutil.Process(pid)
        try:
            trainer.stdin.close()
            trainer.wait()
            eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_trainer_that_fails_leaves_its_replica_process_to_others(leak_check: LeakCheck) -> None:
    with workers(1) as ((sender, _),), keeper() as its_keeper:
        holder = ReplicaWorker(its_keeper, 0.0)
        process = psutil.Process(pid_of(holder))
        send(sender, holder.admit(*ADMIT), "1")
        holder.leave()
        eventually(lambda: not process.is_running())  # and no zombie


def test_names_and_secrets_are_not_visible(leak_check: LeakCheck) -> None:
    assert SECRET not in repr(Admit(1, *ADMIT, 0.0))
    with workers(1) as ((worker, _),):
        process = psutil.Process(pid_of(worker))
        assert all(SECRET not in text for text in (*process.cmdline(), *process.environ().values()))
        assert process.name() == "ckpt-replicas"


# -- the process dies --------------------------------------------------------------------------------------------------


def _killed(worker: ReplicaWorker) -> None:
    """Kill the process, and wait until its trainer has noticed."""
    os.kill(pid_of(worker), signal.SIGKILL)
    eventually(lambda: worker.poll() == [] and not worker.alive)
    worker.leave()


def _contents(worker: ReplicaWorker) -> dict[str, bytes]:
    found = {}
    for replica, region in worker.held():
        found[replica.snapshot] = bytes(region.buffer) + region.read_behind(0, SIZE - SLOT)
        region.close()
    return found


def _regions_of(keeper: Keeper) -> list[str]:
    """The replicas of which the keeper has the memory."""
    found = []
    for fd in os.listdir(f"/proc/{keeper.pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{keeper.pid}/fd/{fd}"))
    return [target for target in found if target.startswith("/memfd:ckpt-replica")]


def test_the_next_process_has_what_one_that_was_killed_held(leak_check: LeakCheck) -> None:
    with workers(1) as ((sender, _),), keeper() as its_keeper:
        for turn in range(3):
            names = [f"{turn} {number}" for number in range(4)]
            with worker(its_keeper) as holder:
                address = holder.admit(*ADMIT)
                for before, name in zip([None, *names], names, strict=False):
                    send(sender, address, name, before)
                holder.retain([names[-1]] if turn == 1 else names)
                left = {name: content(name, SIZE) for name in names[3 if turn == 1 else 2 :]}
                assert _contents(holder) == left
                _killed(holder)
            with worker(its_keeper) as holder:
                address = holder.admit(*ADMIT)
                assert _contents(holder) == left
                for name, data in left.items():
                    assert read(address, Replica(name, 0, SLOT, SIZE)) == data
                assert len(_regions_of(its_keeper)) == 2  # it is used again
                _killed(holder)


def test_what_was_arriving_when_the_process_was_killed_is_no_replica(leak_check: LeakCheck) -> None:
    """Its memory was of a replica before; the snapshot to keep is still there."""
    with workers(1) as ((sender, _),), keeper() as its_keeper:
        holder = ReplicaWorker(its_keeper, 0.0)
        address = holder.admit(*ADMIT)
        for before, name in ((None, "1"), ("1", "2"), ("2", "3")):
            send(sender, address, name, before)
        with Relay(address, Harm("hold", True, SIZE // 2)) as relay, staged(content("4", SIZE)) as slot:
            sender.send(Replica("4", 0, SLOT, SIZE), slot.fd, relay.address, "3")
            eventually(lambda: relay.passed[True] >= SIZE // 4)
            _killed(holder)
        assert ends_of(sender).error
        with worker(its_keeper) as holder:
            address = holder.admit(*ADMIT)
            assert _contents(holder) == {"3": content("3", SIZE)}
            send(sender, address, "4", "3")
            assert _contents(holder) == {name: content(name, SIZE) for name in ("3", "4")}
            assert len(_regions_of(its_keeper)) == 2


def test_memory_ends_with_a_process_that_leaves_and_with_the_trainer(leak_check: LeakCheck) -> None:
    with workers(1) as ((sender, _),), keeper() as its_keeper:
        with worker(its_keeper) as holder:
            send(sender, holder.admit(*ADMIT), "1")
            eventually(lambda: len(_regions_of(its_keeper)) == 1)
        eventually(lambda: _regions_of(its_keeper) == [])
        with worker(its_keeper) as holder:
            address = holder.admit(*ADMIT)
            assert holder.held() == []
            send(sender, address, "2")
            _killed(holder)


def test_a_process_that_its_trainer_forgot_takes_nothing_with_it(leak_check: LeakCheck) -> None:
    """As when an exception that was thrown into the trainer interrupts the start of the next process."""
    with workers(1) as ((sender, _),), keeper() as its_keeper:
        with worker(its_keeper) as holder:
            send(sender, holder.admit(*ADMIT), "1")
            _killed(holder)
        forgotten = psutil.Process(pid_of(ReplicaWorker(its_keeper, 0.0)))
        eventually(lambda: not forgotten.is_running())
        with worker(its_keeper) as holder:
            holder.admit(*ADMIT)
            assert _contents(holder) == {"1": content("1", SIZE)}


def test_a_process_goes_on_when_its_keeper_is_killed(leak_check: LeakCheck) -> None:
    """Only if it dies then, too, what it held is lost; the next one begins with nothing."""
    with workers(1) as ((sender, _),), keeper() as its_keeper:
        holder = ReplicaWorker(its_keeper, 0.0)
        address = holder.admit(*ADMIT)
        send(sender, address, "1")
        assert pid_of(holder)
        assert its_keeper.pid is not None
        os.kill(its_keeper.pid, signal.SIGKILL)
        eventually(lambda: its_keeper.pump() or its_keeper.control is None)
        send(sender, address, "2", "1")
        assert _contents(holder) == {name: content(name, SIZE) for name in ("1", "2")}
        _killed(holder)
        with worker(its_keeper) as holder:
            holder.admit(*ADMIT)
            assert holder.held() == []
