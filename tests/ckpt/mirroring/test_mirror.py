"""Mirrors in a directory: what is copied and kept, restores from either root, faults, owners."""

import functools
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import inprocess
from ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from ckpt.mirroring.step_copy import StepCopy, Throttle
from ckpt.mirroring.wanted import CODEC, CopyEnded, Due, MirrorMessage
from ckpt.restart import CheckpointAbort, CheckpointFinalize
from ckpt.saving.recover import Branch
from ckpt.storage.names import SaveId
from ckpt.storage.roots import open_root
from ckpt.validation.checks import validate
from inprocess.abort import AbortTorchDistributed
from inprocess.rank_assignment import FillGaps, MaxActiveWorldSize
from tests.ckpt.mirroring.support import (
    STALLED,
    Job,
    Jobs,
    assert_state,
    damage,
    files_of,
    mirror_of,
    mirror_process,
    mirror_processes,
    state_of,
)
from tests.ckpt.mirroring.support import job as start_job
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Start a job, whose writer is that of all jobs of this module."""
    with ckpt.AsyncCallsQueue() as queue:
        with ckpt.Checkpointer(tmp_path_factory.mktemp("first"), queue=queue) as checkpointer:
            checkpointer.save({}, 0)  # starts the writer, which stays
        yield functools.partial(start_job, queue=queue)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "nvme", tmp_path / "mirror"


def _steps(root: Path) -> list[int]:
    return open_root(root).steps()


def _name(step: int) -> str:
    return f"step_{step:08d}"


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_copy_is_bit_for_bit_the_step(
    roots: tuple[Path, Path], compression: str | None, leak_check: LeakCheck, job: Jobs
) -> None:
    first, second = roots
    with job(first, mirror_of(second), compression=compression) as run:
        run.checkpointer.save(state_of(1), 1, metrics={"loss": 0.25})
    assert run.copied == [1]
    files = files_of(first / _name(1))
    assert files == files_of(second / _name(1))
    assert compression is not None or len(files) > 6, "several pack files"
    assert validate(str(second / _name(1))).whole
    assert_state(ckpt.load(second), 1)
    with ckpt.open(second) as checkpoint:
        assert checkpoint.summary["metrics"] == {"loss": 0.25}
    state = state_of(0)
    with ckpt.Checkpointer(second) as alone:
        assert alone.restore(state) == 1
    assert_state(state, 1)


def test_every_and_keep(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    mirror = mirror_of(second, every=3, keep=ckpt.Latest(2))
    with job(first, mirror, keep=ckpt.Latest(1)) as run:
        run.copy(10)
        run.save(20, 30)
        run.copy(40)
        run.save(50, 60)
        assert _steps(second) == [10, 40]
        run.copy(70)
        run.wait(lambda: _steps(second) == [40, 70])
        assert _steps(first) == [70]
        run.save(80)
    assert run.copied == [10, 40, 70, 80], "the last one, too"
    assert _steps(second) == [70, 80]
    assert _steps(first) == [80]
    assert not list((second / ".abandoned").iterdir())


def test_a_step_is_held_while_it_is_copied_and_training_goes_on(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    mirror = mirror_of(second, bandwidth=STALLED, close_timeout=timedelta(0))
    with job(first, mirror, keep=ckpt.Latest(1)) as run:
        run.save(1)
        run.wait(lambda: open_root(second).pending())
        process = mirror_process()
        assert process.nice() == 19
        run.save(2, 3)
        assert _steps(first)[0] == 1
    assert run.copied == []
    assert _steps(second) == []
    assert {failed.step for failed in run.failures} == {1, 2, 3}
    with job(first, mirror_of(second), keep=ckpt.Latest(1)) as run:
        run.save(4)
    assert _steps(first) == [4]
    assert max(_steps(second)) == 4
    assert open_root(second).pending() == []


def test_a_step_that_only_the_mirror_has(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second)) as run:
        run.save(5, 6)
    shutil.rmtree(first)
    with job(first, mirror_of(second)) as run:
        assert run.checkpointer.recover()[-1] == 6
        assert run.restore() == (6, str(second))
        assert run.checkpointer.all_steps() == []
        assert run.checkpointer.latest_step() is None
        run.save(7)
        assert run.restore() == (7, str(first))
        assert run.restore(6) == (6, str(second))
        with pytest.raises(CheckpointNotFoundError, match="with its mirror"):
            run.restore(99)
    assert 7 in _steps(second)
    assert _steps(first) == [7]
    continued = json.loads((first / _name(7) / "intent.json").read_bytes())["continues"]
    assert continued == {"step": 6, "save": open_root(second).save_of(6)}


def test_damage_in_the_first_root(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second, every=2)) as run:
        run.save(1, 2, 3)  # the mirror has 1 and 3
        run.wait(lambda: {1, 3} <= {*run.copied})  # newest first, if both wait
    damage(first / _name(3))
    with job(first, mirror_of(second)) as run:
        assert run.restore(3) == (3, str(second))
        assert run.restore() == (3, str(second))
        report = run.checkpointer.last_restore
        assert report is not None
        assert report.damaged == (3,)
        run.save(4)
        assert _steps(first) == [1, 2, 4]
        assert len(list((first / ".damaged").iterdir())) == 1
    assert {1, 3, 4} <= set(_steps(second))


def test_damage_in_both_roots(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second)) as run:
        run.copy(1, 2)
    damage(first / _name(2))
    damage(second / _name(2))
    with job(first, mirror_of(second)) as run:
        with pytest.raises(CheckpointCorruptError, match=str(first)):
            run.restore(2)
        assert run.restore() == (1, str(first))


def test_damaged_bytes_are_not_copied(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second, every=100)) as run:
        run.copy(1)
        run.save(2)
        name = damage(first / _name(2))
    (failed,) = run.failures
    assert (failed.step, failed.again) == (2, False)
    assert name in failed.cause
    assert str(first) in failed.cause
    assert _steps(second) == [1]


def test_the_mirror_is_away_and_comes_back(
    roots: tuple[Path, Path], caplog: pytest.LogCaptureFixture, job: Jobs
) -> None:
    first, second = roots
    second.write_text("not a directory")
    with job(first, mirror_of(second), keep=ckpt.Latest(2)) as run, caplog.at_level(logging.WARNING, "ckpt"):
        run.save(1)
        run.wait(lambda: run.failures)
        run.save(2, 3, 4)
        assert run.failures[0].again
        second.unlink()
        run.wait(lambda: 4 in run.copied)
    assert [failed.again for failed in run.failures].count(True) == 1, "at most one report a minute"
    assert "is not in the mirror" in caplog.text
    assert max(_steps(second)) == 4
    assert set(_steps(second)) <= {1, 2, 3, 4}


def test_restore_with_a_mirror_that_is_away(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    second.write_text("not a directory")
    mirror = mirror_of(second, close_timeout=timedelta(0))
    with job(first, mirror) as run, pytest.raises(StorageError, match="may have a newer step"):
        run.restore()
    with ckpt.Checkpointer(first) as checkpointer:
        save_here(checkpointer, state_of(1), 1)
    with job(first, mirror) as run:
        assert run.restore() == (1, str(first))


def test_what_is_due_is_kept_until_it_is_copied(roots: tuple[Path, Path], job: Jobs) -> None:
    """Whether the trainer knows already that it is published or not, and while the process of the mirror restarts."""
    first, second = roots
    second.write_text("not a directory")
    with job(first, mirror_of(second), keep=ckpt.Latest(1)) as run:
        for step in (1, 2, 3):
            run.checkpointer.async_save(state_of(step), step)
        run.checkpointer.maybe_finalize(blocking=True)
        run.wait(lambda: run.failures)
        process = mirror_process()
        process.kill()
        process.wait(20)
        run.save(4)
        assert _steps(first) == [1, 2, 3, 4]
        second.unlink()
        run.wait(lambda: {1, 2, 3, 4} <= set(run.copied))
        run.save(5)
        assert _steps(first) in ([5], [4, 5])  # 4 may have been held by the process at that moment
    assert _steps(second) == [1, 2, 3, 4, 5]
    assert all(failed.again for failed in run.failures)


def test_a_mirror_that_stays_away_does_not_fill_the_first_root(
    roots: tuple[Path, Path], caplog: pytest.LogCaptureFixture, job: Jobs
) -> None:
    first, second = roots
    second.write_text("not a directory")
    mirror = mirror_of(second, every=2, held=2, close_timeout=timedelta(0))
    with job(first, mirror, keep=ckpt.Latest(1)) as run, caplog.at_level(logging.WARNING, "ckpt"):
        run.save(*range(1, 10))  # the odd ones are due
        assert _steps(first) == [5, 7, 9]
    said = [record.message for record in caplog.records if "does not hold it any longer" in record.message]
    assert [text.split(" is not")[0] for text in said] == ["step 1", "step 3"]
    with pytest.raises(ValueError, match="held"):
        ckpt.Mirror(second, held=0)


def test_kill_of_the_process(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second, bandwidth=STALLED, close_timeout=timedelta(0))) as run:
        run.save(1)
        run.wait(lambda: open_root(second).pending())
        process = mirror_process()
        process.send_signal(signal.SIGKILL)
        run.wait(lambda: run.failures and mirror_processes())
        assert "signal 9" in run.failures[0].cause
        assert mirror_processes()[0].pid != process.pid
    assert _steps(second) == []
    with job(first, mirror_of(second, every=5)) as run:
        run.save(2)
        run.wait(lambda: 1 in run.copied)
    assert _steps(second) == [1, 2], "the next job finds the copy that was begun"
    assert files_of(first / _name(1)) == files_of(second / _name(1))


def test_a_copy_of_a_step_that_is_gone_is_abandoned(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second, bandwidth=STALLED, close_timeout=timedelta(0))) as run:
        run.save(1)
        run.wait(lambda: open_root(second).pending())
    shutil.rmtree(first)
    with job(first, mirror_of(second)) as run:
        assert run.restore() == (None, "")
        run.save(2)
    assert _steps(second) == [2]
    assert open_root(second).pending() == []


def test_the_later_of_two_jobs_owns_the_mirror(tmp_path: Path, job: Jobs) -> None:
    second = tmp_path / "mirror"
    with job(tmp_path / "a", mirror_of(second)) as earlier:
        earlier.copy(1)
        with job(tmp_path / "b", mirror_of(second)) as later:
            assert later.restore() == (1, str(second))
            later.copy(2)
        earlier.save(3)
        earlier.wait(lambda: earlier.failures)
    (failed,) = earlier.failures
    assert (failed.step, failed.again) == (3, False)
    assert "started later" in failed.cause
    assert _steps(second) == [1, 2]


def test_a_job_on_a_host_whose_clock_is_late(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second)) as run:
        run.copy(1)
    shutil.rmtree(first)
    ahead = int(1000 * time.time()) + 10**9
    open_root(second).ownership.claim_as(ahead)
    with job(first, mirror_of(second)) as run:
        assert run.restore() == (1, str(second))
        run.copy(2)
    assert _steps(second) == [1, 2]


def test_a_process_that_recovers_the_mirror_as_a_root(roots: tuple[Path, Path], job: Jobs) -> None:
    """Its claim is temporary: the job goes on, while that process recovers and afterwards."""
    first, second = roots
    ownership = open_root(second).ownership
    with job(first, mirror_of(second)) as run:
        run.copy(1)
        with ckpt.Checkpointer(second) as reader:
            assert reader.restore(state_of(0)) == 1
        before = ownership.newest()
        token = ownership.claim(before, temporary=True)
        run.copy(2)
        ownership.release(token)
        assert not run.failures
        run.copy(3)
        process = mirror_process()
        process.kill()
        run.copy(4)
        assert ownership.newest() > token
    assert _steps(second) == [1, 2, 3, 4]


def test_another_branch(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second)) as run:
        run.copy(1, 2, 3)
    with ckpt.Checkpointer(first) as checkpointer:  # without the mirror, so that this has the old branch only
        assert checkpointer.restore(state_of(0), 1) == 1
        save_here(checkpointer, state_of(2), 2)
    with job(first, mirror_of(second)) as run:
        assert run.restore() == (2, str(first))
        run.copy(4)
    assert _steps(first) == [1, 2, 4]
    assert _steps(second) == [1, 2, 4] or _steps(second) == [1, 4]
    assert len(open_root(second).superseded()) >= 1
    shutil.rmtree(first)
    with job(first, mirror_of(second)) as run:
        assert run.restore() == (4, str(second))


@pytest.mark.parametrize(("starts", "every"), [(1, 1), (1, 3), (2, 3)])
def test_the_mirror_follows_training_to_another_branch(
    roots: tuple[Path, Path], starts: int, every: int, leak_check: LeakCheck, job: Jobs
) -> None:
    """The numbers of the new steps are those of old ones. The mirror has left these when it has one step of the new."""
    first, second = roots
    names = {}

    def go_back(run: Job) -> None:
        assert run.restore(10) == (10, str(first))
        for step in (20, 30, 40):
            run.checkpointer.save(state_of(-step), step)
        if every > 1:  # the first of the branch is due, and the next one not yet
            run.wait(lambda: run.copied.count(20) == (2 if starts == 1 and every == 1 else 1))
            assert _steps(second) == [10, 20]

    with job(first, mirror_of(second, every=every if starts == 1 else 1), keep=ckpt.Latest(9)) as run:
        if every == 1 or starts == 2:
            run.copy(10, 20, 30, 40, 50)
        else:
            run.copy(10)
            run.save(20, 30)
            run.copy(40)
            run.save(50)
        names = open_root(first).saves()
        if starts == 1:
            go_back(run)
    if starts == 2:
        with job(first, mirror_of(second, every=every)) as run:
            go_back(run)
    assert run.failures == []
    expected = [10, 20, 30, 40] if every == 1 else [10, 20, 40]
    assert _steps(first) == [10, 20, 30, 40]
    assert _steps(second) == expected
    assert all(open_root(second).save_of(step) == open_root(first).save_of(step) for step in expected)
    old = {step: save for step, save in names.items() if step > 10}
    assert set(open_root(second).superseded()) <= set(old.values())
    assert len(open_root(second).superseded()) == (4 if every == 1 or starts == 2 else 1)
    shutil.rmtree(first)
    with job(first, mirror_of(second)) as run:
        assert run.checkpointer.restore(state := state_of(0)) == 40
        assert torch.equal(state["w"], state_of(-40)["w"])


def test_a_step_that_waits_for_its_copy_is_another_one_after_the_branch_is_left(
    roots: tuple[Path, Path], job: Jobs
) -> None:
    """What is due is a save: the copy of an old 20 that waits is not taken for that of the new one."""
    first, second = roots
    second.write_text("not a directory")
    with job(first, mirror_of(second)) as run:
        run.save(10, 20)
        run.wait(lambda: run.failures)
        assert run.restore(10) == (10, str(first))
        run.checkpointer.save(state_of(-20), 20)
        second.unlink()
        run.wait(lambda: {10, 20} <= set(run.copied))
    assert [failed for failed in run.failures if failed.step == 20 and not failed.again], "the old one is gone"
    assert open_root(second).saves() == open_root(first).saves()


def test_another_save_of_a_step_stays(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second)) as run:
        run.copy(1)
    shutil.rmtree(first)
    before = files_of(second / _name(1))
    with job(first, mirror_of(second)) as run:
        run.save(1)  # without a restore
        run.copy(2)
    (failed,) = run.failures
    assert (failed.step, failed.again) == (1, False)
    assert "already published" in failed.cause
    assert files_of(second / _name(1)) == before
    assert _steps(second) == [1, 2]


def test_restore_after_a_fault(roots: tuple[Path, Path], job: Jobs) -> None:
    first, second = roots
    with job(first, mirror_of(second)) as run:
        run.copy(6)
    shutil.rmtree(first)
    state = state_of(0)
    with job(first, mirror_of(second)) as run:
        run.checkpointer.register(w=state["w"], v=state["v"])
        assert run.restore()[0] == 6
        run.checkpointer.bridge.recover_from_fault(None, 0)
        assert torch.equal(state["w"], state_of(6)["w"])
        report = run.checkpointer.last_restore
        assert report is not None
        assert report.root == str(second)
        run.save(7)
        run.checkpointer.bridge.recover_from_fault(None, 0)
        assert torch.equal(state["w"], state_of(7)["w"])


def _job_of_ranks(rank: int, world_size: int, first: str, second: str, saves: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(64.0 * 3000).reshape(-1, 64)
    state: dict[str, Any] = {"w": distribute_tensor(full * (1.0 if saves else 0.0), mesh, [Shard(0)])}
    state["own"] = ckpt.PerRank(torch.full((3,), float(rank)))
    with ckpt.Checkpointer(first, staging=ckpt.Staging(file_bytes=100_000), mirror=ckpt.Mirror(second)) as checkpointer:
        if saves:
            checkpointer.save(state, 8)
            return None
        assert checkpointer.restore(state, strict=world_size == 2) == 8
        report = checkpointer.last_restore
        assert report is not None
        assert report.root == second
        return bool(torch.equal(state["w"].full_tensor(), full))


def test_ranks(roots: tuple[Path, Path]) -> None:
    first, second = roots
    run_ranks(_job_of_ranks, 2, str(first), str(second), True, timeout=60)
    assert files_of(first / _name(8)) == files_of(second / _name(8))
    shutil.rmtree(first)
    for result in run_ranks(_job_of_ranks, 1, str(first), str(second), False, timeout=60):
        assert result.value is True


def _mirrored_by_two(rank: int, world_size: int, first: str, second: str) -> int:
    """Save a step of which each rank has a share, and return how many processes for mirrors this rank has started."""
    mirror = mirror_of(second, close_timeout=timedelta(seconds=80))
    with ckpt.Checkpointer(first, mirror=mirror) as checkpointer:
        checkpointer.save({"own": ckpt.PerRank(torch.full((100_000,), float(rank)))}, 8)
        mirror_process()
        return len(mirror_processes())


def test_each_rank_has_a_process(roots: tuple[Path, Path]) -> None:
    first, second = roots
    for result in run_ranks(_mirrored_by_two, 2, str(first), str(second), timeout=100):
        assert result.value == 1
    assert files_of(first / _name(8)) == files_of(second / _name(8))


def _one_of_two_is_replaced(initial_rank: int, world_size: int, first: str, second: str) -> list[str]:
    """Save 10, 20, 30, ... of which every third is due, with another rank 1 from the third on.

    Return what was said about the mirror on this rank.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    mirror = mirror_of(second, every=3, close_timeout=timedelta(seconds=60))
    checkpointer = ckpt.Checkpointer(first, mirror=mirror, timeout=timedelta(seconds=20))

    @inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(2), FillGaps()),
        soft_timeout=timedelta(seconds=25),
        hard_timeout=timedelta(seconds=40),
        last_call_wait=timedelta(seconds=0.1),
        monitor_thread_interval=timedelta(seconds=0.1),
        monitor_process_interval=timedelta(seconds=0.1),
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        state = {"own": ckpt.PerRank(torch.zeros(1000))}
        begin = checkpointer.restore(state, strict=False) or 0
        for step in range(begin + 10, 80, 10):
            checkpointer.save(state, step)
            dist.barrier()
            if (call.iteration, rank, step) == (0, 1, 20):
                os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()

    train()
    checkpointer.close()
    return [text for text in said if "the mirror" in text]


def test_one_rank_decides_what_is_due(roots: tuple[Path, Path]) -> None:
    """A process that takes the place of another has counted no steps, and the others have."""
    first, second = roots
    codes = {0: 0, 1: -signal.SIGKILL, 2: 0}
    results = run_ranks(
        _one_of_two_is_replaced, 3, str(first), str(second), returncodes=codes, init_process_group=False, timeout=100
    )
    assert [results[rank].value for rank in (0, 2)] == [[], []], [result.stderr for result in results]
    assert _steps(first) == [10, 20, 30, 40, 50, 60, 70]
    assert _steps(second) == [10, 40, 70]
    for step in (10, 40, 70):
        assert files_of(first / _name(step)) == files_of(second / _name(step))


def _copy_of(first: Path, second: Path, token: int, **options: Any) -> tuple[StepCopy, Throttle]:
    mirror = open_root(second)
    mirror.make()
    mirror.ownership.claim_as(token)
    throttle = Throttle(None, threading.Event())
    return StepCopy(open_root(first).source_of(8), mirror, token, throttle, **options), throttle


def test_shares(roots: tuple[Path, Path]) -> None:
    """Whether the process of rank 1 helps or not, each file is written once."""
    first, second = roots
    run_ranks(_save_of_two, 2, str(first), timeout=60)
    token = open_root(first).owner_of(8)
    alone, _ = _copy_of(first, second / "alone", token, is_helped=True, patience_s=0.0)
    alone.run(lambda: None)
    total = alone.nbytes
    copy, throttle = _copy_of(first, second / "helped", token, is_helped=True, patience_s=60.0)
    helper = StepCopy(open_root(first).source_of(8), open_root(second / "helped"), token, throttle)
    assert not helper.has_begun
    thread = threading.Thread(target=copy.run, args=(lambda: None,))
    thread.start()
    deadline = time.monotonic() + 30
    while not helper.has_begun:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    helper.copy_share(1)
    thread.join(30)
    assert copy.nbytes + helper.nbytes == total
    assert min(copy.nbytes, helper.nbytes) >= 400_000
    for name in ("alone", "helped"):
        assert files_of(first / _name(8)) == files_of(second / name / _name(8))
    assert open_root(second / "helped").steps() == [8]


def _save_of_two(rank: int, world_size: int, first: str) -> None:
    with ckpt.Checkpointer(first) as checkpointer:
        save_here(checkpointer, {"own": ckpt.PerRank(torch.full((100_000,), float(rank)))}, 8)


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every"):
        ckpt.Mirror(tmp_path, every=0)
    with pytest.raises(ValueError, match="bandwidth"):
        ckpt.Mirror(tmp_path, bandwidth=0)
    assert ckpt.Mirror(tmp_path, keep=3).keep == ckpt.Latest(3)
    with pytest.raises(TypeError, match="keep"):
        ckpt.Mirror(tmp_path, keep="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another root"):
        ckpt.Checkpointer(tmp_path, mirror=ckpt.Mirror(tmp_path))
    assert "very-secret" not in repr(ckpt.Mirror("s3://b/x", storage_options={"secret_access_key": "very-secret"}))


def test_messages() -> None:
    """Saves cross to the worker as they are, also where a job has skipped many steps."""
    branch = Branch(10**17, "s" * 60, tuple(range(10**17, 10**17 + 1000)))
    save = SaveId(10**17, 10**17, "f" * 16)
    messages: list[MirrorMessage] = [
        Due(save, 10**17, branch),
        CopyEnded(save, 0, 0.0, "no such \udc80 file", again=True),
    ]
    assert [CODEC.decode(CODEC.encode(message)) for message in messages] == messages
    with pytest.raises(TypeError, match=r"'retries'\] is a object, not a string, number or bool"):
        ckpt.Checkpointer("s3://b/x", mirror=ckpt.Mirror("s3://b/y", storage_options={"retries": object()}))
