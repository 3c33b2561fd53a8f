"""Saves that write over the files of a step that retention removed: they make no file, and never touch another's."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage import directories, files
from ckpt.storage.directories import lock_shared
from ckpt.storage.directory_root import recycled_path
from ckpt.storage.documents import intent_of_step
from ckpt.storage.root import CheckpointRoot
from ckpt.validation import validate
from tests.support import LeakCheck, run_ranks
from tests.support.saves import save_here

_FILE_BYTES = 64 << 10
_PACKS = Path("packs", "000")


def _state(value: float, count: int = 30_000) -> dict[str, Any]:
    weights = {f"layer{n}": torch.arange(count, dtype=torch.float32) * value + n for n in range(3)}
    return {"weights": weights, "small": torch.tensor([value, 2.0]), "value": value}


def _open(root: Path, keep: int | None = 1, **staging: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(root, keep=keep, staging=ckpt.Staging(file_bytes=_FILE_BYTES, **staging))


def _assert_restored(checkpointer: ckpt.Checkpointer, step: int, count: int = 30_000) -> None:
    state, expected = _state(-1.0, count), _state(float(step), count)
    assert checkpointer.restore(state) == step
    assert state["value"] == step
    assert all(tensor.equal(expected["weights"][name]) for name, tensor in state["weights"].items())
    assert state["small"].equal(expected["small"])


def _assert_whole(root: Path, step: int, count: int = 30_000) -> None:
    """As a new program finds it, without staging memory."""
    path = CheckpointRoot(str(root)).step_path(step)
    assert not validate(path).problems
    with ckpt.Checkpointer(root) as checkpointer:
        _assert_restored(checkpointer, step, count)


def _files(step: Path) -> dict[str, int]:
    """The files of the packs, and which they are."""
    return {str(path.relative_to(step)): path.stat().st_ino for path in (step / "packs").rglob("*") if path.is_file()}


def _retired(root: Path) -> list[str]:
    return os.listdir(root / ".retired") if (root / ".retired").exists() else []


def test_a_save_makes_no_file(tmp_path: Path, leak_check: LeakCheck) -> None:
    with _open(tmp_path) as checkpointer:
        made = []
        for step in range(1, 6):
            checkpointer.save(_state(float(step)), step)
            made.append(_files(tmp_path / f"step_0000000{step}"))
            assert checkpointer.all_steps() == [step]
        assert len(made[0]) > 3
        assert made[0] == made[2] == made[4]
        assert made[1] == made[3]
        assert not set(made[0].values()) & set(made[1].values())
        assert len(_retired(tmp_path)) == 1
    assert not _retired(tmp_path)
    _assert_whole(tmp_path, 5)


def _save_on_ranks(rank: int, world_size: int, root: Path) -> list[dict[str, int]]:
    with _open(root) as checkpointer:
        made = []
        for step in range(1, 5):
            checkpointer.save(_state(float(step)), step)
            made.append(_files(root / f"step_0000000{step}"))
            torch.distributed.barrier()  # rank 0 has kept the files of the step before by now
        return made


def test_by_all_ranks(tmp_path: Path) -> None:
    made = [result.value for result in run_ranks(_save_on_ranks, 2, tmp_path)]
    assert made[0] == made[1]
    assert made[0][0] == made[0][2]
    assert made[0][1] == made[0][3]
    _assert_whole(tmp_path, 4)


def test_several_steps_at_once(tmp_path: Path) -> None:
    with _open(tmp_path, keep=3) as checkpointer:
        for step in range(1, 4):
            save_here(checkpointer, _state(float(step)), step)
    with _open(tmp_path) as checkpointer:
        save_here(checkpointer, _state(4.0), 4)
        assert checkpointer.all_steps() == [4]
        assert len(_retired(tmp_path)) == 1
        save_here(checkpointer, _state(5.0), 5)
    _assert_whole(tmp_path, 5)


def test_another_structure(tmp_path: Path) -> None:
    with _open(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
        assert len(_retired(tmp_path)) == 1
        save_here(checkpointer, _state(3.0, 40_000), 3)
        assert not _retired(tmp_path), "the files of the plan before stay"
        for step in (4, 5):
            save_here(checkpointer, _state(float(step), 40_000), step)
    _assert_whole(tmp_path, 5, 40_000)


def test_one_that_is_being_read_is_left_alone(tmp_path: Path) -> None:
    with _open(tmp_path) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        before = _files(tmp_path / "step_00000001")
        reader = lock_shared(str(tmp_path / "step_00000001"))
        assert reader is not None
        with reader:
            for step in (2, 3, 4):
                save_here(checkpointer, _state(float(step)), step)
            assert checkpointer.all_steps() == [1, 4]
            assert _files(tmp_path / "step_00000001") == before
            assert not validate(str(tmp_path / "step_00000001")).problems
        save_here(checkpointer, _state(5.0), 5)
        assert checkpointer.all_steps() == [5]
    _assert_whole(tmp_path, 5)


def test_what_is_linked_elsewhere_does_not_change(tmp_path: Path) -> None:
    """A copy by hard links is how some keep a step for ever."""
    root, copy = tmp_path / "root", tmp_path / "copy" / "step_00000001"
    with _open(root) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        step = root / "step_00000001"
        for path in step.rglob("*"):
            target = copy / path.relative_to(step)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                os.link(path, target)
        for number in (2, 3, 4):
            save_here(checkpointer, _state(float(number)), number)
    assert not validate(str(copy)).problems
    _assert_whole(root, 4)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_links_are_not_followed(tmp_path: Path, what: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    with _open(root) as checkpointer:
        save_here(checkpointer, _state(1.0), 1)
        packs = root / "step_00000001" / _PACKS
        if what == "directory":
            packs.rename(outside)
            packs.symlink_to(outside)
        else:
            outside.mkdir()
            for path in list(packs.iterdir()):
                path.rename(outside / path.name)
                path.symlink_to(outside / path.name)
        content = {path.name: path.read_bytes() for path in outside.iterdir()}
        assert len(content) > 1
        for step in (2, 3, 4):
            save_here(checkpointer, _state(float(step)), step)
        assert {path.name: path.read_bytes() for path in outside.iterdir()} == content
    _assert_whole(root, 4)


def test_files_that_were_changed_are_mended(tmp_path: Path) -> None:
    with _open(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
        (plan,) = _retired(tmp_path)
        packs = tmp_path / ".retired" / plan / _PACKS
        (packs / "rank_00000_000").write_bytes(b"x" * 1_000_000)
        (packs / "rank_00000_001").write_bytes(b"")
        (packs / "rank_00000_002").unlink()
        save_here(checkpointer, _state(3.0), 3)
    _assert_whole(tmp_path, 3)


def test_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is a process of its own: here it runs in this one."""
    monkeypatch.setattr(files, "_write_direct", lambda *_: False)
    with _open(tmp_path) as checkpointer:
        made = []
        for step in range(1, 5):
            request = checkpointer.save_request(_state(float(step)), step)
            request.execute_sync()
            made.append(_files(tmp_path / f"step_0000000{step}"))
    assert made[0] == made[2]
    _assert_whole(tmp_path, 4)


def test_what_an_earlier_run_left(tmp_path: Path) -> None:
    with _open(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
        (plan,) = _retired(tmp_path)
        (tmp_path / ".retired" / plan).rename(tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / ".retired" / plan)  # as after a crash
    left = _files(tmp_path / ".retired" / plan)
    with _open(tmp_path) as checkpointer:
        save_here(checkpointer, _state(3.0), 3)
        assert _files(tmp_path / "step_00000003") == left
        (plan,) = _retired(tmp_path)
        (tmp_path / ".retired" / plan).rename(tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / ".retired" / plan)
    with _open(tmp_path, reuse_files=False) as checkpointer:
        save_here(checkpointer, _state(4.0), 4)
        assert not _retired(tmp_path), "nobody will use them"
        assert not set(_files(tmp_path / "step_00000004").values()) & set(left.values())
    _assert_whole(tmp_path, 4)


@pytest.mark.parametrize("options", [{"keep": None}, {"compression": "zstd"}], ids=str)
def test_options_that_do_not_go_together(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it needs keep, no compression"):
        _open(tmp_path, reuse_files=True, **options)


_CALLS = [(files, "remove")]
_CALLS += [(directories, name) for name in ("make_directories", "rename_directory", "remove_tree", "fsync_directory")]


def _die_in(root: str, plan: str, calls: int) -> None:
    """Retire step 1; killed when the file system was asked so many times. The rest is done if it was fewer."""
    left = calls

    def counting(original: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return original(*arguments, **more)

        return call

    for module, name in _CALLS:
        setattr(module, name, counting(getattr(module, name)))
    CheckpointRoot(root).retire_step(1, None, plan)


def test_killed_while_it_retires_a_step(tmp_path: Path) -> None:
    """At each call that changes something: the step is whole or gone, and the next save is like any other."""
    before = tmp_path / "before"
    with ckpt.Checkpointer(before, staging=ckpt.Staging(file_bytes=_FILE_BYTES)) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
    plan = (intent_of_step(str(before / "step_00000001")) or {}).get("plan")
    assert plan is not None
    statuses = []
    for calls in range(40):
        root = tmp_path / f"{calls}"
        shutil.copytree(before, root)
        pid = os.fork()
        if not pid:
            try:
                _die_in(str(root), plan, calls)
            finally:
                os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        there = (root / "step_00000001").exists()
        assert CheckpointRoot(str(root)).steps() == ([1, 2] if there else [2])
        if there:
            assert not validate(str(root / "step_00000001")).problems
        with _open(root) as checkpointer:
            checkpointer.recover()
            save_here(checkpointer, _state(3.0), 3)
            save_here(checkpointer, _state(4.0), 4)
            assert checkpointer.all_steps() == [4]
            assert len(_retired(root)) == 1
            _assert_restored(checkpointer, 4)
        assert not os.listdir(root / ".abandoned")
        assert not validate(str(root / "step_00000004")).problems
        if statuses[-1] == 0:
            break
    assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0]
    assert len(statuses) > 6, "it was killed at every call"


def test_somebody_else_takes_it_first(tmp_path: Path) -> None:
    """Whoever removes what is retired and the save that takes it cannot meet."""
    with _open(tmp_path) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(float(step)), step)
        root = CheckpointRoot(str(tmp_path))
        (plan,) = _retired(tmp_path)
        os.rename(os.path.join(recycled_path(root), plan), tmp_path / "elsewhere")
        save_here(checkpointer, _state(3.0), 3)
        assert not set(_files(tmp_path / "elsewhere").values()) & set(_files(tmp_path / "step_00000003").values())
    _assert_whole(tmp_path, 3)
