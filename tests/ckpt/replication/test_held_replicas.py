"""What a holder keeps, in which memory."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.keeper.kept_memory import LeftMemory, WorkerMemory
from ckpt.keeper.messages import Regions
from ckpt.replication.held_replicas import Arrival, ReplicaMemory, usable_bytes
from ckpt.replication.replica import Replica, TransportError
from inprocess.ipc.shared_memory import SharedMemory
from tests.ckpt.replication.support import UNLIMITED, bytes_held, content
from tests.support import LeakCheck

SIZE = 100_000
ROOM = 3 * (64 << 10)  # for a replica of this size


def arrive(memory: ReplicaMemory, replica: Replica, keep: str | None = None) -> None:
    arrival = memory.begin(replica, keep)
    arrival.memory[:] = content(replica, replica.nbytes)
    memory.complete(arrival)


def begun(memory: ReplicaMemory, replica: Replica, keep: str | None = None) -> Arrival:
    arrival = memory.begin(replica, keep)
    arrival.memory[:] = bytes(replica.nbytes)
    return arrival


def test_two_snapshots_of_each_owner_in_memory_that_is_used_again(leak_check: LeakCheck) -> None:
    memory = ReplicaMemory(UNLIMITED)
    for number in range(20):
        for rank in range(3):
            arrive(memory, Replica(str(number), rank, SIZE, SIZE), keep=str(number - 1))
    found = memory.replicas()
    assert {(replica.snapshot, replica.rank) for replica in found} == {(s, r) for s in ("18", "19") for r in range(3)}
    assert all(bytes_held(memory, replica) == content(replica, SIZE) for replica in found)
    assert memory.allocated_bytes == 2 * 3 * ROOM
    memory.close()


def test_what_arrives_cannot_be_read_before_it_is_complete() -> None:
    memory = ReplicaMemory(UNLIMITED)
    replica = Replica("1", 0, SIZE, SIZE)
    arrival = begun(memory, replica)
    assert memory.replicas() == []
    with pytest.raises(TransportError, match="does not have"), memory.reading(replica):
        pass
    memory.discard(arrival)
    assert memory.replicas() == []
    assert memory.allocated_bytes == ROOM  # to be used again
    arrive(memory, replica)
    assert memory.allocated_bytes == ROOM
    memory.close()


def test_the_snapshot_to_keep_stays_until_another_is_named() -> None:
    memory = ReplicaMemory(UNLIMITED)
    arrive(memory, Replica("1", 0, SIZE, SIZE))
    for failed in ("2", "3", "4"):  # complete here, but not on all ranks
        arrive(memory, Replica(failed, 0, SIZE, SIZE), keep="1")
    assert [replica.snapshot for replica in memory.replicas()] == ["1", "4"]
    memory.close()


def test_a_newer_transfer_supersedes_one_that_is_arriving() -> None:
    memory = ReplicaMemory(UNLIMITED)
    slow = begun(memory, Replica("1", 0, SIZE, SIZE))
    arrive(memory, Replica("2", 1, SIZE, SIZE), keep=None)
    with pytest.raises(TransportError, match="superseded"):
        memory.complete(slow)
    assert [replica.snapshot for replica in memory.replicas()] == ["2"]
    again = begun(memory, Replica("2", 0, SIZE, SIZE))
    once_more = begun(memory, Replica("2", 0, SIZE, SIZE))
    with pytest.raises(TransportError, match="superseded"):
        memory.complete(again)
    memory.complete(once_more)
    assert len(memory.replicas()) == 2
    memory.close()


def test_memory_that_is_read_is_not_written() -> None:
    memory = ReplicaMemory(UNLIMITED)
    old = Replica("1", 0, SIZE, SIZE)
    arrive(memory, old)
    with memory.reading(old) as region:
        for number in range(2, 6):
            arrive(memory, Replica(str(number), 0, SIZE, SIZE))
        assert bytes(region.buffer[:SIZE]) == content(old, SIZE)
    assert old not in memory.replicas()
    assert memory.allocated_bytes <= 3 * ROOM
    memory.close()


def test_a_restart_drops_what_is_not_agreed_on() -> None:
    memory = ReplicaMemory(UNLIMITED)
    arrive(memory, Replica("1", 0, SIZE, SIZE))
    arrive(memory, Replica("2", 0, SIZE, SIZE), keep="1")
    arriving = begun(memory, Replica("2", 1, SIZE, SIZE), keep="1")
    memory.retain(["1"])
    assert [replica.snapshot for replica in memory.replicas()] == ["1"]
    with pytest.raises(TransportError, match="superseded"):
        memory.complete(arriving)
    memory.close()


def test_the_limit_counts_all_memory_and_free_memory_makes_room() -> None:
    memory = ReplicaMemory(3 * ROOM)
    arrive(memory, Replica("1", 0, SIZE, SIZE))
    arrive(memory, Replica("1", 1, SIZE, SIZE))
    with pytest.raises(TransportError, match="no room for"):
        memory.begin(Replica("1", 2, 2 * SIZE, 2 * SIZE), None)
    with pytest.raises(TransportError, match="no room"):  # what is kept is not given up for it
        memory.begin(Replica("2", 0, 2 * SIZE, 2 * SIZE), "1")
    arrive(memory, Replica("3", 0, 4 * SIZE, 4 * SIZE))  # nothing else is kept: memory of other sizes is given back
    assert memory.allocated_bytes <= 3 * ROOM
    memory.close()
    with pytest.raises(TransportError, match="closing"):
        memory.begin(Replica("4", 0, 1, 1), None)


def test_documents_that_grow_fit_the_memory_of_their_predecessor() -> None:
    memory = ReplicaMemory(UNLIMITED)
    for number in range(100):
        arrive(memory, Replica(str(number), 0, SIZE, SIZE + 10 * number), keep=str(number - 1))
    assert memory.allocated_bytes == 2 * ROOM
    memory.close()


def test_what_is_lent_is_read_by_others_until_it_is_taken_back(leak_check: LeakCheck) -> None:
    memory = ReplicaMemory(UNLIMITED)
    own = Replica("1", 3, SIZE, SIZE)
    region = SharedMemory.create("slot", SIZE)
    region.buffer[:] = content(own, SIZE)
    memory.lend(own, region)
    assert memory.replicas() == []
    assert memory.allocated_bytes == 0
    assert bytes_held(memory, own) == content(own, SIZE)
    with pytest.raises(TransportError, match="already"):
        memory.lend(own, region)
    with memory.reading(own) as lent:
        memory.retain([own.snapshot])
        assert bytes(lent.buffer[:SIZE]) == content(own, SIZE)
    assert region.closed
    with pytest.raises(TransportError, match="does not have"), memory.reading(own):
        pass
    memory.close()


@pytest.mark.parametrize(("name", "rank", "nbytes"), [("", 0, 1), ("1", -1, 1), ("1", 0, 0), ("x" * 300, 0, 1)])
def test_what_is_no_replica_is_refused(name: str, rank: int, nbytes: int) -> None:
    memory = ReplicaMemory(UNLIMITED)
    with pytest.raises(TransportError, match="not a replica"):
        memory.begin(Replica(name, rank, nbytes, nbytes), None)
    memory.close()


# -- the process dies --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(left: LeftMemory) -> Iterator[ReplicaMemory]:
    """What a process has that the keeper forks now, with descriptors of its own. At the end it is killed."""
    link = left.begin()
    copies = Regions()
    for key, region in left._regions.items():
        copies[key] = SharedMemory(os.dup(region.fd), region.size, region.name, key)
    kept = WorkerMemory(link, copies)
    memory = ReplicaMemory(UNLIMITED, kept)
    yield memory
    memory.close()
    kept._channel.close()


def held(memory: ReplicaMemory) -> set[tuple[str, int]]:
    found = memory.replicas()
    assert all(bytes_held(memory, replica) == content(replica, replica.nbytes) for replica in found)
    return {(replica.snapshot, replica.rank) for replica in found}


def test_the_next_process_holds_what_is_complete(leak_check: LeakCheck) -> None:
    left = LeftMemory()
    with process(left) as memory:
        for name, keep in (("1", None), ("2", "1")):
            arrive(memory, Replica(name, 0, SIZE - 1, SIZE), keep)
        arriving = begun(memory, Replica("2", 1, SIZE, SIZE), "1")
    with process(left) as memory:
        assert held(memory) == {("1", 0), ("2", 0)}
        assert memory.allocated_bytes == 3 * ROOM
        arrive(memory, Replica("2", 1, SIZE, SIZE), "1")
        assert memory.allocated_bytes == 3 * ROOM  # it is used again
        arrive(memory, Replica("4", 0, 6 * SIZE, 6 * SIZE), "2")
    with process(left) as memory:
        assert held(memory) == {("2", 0), ("2", 1), ("4", 0)}
    arriving.memory.release()
    left.forget()


def test_the_next_process_does_not_hold_what_was_dropped(leak_check: LeakCheck) -> None:
    """Also if the memory was read at that time, or was about to be written."""
    left = LeftMemory()
    with process(left) as memory:
        for name, keep in (("1", None), ("2", "1")):
            arrive(memory, Replica(name, 0, SIZE, SIZE), keep)
        with memory.reading(Replica("1", 0, SIZE, SIZE)):
            memory.retain(["2"])
            with process(left) as other:
                assert held(other) == {("2", 0)}
    with process(left) as memory:
        arriving = memory.begin(Replica("3", 0, SIZE, SIZE), None)  # as is 2 now
        arriving.memory.release()
    with process(left) as memory:
        assert held(memory) == set()
        assert memory.allocated_bytes == 2 * ROOM
    left.forget()


def test_memory_that_is_given_back_is_not_kept(leak_check: LeakCheck) -> None:
    left = LeftMemory()
    with process(left) as memory:
        for rank in range(3):
            arrive(memory, Replica("1", rank, SIZE, SIZE))
        memory.limit_bytes = 8 * ROOM
        arrive(memory, Replica("2", 0, 12 * SIZE, 12 * SIZE))
    with process(left) as memory:
        assert held(memory) == {("2", 0)}
        assert memory.allocated_bytes <= 8 * ROOM
    left.forget()


@pytest.mark.parametrize(
    "label",
    [
        b"garbage",
        b"[" * 9000,
        b'["Replica", {}]',
        b'["Replica", {"snapshot": "1", "rank": -1, "slot_bytes": 1, "nbytes": 1}]',
        b'["Replica", {"snapshot": "1", "rank": 0, "slot_bytes": 1, "nbytes": 1000000}]',
    ],
)
def test_a_label_that_is_none(label: bytes, leak_check: LeakCheck) -> None:
    left = LeftMemory()
    with process(left) as memory:
        replica = Replica("1", 0, SIZE, SIZE)
        arrive(memory, replica)
        with memory.reading(replica) as region:
            os.ftruncate(region.fd, region.size)
            region.write_behind(0, label)
    with process(left) as memory:
        assert memory.replicas() == []
        arrive(memory, Replica("2", 0, SIZE, SIZE))
        assert memory.allocated_bytes == ROOM
    left.forget()


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group of 300 MiB, with an empty one in it. Needs root, and a memory controller."""
    version_1 = Path("/sys/fs/cgroup/memory")
    parent, limit = (
        (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    )
    outer = parent / f"ckpt-test-{os.getpid()}"
    try:
        outer.mkdir()
        (outer / limit).write_text(str(300 << 20))
        (outer / "inner").mkdir()
    except OSError as error:
        with contextlib.suppress(OSError):
            outer.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


def test_memory_is_that_of_the_machine_or_of_a_control_group(control_group: Path) -> None:
    """That of a group counts for what is in a group below, as in a container."""
    code = "from ckpt.replication.held_replicas import usable_bytes; print(usable_bytes())"
    move = f"echo $$ > {control_group}/cgroup.procs && exec {sys.executable} -c '{code}'"
    done = subprocess.run(["sh", "-c", move], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == 300 << 20
    assert 300 << 20 < usable_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
