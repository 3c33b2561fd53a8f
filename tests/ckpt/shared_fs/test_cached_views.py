"""What one mount remembers of a directory is no reason to remove a step that the other one has pinned, or reads."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.shared_fs.mounts import Mounts, state_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trainer(cached_mounts: Mounts, queue: ckpt.AsyncCallsQueue) -> Iterator[ckpt.Checkpointer]:
    """A job on one mount that has removed step 1, and so looked at everything."""
    with ckpt.Checkpointer(cached_mounts.one / "root", keep=1, queue=queue) as trainer:
        for step in (1, 2):
            trainer.save(state_of(float(step)), step)
        for name in ("pins", ".readers"):
            assert not (cached_mounts.one / "root" / name).exists()
        yield trainer


def _next_save(trainer: ckpt.Checkpointer) -> None:
    trainer.save(state_of(3.0), 3)


def _delete(trainer: ckpt.Checkpointer) -> None:
    with pytest.raises(ckpt.StorageError, match=r"is (pinned|being read)"):
        trainer.delete(2)


_REMOVALS = pytest.mark.parametrize("remove", [_next_save, _delete])
Remove = Callable[[ckpt.Checkpointer], None]


def _remembers(mounts: Mounts, relative: str) -> None:
    """Check that this test proves something: the mount of the trainer does not see what the other one does."""
    assert (mounts.two / relative).exists()
    assert not (mounts.one / relative).exists()


@_REMOVALS
def test_a_pin_that_was_made_on_another_mount(
    cached_mounts: Mounts, trainer: ckpt.Checkpointer, remove: Remove
) -> None:
    CheckpointRoot(str(cached_mounts.two / "root")).pin_step(2)
    _remembers(cached_mounts, "root/pins")
    remove(trainer)
    assert 2 in trainer.all_steps()


@_REMOVALS
def test_a_further_pin(cached_mounts: Mounts, trainer: ckpt.Checkpointer, remove: Remove) -> None:
    trainer.pin(2)
    trainer.unpin(2)
    assert not (cached_mounts.one / "root/pins/step_00000002").exists()
    CheckpointRoot(str(cached_mounts.two / "root")).pin_step(2)
    _remembers(cached_mounts, "root/pins/step_00000002")
    remove(trainer)
    assert 2 in trainer.all_steps()


def _lease(mounts: Mounts, age_s: float) -> Path:
    """Make the lease of a reader on another host, through the other mount."""
    save = CheckpointRoot(str(mounts.two / "root")).save_of(2)
    lease = mounts.two / "root" / ".readers" / str(save) / "anotherhost-1-1-0123abcd"
    lease.parent.mkdir(parents=True, exist_ok=True)
    lease.touch()
    os.utime(lease, (time.time() - age_s,) * 2)
    return lease


@_REMOVALS
def test_a_reader_on_another_mount(cached_mounts: Mounts, trainer: ckpt.Checkpointer, remove: Remove) -> None:
    _lease(cached_mounts, 0.0)
    _remembers(cached_mounts, "root/.readers")
    remove(trainer)
    assert 2 in trainer.all_steps()


@_REMOVALS
def test_a_reader_whose_lease_was_renewed(cached_mounts: Mounts, trainer: ckpt.Checkpointer, remove: Remove) -> None:
    lease = _lease(cached_mounts, 1000.0)
    CheckpointRoot(str(cached_mounts.two / "root")).make()
    seen = cached_mounts.one / "root" / ".readers"
    seen.mkdir(exist_ok=True)  # also ends what this mount remembers
    seen = seen / lease.parent.name / lease.name
    assert time.time() - seen.stat().st_mtime > 500
    lease.touch()
    assert time.time() - seen.stat().st_mtime > 500, "the mount has no cache"
    remove(trainer)
    assert 2 in trainer.all_steps()
