"""Retention deletes files after the answer, in the background, each rank its own."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.saving.remover import Remover
from ckpt.saving.retention import Latest, Retention, retain
from ckpt.storage.commit import PendingSave
from ckpt.storage.names import SaveId, pack_file, parse_save_name, part_name
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.crash.killers import wait_until
from tests.ckpt.storage.small_saves import assert_whole, opened, save
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here
from tests.support.selection import full_only

_RANKS = 2


def _publish(root: CheckpointRoot, step: int, token: int) -> Path:
    """Publish a step that has the files which ranks write."""
    pending = PendingSave(root, SaveId(step, token, f"{step:016x}"))
    pending.begin(_RANKS, "plan", {})
    for rank in range(_RANKS):
        for name in (pack_file(rank, 0), pack_file(rank, 1), part_name(rank)):
            path = Path(pending.path, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"data")
    pending.publish()
    return Path(root.step_path(step))


def _two_steps(folder: Path) -> tuple[CheckpointRoot, int]:
    root = CheckpointRoot(str(folder))
    root.make()
    token = root.ownership.claim(0)
    for step in (1, 2):
        _publish(root, step, token)
    return root, token


def _files(path: str) -> set[str]:
    return {str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file()}


def _of(rank: int) -> set[str]:
    return {pack_file(rank, 0), pack_file(rank, 1), part_name(rank)}


def _run(remover: Remover) -> None:
    """Let it do one round."""
    remover.start()
    thread = remover._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


def test_each_rank_deletes_its_own_files_and_the_coordinator_what_is_left(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    root, token = _two_steps(tmp_path)
    retain(root, Retention(Latest(1)), token, 2, "plan", {})
    assert root.steps() == [2]
    removed = root.removed()[0].source.path
    assert _files(removed) == _of(0) | _of(1) | {"intent.json"}
    _run(Remover(root, 1, _RANKS))
    assert _files(removed) == _of(0) | {"intent.json"}
    coordinator = Remover(root, 0, _RANKS)
    _run(coordinator)
    assert _files(removed) == {"intent.json"}
    _run(coordinator)
    assert root.removed() == []
    assert _files(root.step_path(2)) == _of(0) | _of(1) | {"intent.json"}


def test_the_coordinator_deletes_everything_at_its_end(tmp_path: Path) -> None:
    root, token = _two_steps(tmp_path)
    retain(root, Retention(Latest(1)), token, 2, "plan", {})
    coordinator = Remover(root, 0, _RANKS)
    _run(coordinator)
    assert len(root.removed()) == 1
    coordinator.close()
    assert root.removed() == []


def test_a_node_deletes_at_the_end_what_was_removed_after_its_last_round(tmp_path: Path) -> None:
    """Rank 0 may remove steps long after the other ranks have learned the outcome of the save."""
    root, token = _two_steps(tmp_path / "root")
    packs = NodePacks(str(tmp_path / "node"), root)
    packs.claim()
    saves = [root.save_of(step) for step in (1, 2)]
    for name in saves:
        save = parse_save_name(str(name))
        assert save is not None
        packs.writer(save, 1, threads=1)
        packs.note_decided(save)
    remover = Remover(root, 1, _RANKS, packs)
    _run(remover)
    assert {path.name for path in (tmp_path / "node").glob("step_*")} == set(saves)
    retain(root, Retention(Latest(1)), token, 2, "plan", {})
    remover.close()
    assert {path.name for path in (tmp_path / "node").glob("step_*")} == {saves[1]}


def test_nothing_is_deleted_while_the_process_writes_a_save(tmp_path: Path) -> None:
    root, token = _two_steps(tmp_path)
    retain(root, Retention(Latest(1)), token, 2, "plan", {})
    removed = root.removed()[0].source.path
    remover = Remover(root, 1, _RANKS)
    with remover.held():
        remover.start()
        thread = remover._thread
        assert thread is not None
        thread.join(1.0)  # five times as long as it waits before it begins
        assert thread.is_alive()
        assert _files(removed) >= _of(1)
    wait_until(lambda: not _files(removed) & _of(1), "the files to be deleted")
    remover.close()


def test_two_removed_steps_are_deleted_even_while_a_save_is_written(tmp_path: Path) -> None:
    """Else a job that saves all the time would fill the disk."""
    root, token = _two_steps(tmp_path)
    _publish(root, 3, token)
    retain(root, Retention(Latest(1)), token, 3, "plan", {})
    assert len(root.removed()) == 2
    remover = Remover(root, 0, 1)
    with remover.held():
        remover.start()
        wait_until(lambda: not root.removed(), "the steps to be deleted")
    remover.close()


@pytest.mark.parametrize("where", ["packs", "packs/000"])
def test_links_are_not_followed(tmp_path: Path, where: str) -> None:
    root, token = _two_steps(tmp_path / "root")
    directory, outside = Path(root.step_path(1), where), tmp_path / "outside"
    directory.rename(outside)
    directory.symlink_to(outside)
    content = _files(str(outside))
    assert len(content) == 2 * _RANKS
    retain(root, Retention(Latest(1)), token, 2, "plan", {})
    for rank in (1, 0):
        remover = Remover(root, rank, _RANKS)
        remover.start()
        remover.close()
    assert root.removed() == []
    assert _files(str(outside)) == content


def test_a_step_of_a_later_owner_is_not_touched(tmp_path: Path) -> None:
    """An earlier owner has moved it, and died before it could move it back."""
    root, token = _two_steps(tmp_path)
    later = root.ownership.claim(token)
    step = _publish(root, 3, later)
    content = _files(str(step))
    moved = Path(root.abandoned_path, f"step_00000003-moving-{token}-0123abcd")
    step.rename(moved)
    assert root.removed() == []
    _run(Remover(root, 1, 2))
    assert _files(str(moved)) == content
    root.clean()
    assert root.steps() == [1, 2, 3]
    assert _files(str(step)) == content


def _state(step: int) -> dict[str, Any]:
    import torch

    return {f"w{i}": torch.full((1000,), float(step + i)) for i in range(40)}


def _keep_one(rank: int, world_size: int, root: Path) -> None:
    with ckpt.Checkpointer(root, keep=1) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(_state(step), step)
            assert rank != 0 or checkpointer.all_steps() == [step]  # the others may know the outcome earlier


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=full_only), 4])
def test_a_job_leaves_nothing_but_the_steps_that_it_keeps(tmp_path: Path, world_size: int) -> None:
    run_ranks(_keep_one, world_size, tmp_path)
    assert CheckpointRoot(str(tmp_path)).steps() == [5]
    assert os.listdir(tmp_path / ".abandoned") == []
    assert os.listdir(tmp_path / ".pending") == []


def test_the_next_run_deletes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    with ckpt.Checkpointer(root.path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(step), step)
    assert root.retire_step(1, None) is not None  # and then it was killed
    with ckpt.Checkpointer(root.path) as checkpointer:
        assert checkpointer.restore(_state(0)) == 2
        assert len(root.removed()) == 1, "the restore has waited for a removal"
        checkpointer.save(_state(3), 3)
    assert root.removed() == []
    assert root.steps() == [2, 3]


# -- what cannot be removed --------------------------------------------------------------------------------------------


def _refusing(*names: str) -> Callable[[Call, Callable[..., Any]], Any]:
    """Return a hook by which what has one of these names cannot be renamed or deleted, as if it were immutable."""

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name in ("rename", "renameat2", "unlink", "rmdir") and str(call.args[0]).endswith(names):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return perform(*call.args)

    return hook


@pytest.mark.parametrize("reuse_files", [False, True])
def test_a_step_that_cannot_be_renamed_is_skipped_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reuse_files: bool
) -> None:
    root, token = _two_steps(tmp_path)
    for step in (3, 4):
        _publish(root, step, token)
    known: set[int | str] = set()
    retention = Retention(Latest(1), reuse_files=reuse_files)
    for newest in (4, 5):
        with Syscalls().hooked(_refusing("step_00000002")):
            retained = retain(root, retention, token, newest, "plan", {})
        retained.warn(known, root.path)
        assert root.steps() == [2, newest]
        _publish(root, newest + 1, token)
    warnings = [record for record in caplog.records if "cannot be removed" in record.message]
    assert len(warnings) == 1
    assert "step 2 of" in warnings[0].message
    retain(root, retention, token, 6, "plan", {}).warn(known, root.path)
    assert root.steps() == [6]
    assert known == set()


def test_a_step_whose_second_rename_fails_is_published_again(tmp_path: Path) -> None:
    root, token = _two_steps(tmp_path)

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "renameat2" and "-removed-" in str(call.args[1]):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return perform(*call.args)

    with Syscalls().hooked(hook):
        assert retain(root, Retention(Latest(1)), token, 2, "plan", {}).failed.keys() == {1}
    assert root.steps() == [1, 2]


@pytest.mark.parametrize("how", ["remover", "clean"])
def test_files_that_cannot_be_deleted_do_not_keep_the_others(tmp_path: Path, how: str) -> None:
    """Immutable files, in the middle of what is to be deleted; needs the right to make such."""
    root, token = _two_steps(tmp_path)
    for step in (3, 4):
        _publish(root, step, token)
    files = [Path(root.step_path(step), pack_file(0, 0)) for step in (1, 2)]
    immutable = [path for path in files if subprocess.run(["chattr", "+i", path], capture_output=True).returncode == 0]
    try:
        if len(immutable) < len(files):
            pytest.skip("files cannot be made immutable here")
        retain(root, Retention(Latest(1)), token, 4, "plan", {})
        immutable = [Path(each.source.path, pack_file(0, 0)) for each in root.removed() if each.step != 3]
        if how == "clean":
            root.clean()
        else:
            for rank in (1, 0):
                remover = Remover(root, rank, _RANKS)
                remover.start()
                remover.close()
        left = {name for each in root.removed() for name in _files(each.source.path)}
        assert left == {pack_file(0, 0)}
        assert len(root.removed()) == 2
    finally:
        subprocess.run(["chattr", "-i", *immutable], check=bool(immutable))


def test_a_recycled_directory_that_cannot_be_renamed_does_not_end_saves(tmp_path: Path) -> None:
    with opened(tmp_path, keep=1, reuse_files=True) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
        (plan,) = os.listdir(tmp_path / ".retired")
        (tmp_path / ".retired" / "other").mkdir()
        with Syscalls().hooked(_refusing("/other", plan, "packs/000/rank_00000_000")):
            for step in (3, 4):
                save(checkpointer, step)
    assert CheckpointRoot(str(tmp_path)).steps() == [4]
    assert assert_whole(tmp_path) == [4]
