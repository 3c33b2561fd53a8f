"""Jobs on two mounts of one directory, which do not see each other's locks: nothing is lost or mixed."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import CheckpointNotFoundError, FencedError, StorageError
from ckpt.storage.commit import PendingSave
from ckpt.storage.directories import lock_shared, try_lock_exclusive
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.async_calls import functions
from tests.ckpt.async_calls.functions import Gate
from tests.ckpt.crash.killers import wait_until
from tests.ckpt.shared_fs.mounts import Mounts, held, state_of, value_of, wait_for
from tests.support import launch_ranks
from tests.support.selection import full_only

pytestmark = pytest.mark.timeout(120)


def test_locks_of_one_mount_are_not_seen_on_the_other(mounts: Mounts) -> None:
    """Otherwise the other tests here would prove nothing."""
    with lock_shared(str(mounts.one)):  # type: ignore[union-attr]
        lock = try_lock_exclusive(str(mounts.two))
        assert lock is not None
        lock.close()


# -- a job that only reads, next to one that saves ---------------------------------------------------------------------


def _train(rank: int, world_size: int, root: Path, hold: Path) -> list[int]:
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(state_of(1.0), 1)
        held(checkpointer, 2.0, 2, "decide", hold)
        return checkpointer.maybe_finalize(blocking=True)


@pytest.mark.parametrize("read_only", [False, True], ids=["default", "read_only"])
def test_a_restore_leaves_the_save_in_flight_of_another_job_alone(
    mounts: Mounts, tmp_path: Path, read_only: bool
) -> None:
    hold = tmp_path / "go"
    with launch_ranks(_train, 1, mounts.one / "root", hold) as trainer:
        wait_for(Path(f"{hold}.decide.0"), "the save to be complete")
        for folder in (mounts.two, mounts.one, mounts.folder):
            with ckpt.Checkpointer(folder / "root", read_only=read_only) as evaluation:
                state = state_of(0.0)
                assert evaluation.restore(state) == 1
                assert value_of(state) == 1.0
        hold.touch()
        (result,) = trainer.wait()
    assert result.value == [2]


def test_a_read_only_mount_is_enough_to_restore(mounts: Mounts, tmp_path: Path) -> None:
    hold = tmp_path / "go"
    with launch_ranks(_train, 1, mounts.one / "root", hold) as trainer:
        wait_for(Path(f"{hold}.decide.0"), "the save to be complete")
        trainer.kill(0)
        trainer.wait(30, {0: -signal.SIGKILL})
    root = CheckpointRoot(str(mounts.folder / "root"))  # the job has ended, and a save is undecided
    assert len(root.pending()) == 1
    with ckpt.Checkpointer(mounts.read_only / "root") as checkpointer:
        state = state_of(0.0)
        assert checkpointer.restore(state) == 1
        assert value_of(state) == 1.0
        with pytest.raises(ckpt.CheckpointError, match="read-only"):
            checkpointer.save(state, 5)
    assert len(root.pending()) == 1


def _save_once(rank: int, world_size: int, roots: tuple[Path, Path]) -> str:
    with ckpt.Checkpointer(roots[rank]) as checkpointer, pytest.raises(StorageError) as caught:
        checkpointer.save(state_of(1.0), 1)
    return str(caught.value)


def test_a_rank_that_cannot_write_is_named_on_all_ranks_before_anything_is_written(mounts: Mounts) -> None:
    with launch_ranks(_save_once, 2, (mounts.one / "root", mounts.read_only / "root")) as trainers:
        results = trainers.wait(60)
    for result in results:
        assert "rank 1 cannot use the root, nothing was written" in result.value
        assert "Read-only file system" in result.value
    assert not CheckpointRoot(str(mounts.folder / "root")).pending()


# -- writers that outlive their trainers -------------------------------------------------------------------------------


def _two_nodes(rank: int, world_size: int, roots: tuple[Path, Path], hold: Path) -> None:
    checkpointer = ckpt.Checkpointer(roots[rank])
    checkpointer.save(state_of(1.0), 1)
    held(checkpointer, 2.0, 2, "write" if rank == 1 else "", hold)
    if rank == 0:
        wait_until(lambda: _parts(roots[0]) == {0}, "the part of rank 0", 30)
    print("scheduled", flush=True)
    signal.pause()


def _parts(root: Path) -> set[int]:
    """Return the ranks whose parts of the pending save are complete."""
    checkpoints = CheckpointRoot(str(root))
    return {rank for save in checkpoints.pending() for rank in PendingSave(checkpoints, save).parts_present()}


def test_an_orphaned_coordinator_waits_for_a_writer_on_the_other_mount(mounts: Mounts, tmp_path: Path) -> None:
    """It used to abandon the save after 3 s, because it saw no lock of the other one."""
    hold = tmp_path / "go"
    roots = (mounts.one / "root", mounts.two / "root")
    with launch_ranks(_two_nodes, 2, roots, hold) as trainers:
        for rank in range(2):
            trainers.wait_for_output(rank, "^scheduled")
        wait_for(Path(f"{hold}.write.1"), "rank 1 to be about to write")
        for rank in range(2):
            trainers.kill(rank)
        trainers.wait(30, dict.fromkeys(range(2), -signal.SIGKILL))
        root = CheckpointRoot(str(mounts.folder / "root"))
        end = time.monotonic() + 5  # longer than an orphan waits for dead processes
        while time.monotonic() < end:
            assert [save.step for save in root.pending()] == [2], "given up, though a writer of rank 1 is alive"
            time.sleep(0.1)
        hold.touch()
        wait_for(Path(root.step_path(2)), "step 2 to be published")
    with ckpt.Checkpointer(mounts.two / "root") as checkpointer:
        state = state_of(0.0)
        assert checkpointer.restore(state) == 2
        assert value_of(state) == 2.0


def _queued(rank: int, world_size: int, root: Path, gate: Gate, saved_before: bool) -> None:
    checkpointer = ckpt.Checkpointer(root)
    if saved_before:
        checkpointer.save(state_of(1.0), 1)
    checkpointer.queue.schedule_async_request(ckpt.AsyncRequest(functions.stop_at, (gate,), []))
    checkpointer.async_save(state_of(2.0), 2)
    print("queued", flush=True)
    signal.pause()


@pytest.mark.parametrize("saved_before", [True, pytest.param(False, marks=full_only)])
def test_a_save_in_the_queue_of_a_surviving_writer_is_fenced(
    mounts: Mounts, tmp_path: Path, saved_before: bool
) -> None:
    """It used to be published after the next job had restored an older step."""
    gate = Gate.create(tmp_path)
    with launch_ranks(_queued, 1, mounts.one / "root", gate, saved_before) as trainer:
        trainer.wait_for_output(0, "^queued")
        gate.wait_entered()
        trainer.kill(0)
        trainer.wait(30, {0: -signal.SIGKILL})
        with ckpt.Checkpointer(mounts.two / "root", timeout=timedelta(seconds=5)) as job:
            state = state_of(0.0)
            assert job.restore(state) == (1 if saved_before else None)
            job.save(state_of(20.0), 2)
            gate.open()
            trainer.wait_for_no_survivors()
            assert job.restore(state) == 2
            assert value_of(state) == 20.0
            job.save(state_of(30.0), 3)
    root = CheckpointRoot(str(mounts.folder / "root"))
    assert (root.steps(), root.pending()) == ([1, 2, 3] if saved_before else [2, 3], [])


def test_a_save_in_the_queue_of_a_surviving_writer_is_waited_for(mounts: Mounts, tmp_path: Path) -> None:
    gate = Gate.create(tmp_path)
    with launch_ranks(_queued, 1, mounts.one / "root", gate, True) as trainer:
        trainer.wait_for_output(0, "^queued")
        gate.wait_entered()
        trainer.kill(0)
        trainer.wait(30, {0: -signal.SIGKILL})
        with ckpt.Checkpointer(mounts.two / "root") as job, launch_ranks(_open, 1, gate):
            state = state_of(0.0)
            assert job.restore(state) == 2
            assert value_of(state) == 2.0


def _open(rank: int, world_size: int, gate: Gate) -> None:
    time.sleep(0.5)  # the restore is probably waiting by now; if not, the test checks less, and passes
    gate.open()


def test_the_later_start_wins_on_whatever_mount(mounts: Mounts) -> None:
    with ckpt.Checkpointer(mounts.one / "root") as first, ckpt.Checkpointer(mounts.two / "root") as second:
        first.save(state_of(1.0), 1)
        state = state_of(0.0)
        assert second.restore(state) == 1
        first.save(state_of(2.0), 2)
        second.save(state_of(20.0), 2)  # it continues step 1; step 2 is of another branch, and set aside
        with pytest.raises(FencedError):
            first.save(state_of(3.0), 3)
        assert second.restore(state) == 2
        assert value_of(state) == 20.0
    assert len(os.listdir(mounts.folder / "root/.superseded")) == 1


# -- readers next to a job that recycles files ------------------------------------------------------------------------


def _options() -> dict[str, Any]:
    return {"keep": 1}


def test_a_reader_with_a_lease_keeps_its_step(mounts: Mounts, queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(mounts.one / "root", **_options(), queue=queue) as trainer:
        trainer.save(state_of(1.0), 1)
        with ckpt.open(mounts.two / "root") as opened:
            for step in (2, 3, 4):
                trainer.save(state_of(float(step)), step)
            assert set(opened["w"][...].tolist()) == {1.0}
            assert trainer.all_steps() == [1, 4]
        trainer.save(state_of(5.0), 5)
        assert trainer.all_steps() == [5]
    assert not os.listdir(mounts.folder / "root/.readers")


def test_a_reader_without_a_lease_never_gets_two_steps_in_one_tensor(
    mounts: Mounts, queue: ckpt.AsyncCallsQueue
) -> None:
    """It used to get elements of both, with correct checksums."""
    with ckpt.Checkpointer(mounts.one / "root", **_options(), queue=queue) as trainer:
        trainer.save(state_of(1.0), 1)
        opened = ckpt.open(mounts.read_only / "root")
        assert set(opened["w"][:1000].tolist()) == {1.0}
        for step in (2, 3):
            trainer.save(state_of(float(step)), step)
        with pytest.raises(CheckpointNotFoundError, match="open the checkpoint again"):
            opened["w"][...]
        assert set(ckpt.open(mounts.read_only / "root")["w"][...].tolist()) == {3.0}


def _save_for_ever(rank: int, world_size: int, root: Path, stop: Path) -> int:
    with ckpt.Checkpointer(root, **_options()) as checkpointer:
        step = 0
        while not stop.exists():
            step += 1
            checkpointer.save(state_of(float(step)), step)
            if step == 1:
                print("saved", flush=True)
        return step


@pytest.mark.parametrize("mount", ["two", "read_only"])
def test_restores_beside_a_job_that_saves_are_of_one_step(mounts: Mounts, tmp_path: Path, mount: str) -> None:
    stop = tmp_path / "stop"
    restored = []
    with launch_ranks(_save_for_ever, 1, mounts.one / "root", stop) as trainer:
        trainer.wait_for_output(0, "^saved")
        with ckpt.Checkpointer(getattr(mounts, mount) / "root", read_only=mount == "read_only") as evaluation:
            for _ in range(15):
                state = state_of(0.0)
                step = evaluation.restore(state)
                assert step is not None
                assert value_of(state) == float(step)
                restored.append(step)
        stop.touch()
        (result,) = trainer.wait()
    print(f"restored {restored} of {result.value} steps")
    assert restored == sorted(restored)
