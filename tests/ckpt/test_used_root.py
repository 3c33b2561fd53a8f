"""A save into a root with the steps of another training is refused; `start_over` begins a training there."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from inspect_ckpt.__main__ import main as inspect_ckpt

import ckpt
from ckpt.errors import CheckpointCorruptError, CheckpointExistsError, FencedError, StorageError
from ckpt.saving import write
from ckpt.storage import roots
from ckpt.storage.root import CheckpointRoot
from tests.support import run_ranks
from tests.support.saves import save_here

THREE_WAYS = r"call restore\(state\) before the first save.*give another root; or call start_over\("


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((5_000,), value), "number": value}


def _save_all(root: str | Path, steps: tuple[int, ...]) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        for step in steps:
            save_here(checkpointer, _state(float(step)), step)


def _restored(root: str | Path) -> tuple[int | None, float]:
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        state = _state(-1.0)
        return checkpointer.restore(state), state["number"]


def _files(root: Path) -> dict[str, int]:
    found = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    return {path: os.stat(path).st_mtime_ns for path in found}


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function after which this process knows of roots what one knows that has just been started."""

    def forget() -> None:
        monkeypatch.setattr(roots, "_seen", set())

    forget()
    return forget


@pytest.fixture(params=["directory", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{'directory://' if request.param == 'store' else ''}{tmp_path}/root"


# -- refused -----------------------------------------------------------------------------------------------------------


def _trains(rank: int, world_size: int, root: Path) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(_state(0.0)) is None
        for step in (200, 300):
            checkpointer.save(_state(float(step)), step)


def _is_refused(rank: int, world_size: int, root: Path) -> str:
    with ckpt.Checkpointer(root, keep=2) as checkpointer:
        checkpointer.warmup(_state(0.0))
        for step in (10, 400):
            with pytest.raises(CheckpointExistsError, match=THREE_WAYS) as refused:
                checkpointer.async_save(_state(float(step)), step)
        assert checkpointer.queue.get_num_unfinalized_calls() == 0
    return str(refused.value)


def _resumes(rank: int, world_size: int, root: Path) -> list[int]:
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.raises(CheckpointExistsError):
            checkpointer.async_save(_state(0.0), 310)
        assert checkpointer.restore(_state(0.0)) == 300
        checkpointer.save(_state(310.0), 310)
        return checkpointer.all_steps()


def test_a_new_training_in_a_used_root_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """With ``keep=2`` the root had 20, 30, 200 and 300 then, of two trainings, and a restart took 300."""
    run_ranks(_trains, 2, tmp_path)
    before = _files(tmp_path)
    for result in run_ranks(_is_refused, 2, tmp_path):
        assert "has 2 steps, the newest are [200, 300]" in result.value
    assert _files(tmp_path) == before
    for result in run_ranks(_resumes, 2, tmp_path):
        assert result.value == [200, 300, 310]


def test_nothing_is_refused_after_a_restore(root: str, other_process: Any) -> None:
    """None for an empty root, an older step, a part of the state: each says what training goes on from."""
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(_state(0.0)) is None
        save_here(checkpointer, _state(1.0), 1)
        save_here(checkpointer, _state(2.0), 2)
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(_state(0.0), only=["w"]) == 2
        save_here(checkpointer, _state(3.0), 3)
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(_state(0.0), step=1) == 1
        save_here(checkpointer, _state(-2.0), 2)
        assert checkpointer.all_steps() == [1, 2]


@pytest.mark.parametrize("seen", ["saved", "restored", "recovered", "loaded", "opened"])
def test_another_part_of_the_program_goes_on_behind_the_newest_step(seen: str, root: str, other_process: Any) -> None:
    _save_all(root, (10, 20))
    if seen != "saved":
        other_process()
    if seen == "restored":
        assert _restored(root) == (20, 20.0)
    elif seen == "recovered":
        with ckpt.Checkpointer(root) as checkpointer:
            assert checkpointer.recover() == [10, 20]
    elif seen == "loaded":
        assert ckpt.load(root)["number"] == 20.0
    elif seen == "opened":
        step = f"{root}/step_00000010" if "://" not in root else root
        ckpt.open(step).close()
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.raises(CheckpointExistsError, match=r"the save of step 15 would mix"):
            save_here(checkpointer, _state(15.0), 15)
        with pytest.raises(CheckpointExistsError, match=r"step 20 is already published"):
            save_here(checkpointer, _state(20.0), 20)
        save_here(checkpointer, _state(30.0), 30)
        assert checkpointer.all_steps() == [10, 20, 30]


def test_a_root_is_the_same_one_by_another_path(tmp_path: Path, other_process: Any) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    _save_all(real, (10,))
    link.symlink_to("real")
    for loaded, saved, step in ((link, real, 20), (real, link, 30)):
        other_process()
        assert ckpt.load(loaded)["number"] == step - 10
        with ckpt.Checkpointer(saved) as checkpointer:
            save_here(checkpointer, _state(float(step)), step)


def test_a_save_that_a_killed_run_has_completely_written_counts(
    root: str, other_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes a step in the first save of the next run."""
    _leave_complete(root, 2, monkeypatch)
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.raises(CheckpointExistsError, match="has step 2"):
            save_here(checkpointer, _state(3.0), 3)
        assert checkpointer.restore(_state(0.0)) == 2
        save_here(checkpointer, _state(3.0), 3)


class _Stop(BaseException):
    pass


def _leave_complete(root: str, step: int, monkeypatch: pytest.MonkeyPatch, run: str | None = None) -> None:
    """Leave a save that is complete but not published, as if the program had been killed in it."""

    def stop(*_: Any, **__: Any) -> Any:
        raise _Stop

    checkpointer = ckpt.Checkpointer(root)
    if run is not None:
        assert checkpointer.start_over(run)
    with monkeypatch.context() as patch:
        patch.setattr(write, "publish", stop)
        with pytest.raises(_Stop):
            save_here(checkpointer, _state(float(step)), step)
    checkpointer.__exit__(_Stop, _Stop(), None)


def test_a_refused_job_fences_none_that_runs(root: str, other_process: Any) -> None:
    with ckpt.Checkpointer(root) as running:
        save_here(running, _state(1.0), 1)
        other_process()
        with ckpt.Checkpointer(root) as other:
            other.warmup(_state(0.0))
            with pytest.raises(CheckpointExistsError):
                save_here(other, _state(2.0), 2)
        save_here(running, _state(2.0), 2)


@pytest.mark.parametrize("other", [0.0, None], ids=["the same structure", "another structure"])
def test_a_warmup_after_a_snapshot_claims_nothing(other: float | None, root: str, other_process: Any) -> None:
    """It is no save, so it is not refused; the first save is."""
    _save_all(root, (10, 20))
    other_process()
    with ckpt.Checkpointer(root, snapshots=1) as checkpointer:
        checkpointer.snapshot(_state(1.0), 100)
        checkpointer.warmup(_state(0.0) if other is not None else {"w": torch.zeros(3)})
        with pytest.raises(CheckpointExistsError, match="the save of step 30 would mix"):
            save_here(checkpointer, _state(30.0), 30)


def test_steps_can_be_deleted_without_a_restore(root: str, other_process: Any) -> None:
    _save_all(root, (1, 2))
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.delete(1)
        with pytest.raises(CheckpointExistsError):
            save_here(checkpointer, _state(3.0), 3)


# -- start_over --------------------------------------------------------------------------------------------------------


def test_a_training_starts_over_once(root: str, other_process: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A job that is requeued calls it again, with the same name, and loses nothing."""
    _save_all(root, (200, 300))
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.start_over("lr 3e-4")
        assert checkpointer.restore(_state(0.0)) is None
        assert checkpointer.recover() == []
        assert checkpointer.all_steps() == [200, 300]  # nothing is moved before there is something new
        with caplog.at_level(logging.WARNING, "ckpt"):
            save_here(checkpointer, _state(-10.0), 10)
        assert checkpointer.all_steps() == [10]
        assert "training began anew; moved to" in caplog.text
        save_here(checkpointer, _state(-20.0), 20)
    for step in (30, 40):
        other_process()
        with ckpt.Checkpointer(root) as checkpointer:
            assert not checkpointer.start_over("lr 3e-4")
            assert checkpointer.restore(_state(0.0)) == step - 10
            assert checkpointer.last_restore is not None
            assert checkpointer.last_restore.run == "lr 3e-4"
            save_here(checkpointer, _state(-float(step)), step)
            assert checkpointer.all_steps() == list(range(10, step + 10, 10))
    with ckpt.open(root) as opened:
        assert opened.summary["run"] == "lr 3e-4"
    with ckpt.Checkpointer(root) as checkpointer:  # a resumed job need not call it, and its steps are of the run
        assert checkpointer.restore(_state(0.0)) == 40
        save_here(checkpointer, _state(-50.0), 50)
    with ckpt.Checkpointer(root) as checkpointer:
        assert not checkpointer.start_over("lr 3e-4")
        assert checkpointer.start_over("lr 1e-4")
        save_here(checkpointer, _state(0.0), 5)
        assert checkpointer.all_steps() == [5]


def test_a_run_that_starts_from_a_step_of_another_keeps_its_name(root: str, other_process: Any) -> None:
    """Its steps would be moved aside by each start of the job, if they were of no run."""
    _save_all(root, (10, 20))
    for step in (30, 40):
        other_process()
        with ckpt.Checkpointer(root) as checkpointer:
            begins = checkpointer.start_over("b")
            assert begins == (step == 30)
            assert checkpointer.restore(_state(0.0), step=10 if begins else None) == (10 if begins else 30)
            save_here(checkpointer, _state(float(step)), step)
    with ckpt.Checkpointer(root) as checkpointer:
        assert not checkpointer.start_over("b")
        assert checkpointer.all_steps() == [10, 30, 40]
        assert checkpointer.restore(_state(0.0)) == 40
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.run == "b"


@pytest.mark.parametrize("damaged", [("zarr.json",), ("intent.json",), ("zarr.json", "intent.json")])
def test_a_run_of_which_all_steps_are_damaged_is_not_begun_anew(
    damaged: tuple[str, ...], tmp_path: Path, other_process: Any
) -> None:
    """Two documents have its name; without both it is not known which run it is, and none is begun."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.start_over("b")
        for step in (10, 20):
            save_here(checkpointer, _state(float(step)), step)
    for path in (path for name in damaged for path in tmp_path.glob(f"step_*/{name}")):
        path.write_bytes(b"{")
    other_process()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        if len(damaged) == 1:
            assert not checkpointer.start_over("b")
        else:
            with pytest.raises(CheckpointCorruptError, match=r"the steps \[10, 20\] of .* inspect_ckpt rm .* 10 20;"):
                checkpointer.start_over("b")
        with pytest.raises(CheckpointExistsError, match="has 2 steps"):
            save_here(checkpointer, _state(30.0), 30)
        assert checkpointer.all_steps() == [10, 20]


@pytest.mark.parametrize("older", ["a", None])
def test_a_damaged_step_behind_those_of_another_run_may_be_of_the_same(
    older: str | None, tmp_path: Path, other_process: Any
) -> None:
    """As of a run that began with a step of another one. Its own is not moved aside, nor mixed with a new training."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        if older is not None:
            assert checkpointer.start_over(older)
        save_here(checkpointer, _state(10.0), 10)
    other_process()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.start_over("b")
        assert checkpointer.restore(_state(0.0), step=10) == 10
        for step in (20, 30):
            save_here(checkpointer, _state(float(step)), step)

    def damage(step: int) -> None:
        for name in ("zarr.json", "intent.json"):
            (tmp_path / f"step_{step:08d}" / name).write_bytes(b"{")

    damage(30)
    other_process()
    with ckpt.Checkpointer(tmp_path) as checkpointer:  # step 20 tells that the run has begun
        assert not checkpointer.start_over("b")
        assert checkpointer.restore(_state(0.0)) == 20
    damage(20)
    other_process()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            CheckpointCorruptError,
            match=r"the steps \[20, 30\] of .* are of, as they are damaged, and step 10 is of another.* rm .* 20 30;",
        ):
            checkpointer.start_over("b")
        with pytest.raises(CheckpointExistsError, match="has 3 steps"):
            save_here(checkpointer, _state(5.0), 5)
        assert checkpointer.all_steps() == [10, 20, 30]
    assert inspect_ckpt(["rm", str(tmp_path), "20", "30", "--yes"]) == 0
    other_process()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.start_over("b")


def test_a_run_is_not_begun_anew_while_storage_fails(
    tmp_path: Path, other_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.start_over("b")
        save_here(checkpointer, _state(10.0), 10)
    other_process()
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointRoot, "source_of", _fails)
            with pytest.raises(StorageError, match="Stale file handle"):
                checkpointer.start_over("b")
        assert not checkpointer.start_over("b")
        assert checkpointer.restore(_state(0.0)) == 10


def _fails(root: CheckpointRoot, step: int) -> Any:
    raise StorageError(f"{root.path}/step_{step:08d}: Stale file handle")


def test_a_requeued_job_that_forgets_to_restore_is_refused(root: str, other_process: Any) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.start_over("a")
        save_here(checkpointer, _state(1.0), 1)
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        assert not checkpointer.start_over("a")
        with pytest.raises(CheckpointExistsError):
            save_here(checkpointer, _state(2.0), 2)


@pytest.mark.parametrize("again", ["a", None], ids=["the same again", "another start"])
def test_a_crash_before_the_first_save_of_the_new_training(root: str, again: str | None, other_process: Any) -> None:
    """The root is as it was: the next start begins the training, or goes on with the old one."""
    _save_all(root, (200, 300))
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.start_over("a")
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        if again is None:
            assert checkpointer.restore(_state(0.0)) == 300
        else:
            assert checkpointer.start_over(again)
            assert checkpointer.restore(_state(0.0)) is None


def test_a_crash_in_the_first_save_of_the_new_training(
    root: str, other_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written, and had moved nothing aside yet: the next start begins again, and moves it aside, too."""
    _save_all(root, (200, 300))
    _leave_complete(root, 10, monkeypatch, run="a")
    other_process()
    with ckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.start_over("a")
        assert checkpointer.restore(_state(0.0)) is None
        save_here(checkpointer, _state(-10.0), 10)
        assert checkpointer.all_steps() == [10]
    assert _restored(root) == (10, -10.0)


def test_a_fault_before_the_first_save_does_not_bring_back_the_old_training(tmp_path: Path, other_process: Any) -> None:
    _save_all(tmp_path, (200, 300))
    state = _state(0.0)
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.register(state=state)
        assert checkpointer.start_over("a")
        checkpointer.bridge.recover_from_fault(None)
        assert state["number"] == 0.0
        assert checkpointer.start_over("a")  # the function runs again
        assert checkpointer.restore(state) is None
        save_here(checkpointer, {"state": _state(10.0)}, 10)
        checkpointer.bridge.recover_from_fault(None)
        assert state["number"] == 10.0
        assert not checkpointer.start_over("a")
        save_here(checkpointer, {"state": _state(20.0)}, 20)
    with ckpt.open(tmp_path) as opened:
        assert (opened.step, opened.summary["run"]) == (20, "a")


def test_snapshots_of_the_old_training_are_given_up(tmp_path: Path, other_process: Any) -> None:
    with ckpt.Checkpointer(tmp_path, snapshots=1) as checkpointer:
        save_here(checkpointer, _state(200.0), 200)
        checkpointer.snapshot(_state(201.0), 201)
        assert checkpointer.start_over("a")
        assert checkpointer.restore(_state(0.0)) is None
        checkpointer.snapshot(_state(1.0), 1)
        assert not checkpointer.start_over("a")
        state = _state(0.0)
        assert checkpointer.restore(state) == 1
        assert state["number"] == 1.0
        save_here(checkpointer, _state(10.0), 10)
        assert checkpointer.all_steps() == [10]
    with ckpt.open(tmp_path) as opened:
        assert opened.summary["run"] == "a"


def test_steps_that_only_the_mirror_has_are_of_the_old_training_too(tmp_path: Path, other_process: Any) -> None:
    first, mirror = tmp_path / "first", tmp_path / "mirror"
    with ckpt.Checkpointer(first, mirror=mirror) as checkpointer:
        checkpointer.save(_state(300.0), 300)
    assert CheckpointRoot(str(mirror)).steps() == [300]
    CheckpointRoot(str(first)).remove_step(300, CheckpointRoot(str(first)).ownership.newest())
    with ckpt.Checkpointer(first, mirror=mirror) as checkpointer:
        assert checkpointer.start_over("a")
        assert checkpointer.restore(_state(0.0)) is None
        checkpointer.save(_state(10.0), 10)
    assert CheckpointRoot(str(mirror)).steps() == [10]
    other_process()
    with ckpt.Checkpointer(first, mirror=mirror) as checkpointer:
        assert not checkpointer.start_over("a")
        assert checkpointer.restore(_state(0.0)) == 10


def _start_over(rank: int, world_size: int, root: Path) -> list[int]:
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.raises(ckpt.CheckpointError, match=r"run 'a0' on rank 0; .*'a1' on rank 1"):
            checkpointer.start_over(f"a{rank}")
        assert checkpointer.start_over("a")
        assert checkpointer.restore(_state(0.0)) is None
        checkpointer.save(_state(10.0), 10)
        assert not checkpointer.start_over("a")
        return checkpointer.all_steps()


def test_all_ranks_start_over(tmp_path: Path) -> None:
    _save_all(tmp_path, (200, 300))
    for result in run_ranks(_start_over, 2, tmp_path):
        assert result.value == [10]


def test_a_job_that_starts_over_fences_the_one_before(root: str, other_process: Any) -> None:
    with ckpt.Checkpointer(root) as running:
        save_here(running, _state(1.0), 1)
        with ckpt.Checkpointer(root) as other:
            assert other.start_over("a")
            save_here(running, _state(2.0), 2)  # nothing is claimed yet
            save_here(other, _state(1.0), 1)
        with pytest.raises(FencedError):
            save_here(running, _state(3.0), 3)
        assert running.all_steps() == [1]


@pytest.mark.parametrize("run", ["", " ", "a\nb", "x" * 201, 7, None])
def test_a_run_has_a_name(run: Any, tmp_path: Path) -> None:
    with (
        ckpt.Checkpointer(tmp_path) as checkpointer,
        pytest.raises((TypeError, ValueError), match="run must be a name"),
    ):
        checkpointer.start_over(run)
    with ckpt.Checkpointer(tmp_path, read_only=True) as reader, pytest.raises(ckpt.CheckpointError, match="read_only"):
        reader.start_over("a")
