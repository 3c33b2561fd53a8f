"""A step that the storage fails to give: its next copy is restored, or the step before, and never nothing."""

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointNotFoundError, StorageError
from tests.ckpt.storage.small_saves import assert_whole, opened, save, state_of
from tests.ckpt.storage.syscalls import Call, FailingLooks, Syscalls
from tests.support import run_ranks
from tests.support.saves import save_here

_FILES = ("intent.json", "zarr.json", "index.json", "state.json", "packs/000/rank_00000_000")
_NEWEST = "step_00000003/"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the steps 1, 2 and 3."""
    with opened(tmp_path / "root") as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    return tmp_path / "root"


@pytest.fixture
def checkpointer(root: Path) -> Iterator[ckpt.Checkpointer]:
    with opened(root) as checkpointer:
        yield checkpointer


def _restore(checkpointer: ckpt.Checkpointer, hook: Callable[..., Any], **options: Any) -> int | None:
    """Restore, and check that the state is that of the step that was restored."""
    state = state_of(-1.0)
    with Syscalls().hooked(hook):
        step = checkpointer.restore(state, **options)
    assert step is not None
    assert str(state) == str(state_of(float(step)))
    return step


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("file", _FILES)
def test_the_step_before_is_restored(
    checkpointer: ckpt.Checkpointer, caplog: pytest.LogCaptureFixture, file: str, number: int
) -> None:
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert _restore(checkpointer, FailingLooks(number, _NEWEST + file)) == 2
    report = checkpointer.last_restore
    assert report is not None
    assert (report.unreadable, report.damaged) == ((3,), ())
    [text] = [record.getMessage() for record in caplog.records if "cannot be restored" in record.getMessage()]
    assert "step 3 cannot be restored, trying the step before, 2: " in text
    assert _NEWEST + file in text
    assert "restore-branch" in text
    with Syscalls().hooked(lambda call, perform: None if call.name == "fsync" else perform(*call.args)):
        save(checkpointer, 4)
    assert assert_whole(Path(checkpointer.root)) == [1, 2, 4], "step 3 is of a branch that training has left"


def test_training_goes_on_with_a_step_that_stays_unreadable(checkpointer: ckpt.Checkpointer, root: Path) -> None:
    """The same number is saved again, though it cannot be told whose the step in its place is."""
    looks = FailingLooks(errno.EIO, _NEWEST)

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "renameat2" and call.args[0].endswith("step_00000003"):
            looks.at_path = "step_00000003-moving"  # it stays unreadable on its way, and where it is then
        elif call.name == "renameat2" and "step_00000003-moving" in call.args[0]:
            looks.at_path = ".superseded/step_00000003"
        return looks(call, perform)

    assert _restore(checkpointer, hook) == 2
    with Syscalls().hooked(hook):
        save(checkpointer, 3)
    assert assert_whole(root) == [1, 2, 3]
    assert [path.name for path in (root / ".superseded").iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("options", [{"step": 3}, {"fall_back": False}], ids=["step", "fall_back"])
def test_whoever_insists_gets_the_error(checkpointer: ckpt.Checkpointer, options: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match=rf"cannot .*{_NEWEST}.*Input/output error"):
        _restore(checkpointer, FailingLooks(errno.EIO, _NEWEST), **options)
    assert _restore(checkpointer, FailingLooks(errno.EIO, "step_00000001/"), **options) == 3


@pytest.mark.parametrize("path", ["step_0000000", "root"], ids=["steps", "root"])
def test_a_failure_of_all_steps_is_no_start_from_scratch(checkpointer: ckpt.Checkpointer, path: str) -> None:
    with pytest.raises(StorageError, match="Input/output error"):
        _restore(checkpointer, FailingLooks(errno.EIO, path))
    assert _restore(checkpointer, FailingLooks(0)) == 3


# -- a copy in the mirror ----------------------------------------------------------------------------------------------


@pytest.fixture
def mirrored(root: Path, tmp_path: Path) -> Iterator[ckpt.Checkpointer]:
    """A Checkpointer of a root all steps of which are in its mirror, too."""
    shutil.copytree(root, tmp_path / "mirror")
    with opened(root, mirror=ckpt.Mirror(tmp_path / "mirror")) as checkpointer:
        yield checkpointer


@pytest.mark.parametrize("file", ["", *_FILES])
def test_the_copy_in_the_mirror_is_restored(mirrored: ckpt.Checkpointer, tmp_path: Path, file: str) -> None:
    hook = FailingLooks(errno.EIO, f"root/{_NEWEST}{file}")
    for options in ({}, {"step": 3}, {"fall_back": False}):
        assert _restore(mirrored, hook, **options) == 3
        report = mirrored.last_restore
        assert report is not None
        assert (report.root, report.unreadable) == (str(tmp_path / "mirror"), ())


def test_steps_of_a_mirror_that_cannot_be_read_are_no_start_from_scratch(tmp_path: Path) -> None:
    """Only the mirror has steps, and it is not known which."""
    with opened(tmp_path / "mirror") as checkpointer:
        save(checkpointer, 1)
    with opened(tmp_path / "root", mirror=ckpt.Mirror(tmp_path / "mirror")) as checkpointer:
        with pytest.raises(StorageError, match="may have a newer step"):
            _restore(checkpointer, FailingLooks(errno.EIO, "step_00000001/intent.json"))
        assert _restore(checkpointer, FailingLooks(0)) == 1


# -- several ranks -----------------------------------------------------------------------------------------------------


def _unreadable_for_rank_1(rank: int, world_size: int, root: Path) -> list[Any]:
    def state(step: int) -> dict[str, Any]:
        return {"shared": torch.full((300,), step), "own": ckpt.PerRank(torch.full((100,), 10 * step + rank))}

    with ckpt.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, state(step), step)
    torch.distributed.barrier()
    found: list[Any] = []
    for path in ("step_00000002/zarr.json", "packs/000/rank_00001_000", "step_00000002/intent.json", "step_0000000"):
        restored = state(0)
        with ckpt.Checkpointer(root) as checkpointer:
            hook = FailingLooks(errno.EIO, path if rank == 1 else None)
            try:
                with Syscalls().hooked(hook):
                    step = checkpointer.restore(restored)
            except StorageError as error:
                found.append(str(error))
            else:
                assert step is not None
                assert str(restored) == str(state(step))
                found.append(step)
    return found


def test_what_one_rank_cannot_read_sends_all_ranks_back(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(_unreadable_for_rank_1, 2, tmp_path)):
        document, pack, intent, everything = result.value
        assert (document, intent) == (1, 1)
        assert "rank_00001_000" in pack, "of each step"
        assert "Input/output error" in everything
        assert rank == 1 or everything.startswith("rank 1 could not")


def test_a_step_that_is_not_there_is_still_not_found(checkpointer: ckpt.Checkpointer) -> None:
    with pytest.raises(CheckpointNotFoundError):
        _restore(checkpointer, FailingLooks(0), step=7)
