"""Replicas of snapshots of real ranks on one machine; each two have a `place`, as if it were a node."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.events import Event, SnapshotNotReplicated, SnapshotReplicated, SnapshotStaged
from ckpt.replication import replica_process
from ckpt.saving.share import Share
from tests.ckpt.saving.snapshot_jobs import fresh, is_state_of, train_step
from tests.support import run_ranks
from tests.support.quick_keepers import descendants


def _made(root: Path, rank: int, **options: Any) -> ckpt.Checkpointer:
    place = f"place {rank // 2}"
    return ckpt.Checkpointer(
        root, snapshots=ckpt.Snapshots(every=1, replicas=1, place=place), timeout=timedelta(seconds=30), **options
    )


def _train(checkpointer: ckpt.Checkpointer, state: dict[str, Any], rank: int, first: int, last: int) -> None:
    for step in range(first, last + 1):
        train_step(state, rank, step)
        dist.barrier()
        checkpointer.step(state, step)


def _until_replicated(checkpointer: ckpt.Checkpointer, step: int) -> None:
    deadline = time.monotonic() + 40
    while (checkpointer.replicated_step or 0) < step:
        checkpointer.maybe_finalize()
        assert time.monotonic() < deadline, f"only {checkpointer.replicated_step}"
        time.sleep(0.005)


def _every_step(rank: int, world_size: int, root: Path) -> tuple[list[Event], int]:
    events: list[Event] = []
    with ckpt.observe(events.append), _made(root, rank) as checkpointer:
        state = fresh()
        assert checkpointer.restore(state) is None
        for step in range(1, 31):
            _train(checkpointer, state, rank, step, step)
            if step % 10 == 0:
                _until_replicated(checkpointer, step)
                dist.barrier()
        replicated = checkpointer.replicated_step
        assert replicated is not None
        keys = dist.distributed_c10d._get_default_store().num_keys()  # type: ignore[attr-defined]
        dist.barrier()
    return [event for event in events if isinstance(event, SnapshotReplicated | SnapshotNotReplicated)], keys


def test_snapshots_are_replicated_beside_training(tmp_path: Path) -> None:
    results = [result.value for result in run_ranks(_every_step, 4, tmp_path / "root")]
    for events, keys in results:
        steps = [event.step for event in events]
        assert steps == sorted(set(steps))
        assert {10, 20, 30} <= set(steps)
        assert all(isinstance(event, SnapshotReplicated) and event.bytes > 0 for event in events), events
        assert keys < 40
    assert not (tmp_path / "root").exists()


def _large(rank: int, world_size: int, root: Path) -> list[Event]:
    events: list[Event] = []
    with ckpt.observe(events.append), _made(root, rank) as checkpointer:
        state = {"weights": torch.full((4_000_000,), float(rank)), "own": ckpt.PerRank(torch.ones(100_000))}
        checkpointer.snapshot(state, 1)
        _until_replicated(checkpointer, 1)
        dist.barrier()
    return events


def test_the_traffic_is_that_of_what_was_staged(tmp_path: Path) -> None:
    for result in run_ranks(_large, 4, tmp_path / "root"):
        (staged,) = [event for event in result.value if isinstance(event, SnapshotStaged)]
        (sent,) = [event for event in result.value if isinstance(event, SnapshotReplicated)]
        assert staged.bytes <= sent.bytes <= 1.05 * staged.bytes


def _replica_process() -> psutil.Process:
    (found,) = [child for child in descendants() if child.name() == "ckpt-replicas"]
    return found


def _killed(rank: int, world_size: int, root: Path) -> tuple[int | None, list[Event], int | None, bool]:
    events: list[Event] = []
    with ckpt.observe(events.append), _made(root, rank) as checkpointer:
        state = fresh()
        checkpointer.restore(state)
        _train(checkpointer, state, rank, 1, 3)
        _until_replicated(checkpointer, 3)
        dist.barrier()
        if rank == 1:
            replicas = _replica_process()
            replicas.kill()
            replicas.wait(30)
        dist.barrier()
        _train(checkpointer, state, rank, 4, 10)  # nothing waits for replicas
        before = checkpointer.replicated_step
        dist.barrier()
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10), rank)
        step = checkpointer.restore(state)
        right = is_state_of(state, rank, 10)
        _train(checkpointer, state, rank, 11, 12)
        _until_replicated(checkpointer, 12)
        dist.barrier()
    return before, [event for event in events if isinstance(event, SnapshotNotReplicated)], step, right


def test_a_replica_process_is_killed(tmp_path: Path) -> None:
    """Training goes on without newer replicas, and the next restore starts another one."""
    results = [result.value for result in run_ranks(_killed, 4, tmp_path / "root")]
    assert {(before, step, right) for before, _, step, right in results} == {(3, 10, True)}
    causes = [event.cause for _, events, _, _ in results for event in events]
    assert any("has ended" in cause for cause in causes)


def _killed_where_it_is_needed(rank: int, world_size: int, root: Path) -> list[tuple[int | None, bool, int]]:
    results = []
    with _made(root, rank) as checkpointer:
        state = fresh()
        checkpointer.restore(state)
        for last in (3, 6):
            _train(checkpointer, state, rank, last - 2, last)
            _until_replicated(checkpointer, last)
            dist.barrier()
            if rank < 2:
                replicas = _replica_process()
                replicas.kill()
                replicas.wait(30)
            else:
                for slot in checkpointer._parts.saver.memory.kept:  # as if their node was lost
                    Share(slot).clear()
            dist.barrier()
            checkpointer.bridge.recover_from_fault(timedelta(seconds=10), rank)
            step = checkpointer.restore(fresh_state := fresh())
            results.append((step, is_state_of(fresh_state, rank, last), len(_replica_memory())))
            dist.barrier()
    return results


def _replica_memory() -> set[int]:
    """The inodes of the replicas that the processes of this rank hold, or have held."""
    found = set()
    for child in descendants():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{child.pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{child.pid}/fd/{fd}").startswith("/memfd:ckpt-replica"):
                        found.add(os.stat(f"/proc/{child.pid}/fd/{fd}").st_ino)
    return found


def test_a_replica_process_is_killed_and_what_it_held_is_restored(tmp_path: Path) -> None:
    """The keeper has the memory: a new replica process offers it."""
    for result in run_ranks(_killed_where_it_is_needed, 4, tmp_path / "root"):
        for (step, right, regions), last in zip(result.value, (3, 6), strict=True):
            assert (step, right) == (last, True)
            assert 1 <= regions <= 2


def _stopped(rank: int, world_size: int, root: Path) -> tuple[int | None, bool]:
    replica_process._ANSWER_S = 0.5
    with _made(root, rank) as checkpointer:
        state = fresh()
        checkpointer.restore(state)
        _train(checkpointer, state, rank, 1, 3)
        _until_replicated(checkpointer, 3)
        dist.barrier()
        held = _replica_process() if rank == 1 else None
        if held is not None:
            held.suspend()
        dist.barrier()
        _train(checkpointer, state, rank, 4, 10)
        dist.barrier()
        checkpointer.bridge.recover_from_fault(timedelta(seconds=10), rank)
        step = checkpointer.restore(state)
        right = is_state_of(state, rank, 10)
        _train(checkpointer, state, rank, 11, 12)
        dist.barrier()
        if held is not None:
            held.resume()
    return step, right


def test_a_replica_process_hangs(tmp_path: Path) -> None:
    """Nothing waits for it for long, not even the restore: what it holds is not needed."""
    assert [result.value for result in run_ranks(_stopped, 4, tmp_path / "root")] == 4 * [(10, True)]


@contextlib.contextmanager
def _no_room_behind(slot_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a slot: there is no room for the documents of a share."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (slot_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _one_is_incomplete(rank: int, world_size: int, root: Path) -> list[Event]:
    events: list[Event] = []
    with ckpt.observe(events.append), _made(root, 2 * rank) as checkpointer:
        state = fresh()
        checkpointer.restore(state)
        _train(checkpointer, state, rank, 1, 8)  # so that every slot was used
        _until_replicated(checkpointer, 8)
        dist.barrier()
        slot_bytes = checkpointer._parts.saver.memory.kept[0].size
        with _no_room_behind(slot_bytes) if rank == 1 else contextlib.nullcontext():
            _train(checkpointer, state, rank, 9, 9)
        dist.barrier()
        for turn in (0, 1):  # rank 0 names step 9, and rank 1 learns of it
            if turn == rank:
                checkpointer.maybe_finalize()
            dist.barrier()
        _train(checkpointer, state, rank, 10, 16)
        _until_replicated(checkpointer, 16)
        dist.barrier()
    return [event for event in events if isinstance(event, SnapshotNotReplicated)]


def test_a_share_that_is_never_complete(tmp_path: Path) -> None:
    """Its snapshot is not replicated, newer ones are."""
    first, second = (result.value for result in run_ranks(_one_is_incomplete, 2, tmp_path / "root"))
    assert first == []
    assert [event.step for event in second] == [9]


def _one_place(rank: int, world_size: int, root: Path) -> int | None:
    with ckpt.Checkpointer(root, snapshots=ckpt.Snapshots(every=1, replicas=1)) as checkpointer:
        state = fresh()
        _train(checkpointer, state, rank, 1, 5)
        dist.barrier()
        return checkpointer.replicated_step


def test_ranks_of_one_node_have_no_replicas_and_train(tmp_path: Path) -> None:
    results = run_ranks(_one_place, 2, tmp_path / "root")
    assert [result.value for result in results] == [None, None]
    assert "all ranks are in one place" in results[0].stderr


def test_one_rank_alone(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=ckpt.Snapshots(every=1, replicas=1)) as checkpointer:
        state = fresh()
        for step in (1, 2):
            train_step(state, 0, step)
            checkpointer.step(state, step)
        assert checkpointer.replicated_step is None
        assert checkpointer.restore(state) == 2
        assert is_state_of(state, 0, 2)


@pytest.mark.parametrize("replicas", [2, -1, "error"])
def test_replicas_are_none_or_one(tmp_path: Path, replicas: Any) -> None:
    with pytest.raises(ValueError, match="replicas must be 0 or 1"):
        ckpt.Checkpointer(tmp_path, snapshots=ckpt.Snapshots(replicas=replicas))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": 10.0}, "bandwidth must be at least"),
        ({"bandwidth": float("nan")}, "bandwidth must be a positive number"),
        ({"host": "node7"}, "does not appear to be an IPv4 or IPv6 address"),
    ],
)
def test_what_no_replica_process_can_use_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ckpt.Snapshots(replicas=1, **options)
