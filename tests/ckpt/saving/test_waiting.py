"""How writers wait: what very many of them ask of the file system, and how soon they know what was decided."""

import dataclasses
import heapq
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.async_calls.writer_main import WriterContext
from ckpt.errors import CheckpointError, StateError, StorageError
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.failure import Failure
from ckpt.saving import waiting
from ckpt.saving.task import SaveOptions, WriteTask
from ckpt.saving.waiting import OrphanedError, Waiting, look_schedule
from ckpt.storage import documents
from ckpt.storage.commit import Abandoned, PartsWatch, PendingSave, Published
from ckpt.storage.leases import EXPIRY_S, RENEW_S, RENEWALS_PER_S, Leases
from ckpt.storage.names import RANKS_PER_DIRECTORY, SaveId, part_name
from ckpt.storage.node_lock import NodeLock
from ckpt.storage.root import CheckpointRoot
from inprocess.ipc import suspension
from inprocess.ipc.process import Process
from tests.ckpt.crash.killers import wait_until
from tests.support import LeakCheck, run_ranks
from tests.support.selection import full_only

_OPERATIONS = ("stat", "lstat", "listdir", "scandir", "open", "mkdir", "unlink", "rename", "rmdir", "link", "utime")
_BUDGET_PER_S = 200
_AT_ONCE_S = 15.0  # on a busy machine; every time limit that could end the wait instead is longer


def _begun(path: Path, world_size: int) -> PendingSave:
    root = CheckpointRoot(str(path))
    root.make()
    pending = PendingSave(root, SaveId(1, root.ownership.claim(0), "0" * 16))
    pending.begin(world_size, "plan")
    return pending


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the operations on names that this process asks of file systems."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for name in _OPERATIONS:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        yield counts


class _Lock(NodeLock):
    """The lock of a simulated node."""

    def __init__(self, node: int, holders: dict[int, int], rank: int) -> None:
        self._node, self._holders, self._rank = node, holders, rank

    def take(self) -> bool:
        return self._holders.setdefault(self._node, self._rank) == self._rank

    def release(self) -> None:
        if self._holders.get(self._node) == self._rank:
            del self._holders[self._node]


class _Job:
    """Writers of `nodes` x `per_node` ranks in this process, which all wait for the parts or the outcome."""

    def __init__(self, pending: PendingSave, nodes: int, per_node: int) -> None:
        self.pending = pending
        self.world_size = nodes * per_node
        self.parts = PartsWatch(pending, self.world_size)
        self.nudges = 0
        self.outcomes: dict[int, float] = {}
        holders: dict[int, int] = {}
        self._waits = [self._waiting(rank, per_node, holders) for rank in range(self.world_size)]

    def _waiting(self, rank: int, per_node: int, holders: dict[int, int]) -> Waiting:
        options = SaveOptions()
        region: Any = None
        task = WriteTask(
            self.pending.root.path, self.pending.save, rank, region, region, 0, 0, [], {}, options, Process.here()
        )
        lock = _Lock(rank // per_node, holders, rank)
        context = WriterContext(0, lambda: None, lambda event: None, lambda: False, {}, lambda: self.nudges)
        schedule = look_schedule(rank, self.world_size, per_node, lock, options.looks_per_s)
        return Waiting(task, self.world_size, context, "a test", schedule=schedule, pending=self.pending, begin=0.0)

    def run(self, begin: float, end: float, pause_s: float) -> None:
        """Let simulated time go by; every writer asks every `pause_s` whether to look."""
        queue = [(begin + pause_s * rank / self.world_size, rank) for rank in range(self.world_size)]
        queue = [(at, rank) for at, rank in queue if rank not in self.outcomes]
        heapq.heapify(queue)
        while queue and queue[0][0] < end:
            now, rank = heapq.heappop(queue)
            if not self._step(rank, now):
                heapq.heappush(queue, (now + pause_s, rank))

    def _step(self, rank: int, now: float) -> bool:
        wait = self._waits[rank]
        if wait.is_due(now):
            if rank == 0:
                wait.schedule.operations = 1 + self.parts.directories_left
                self.parts.look()
            if self.pending.decided() is not None:
                self.outcomes[rank] = now
                wait.schedule.close()
                return True
            wait.schedule.looked(now)
        wait.check(now)
        wait.schedule.pause_s()
        return False


class _Clock:
    """A clock of the test's own, which `sleep` moves on; once by much more, as when the process is suspended."""

    def __init__(self, suspended_s: float) -> None:
        self.now = 1000.0
        self.resumed_at = math.inf
        self._suspended_s = suspended_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 1001.0 and self._suspended_s:
            self.now += self._suspended_s
            self.resumed_at, self._suspended_s = self.now, 0.0


@pytest.mark.parametrize("suspended_s", [0.0, 20.0])
def test_others_are_not_taken_for_dead_because_this_process_was_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suspended_s: float
) -> None:
    """The trainer has ended, and the leases of other hosts have expired, as they were suspended with this one."""
    clock = _Clock(suspended_s)
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(suspension, "time", clock)
    monkeypatch.setattr(Waiting, "_alive", lambda self: set())
    context = WriterContext(0, lambda: None, lambda event: None, lambda: True, {}, lambda: 0)
    region: Any = None
    pending = _begun(tmp_path, 2)
    task = WriteTask(pending.root.path, pending.save, 1, region, region, 0, 0, [], {}, SaveOptions(), Process.here())
    wait = Waiting(task, 2, context, "a test", awaited=lambda: [0], pending=pending)
    with pytest.raises(OrphanedError):
        all(clock.now < 1100 for _ in wait)
    if suspended_s:
        assert clock.now > clock.resumed_at + EXPIRY_S
    else:
        assert clock.now < 1000 + EXPIRY_S


@pytest.mark.parametrize(
    ("nodes", "per_node"), [(1, 2), (8, 8), (128, 8), pytest.param(2048, 8, marks=full_only), (4096, 4)]
)
def test_all_waiting_ranks_together_ask_little_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, per_node: int
) -> None:
    """While one part in each directory is missing: the coordinator lists them all."""
    pending = _begun(tmp_path, nodes * per_node)
    job = _Job(pending, nodes, per_node)
    seconds = 6.0
    with _counted(monkeypatch) as counts:
        job.run(0.0, seconds, 0.05 if nodes < 100 else 0.5)
    renewals = seconds * min(nodes / RENEW_S, RENEWALS_PER_S)
    print(f"{job.world_size} ranks: {dict(counts)}, {renewals:g} renewals of leases, in {seconds:g} s")
    assert sum(counts.values()) > seconds  # they do look
    assert sum(counts.values()) + renewals < _BUDGET_PER_S * seconds
    assert not job.outcomes


def _looks(rank: int, seconds: float) -> int:
    """Return how often a rank looks at an object store in a wait of so many seconds, of which no rank is told."""
    schedule = look_schedule(rank, 2, 1, _Lock(rank, {}, rank), SaveOptions().looks_per_s, 0.2)
    looks = 0
    for now in range(int(20 * seconds)):
        if schedule.is_due(now / 20):
            looks += 1
            schedule.looked(now / 20)
    return looks


def test_a_writer_without_a_trainer_looks_more_often_at_an_object_store() -> None:
    schedule = look_schedule(1, 2, 1, _Lock(1, {}, 1), SaveOptions().looks_per_s, 0.2)
    assert not schedule.is_due(0.0)
    assert schedule.is_due(16.0)
    schedule.looked(16.0)
    assert not schedule.is_due(31.9)
    schedule = look_schedule(1, 2, 1, _Lock(1, {}, 1), SaveOptions().looks_per_s, 0.2)
    assert not schedule.is_due(0.0)
    schedule.looked(16.0)
    schedule.hurry(17.0)
    assert schedule.is_due(19.0)
    schedule.looked(19.0)
    assert schedule.is_due(21.0)


def test_a_long_wait_costs_few_looks_at_an_object_store() -> None:
    assert [_looks(1, seconds) for seconds in (1.9, 10, 60, 600)] == [0, 3, 5, 23]
    assert [_looks(0, seconds) for seconds in (1, 10, 60, 600)] == [5, 15, 23, 42]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (64, 8), (2048, 8)])
def test_all_ranks_know_the_outcome_within_two_seconds(tmp_path: Path, nodes: int, per_node: int) -> None:
    """In a job of many nodes the trainers pass on that there is one."""
    pending = _begun(tmp_path, nodes * per_node)
    job = _Job(pending, nodes, per_node)
    job.run(0.0, 5.0, 0.25)
    assert pending.publish() == Published()
    if nodes > 100:
        job.run(5.0, 5.5, 0.25)
        assert len(job.outcomes) < job.world_size
        job.nudges = 1
    job.run(5.5 if nodes > 100 else 5.0, 30.0, 0.25)
    assert len(job.outcomes) == job.world_size
    print(f"{job.world_size} ranks: the last one knows after {max(job.outcomes.values()) - 5.0:.2f} s")
    assert max(job.outcomes.values()) <= 7.0


def test_the_coordinator_lists_only_directories_that_are_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size = 3 * RANKS_PER_DIRECTORY + 1
    pending = _begun(tmp_path, world_size)
    for rank in range(world_size):
        if rank != 600:
            path = Path(pending.path, part_name(rank))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    watch = PartsWatch(pending, world_size)
    assert watch.directories_left == 4
    assert not watch.look()
    assert (watch.missing, watch.directories_left) == ({600}, 1)
    with _counted(monkeypatch) as counts:
        assert not watch.look()
    assert counts == {"open": 1, "listdir": 1}  # the list of a directory that was opened without following links
    Path(pending.path, part_name(600)).touch()
    assert watch.look()
    assert watch.missing == set()
    assert pending.parts_present() == set(range(world_size))


# -- ranks that do not wait for the coordinator to begin ---------------------------------------------------------------


def test_a_rank_writes_its_part_before_the_save_has_begun(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    root.make()
    pending = PendingSave(root, SaveId(1, root.ownership.claim(0), "0" * 16))
    pending.join()
    pending.write_part(1, {"rank": 1})
    assert (pending.has_begun(), pending.outcome(), pending.decided()) == (False, None, None)
    assert isinstance(pending.publish(), Abandoned)  # nothing was published: it has no intent
    assert root.steps() == []
    pending.begin(2, "plan")
    assert pending.parts_present() == {1}
    assert pending.publish() == Published()


def test_a_late_rank_does_not_bring_an_abandoned_save_back(tmp_path: Path) -> None:
    pending = _begun(tmp_path, 2)
    assert isinstance(pending.abandon(Failure(0, "StorageError", "full")), Abandoned)
    with pytest.raises(StorageError, match="abandoned before this rank could write"):
        pending.join()
    assert pending.root.pending() == []


@pytest.mark.parametrize("fenced", [False, True])
def test_what_a_late_rank_leaves_is_deleted(tmp_path: Path, fenced: bool) -> None:
    """It was killed after it had made the directory again, or before the coordinator was fenced."""
    pending = _begun(tmp_path, 2)
    pending.abandon(Failure(0, "StorageError", "full"))
    running = PendingSave(pending.root, SaveId(2, pending.save.owner, "1" * 16))
    running.join()
    if fenced:
        pending.root.ownership.claim(pending.save.owner)
    else:
        os.mkdir(pending.path)
    pending.root.clean()
    assert pending.root.pending() == ([] if fenced else [running.save])
    assert pending.outcome() == Abandoned(Failure(0, "StorageError", "full"))


# -- jobs --------------------------------------------------------------------------------------------------------------


def _save_and_wait(rank: int, world_size: int, root: Path, looks_per_s: float, break_store: bool) -> list[float]:
    import torch

    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save({"w": torch.ones(100)}, 1)
        saver = checkpointer._parts.saver
        saver._options = dataclasses.replace(saver._options, looks_per_s=looks_per_s)
        if break_store:
            Ranks._store = _no_store  # type: ignore[method-assign]
        taken = []
        for step in (2, 3, 4):
            checkpointer.async_save({"w": torch.ones(100) * step}, step)
            begin = time.monotonic()
            assert checkpointer.maybe_finalize(blocking=True) == [step]
            taken.append(time.monotonic() - begin)
        return taken


def _no_store(ranks: Ranks) -> Any:
    raise RuntimeError("connection closed")


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=full_only)])
def test_ranks_that_look_rarely_are_told(tmp_path: Path, leak_check: LeakCheck, world_size: int) -> None:
    """By themselves they would look after hundreds of seconds."""
    for result in run_ranks(_save_and_wait, world_size, tmp_path, 0.001, False):
        assert max(result.value) < _AT_ONCE_S
    assert CheckpointRoot(str(tmp_path)).steps() == [1, 2, 3, 4]


def test_a_store_that_is_gone_makes_it_only_slower(tmp_path: Path) -> None:
    for result in run_ranks(_save_and_wait, 2, tmp_path, 1.5, True):
        assert max(result.value) < _AT_ONCE_S
    assert CheckpointRoot(str(tmp_path)).steps() == [1, 2, 3, 4]


def _abandon(rank: int, world_size: int, root: Path) -> str:
    import torch

    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save({"w": torch.ones(100)}, 1)
        saver = checkpointer._parts.saver
        saver._options = dataclasses.replace(saver._options, looks_per_s=0.001)
        request = checkpointer.save_request({"w": torch.ones(100)}, 2)
        if rank == 1:
            (save,) = saver._in_flight
            checkpointer.queue.start()
            PendingSave(saver._root, save).abandon(Failure(1, "StorageError", "a disk of rank 1 is full"))
        checkpointer.queue.schedule_async_request(request)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.maybe_finalize(blocking=True)
        return str(caught.value)


def test_ranks_that_look_rarely_are_told_of_a_save_that_is_abandoned(tmp_path: Path) -> None:
    for result in run_ranks(_abandon, 3, tmp_path):
        assert "a disk of rank 1 is full" in result.value
    assert CheckpointRoot(str(tmp_path)).steps() == [1]


# -- leases ------------------------------------------------------------------------------------------------------------


def test_hosts_of_a_large_job_renew_less_often_and_say_so(tmp_path: Path) -> None:
    leases = Leases(str(tmp_path))
    world_size = 2048 * 8
    for rank in range(1, 8):
        leases.enter(rank, Process.here(), Process.here())
    lease = leases.register(0, Process.here(), lambda: False, world_size)
    try:
        path = Path(leases.own_file())
        wait_until(lambda: '"renew_s"' in path.read_text(), "the host to renew its lease")
    finally:
        lease.close()
    renew_s = 2048 / RENEWALS_PER_S
    other = path.with_name("f" * 32 + ".1-1")  # as seen from another host
    other.write_text(path.read_text())
    for age_s, alive in ((2 * renew_s, set(range(8))), (renew_s / RENEW_S * EXPIRY_S + 60, set())):
        then = time.time() - age_s
        os.utime(other, (then, then))
        path.unlink(missing_ok=True)
        assert leases.alive_ranks() == alive


def test_one_process_of_a_node_has_a_lock(leak_check: LeakCheck) -> None:
    first, second = NodeLock("x"), NodeLock("x")
    assert first.take()
    assert first.take()
    assert not second.take()
    other = NodeLock("y")
    assert other.take()
    other.release()
    first.release()
    assert second.take()
    assert not first.held
    second.release()


# -- documents ---------------------------------------------------------------------------------------------------------


def test_a_step_that_no_reader_would_accept_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_request({"w": torch.ones(10)}, 1).execute_sync()
        request = checkpointer.save_request({"w": torch.ones(10), "text": "x" * 50_000}, 2)
        with monkeypatch.context() as patch:
            patch.setattr(documents, "MAX_DOCUMENT_BYTES", 40_000)
            with pytest.raises(CheckpointError, match=r"StateError.*and 40,000 are allowed"):
                request.execute_sync()
        assert checkpointer.all_steps() == [1]
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 40)
    with pytest.raises(StateError):
        documents.encode_root({"attributes": {"ckpt": {"x": "x" * 40}}})
