"""Roots whose files another program has copied between a directory and a store are the same roots there.

The store is a bucket in some tests, and with TESTS=full in all: otherwise it is the one in a directory.
"""

import itertools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.roots import open_root
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions, Store
from tests.support.object_server import Bucket
from tests.support.selection import FULL
from tools.inspect_ckpt.__main__ import main


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((900,), float(step)), "n": step}


def _saved(root: Any, steps: tuple[int, ...] = (1, 2, 3)) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        for step in steps:
            checkpointer.save_request(_state(step), step).execute_sync()  # how it was saved does not matter here


def _store(url: str) -> Store:
    return open_store(url, StorageOptions.of(None, 30.0))


def _upload(folder: Path, url: str) -> None:
    """Copy a directory as `aws s3 sync` does: each file to the key of its name."""
    store = _store(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())


def _download(url: str, folder: Path) -> None:
    store = _store(url)
    for each in store.below(""):
        found = store.get(each.key, 1 << 30)
        assert found is not None
        (folder / each.key).parent.mkdir(parents=True, exist_ok=True)
        (folder / each.key).write_bytes(found)


def _is_store(where: str) -> bool:
    return "://" in where


def _copy(source: str, target: str) -> None:
    if _is_store(source):
        _download(source, Path(target))
    else:
        _upload(Path(source), target)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a root in a store."""
    return request.getfixturevalue("bucket").url if FULL else f"directory://{tmp_path}/store/run7"


@pytest.fixture(params=["directory", "store"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Return places for roots, in turn a directory and a prefix of a store, which is a bucket if it gets the copy."""
    to_store = request.param == "directory"
    store = request.getfixturevalue("bucket").url if to_store else request.getfixturevalue("store")
    return _places(request.param, store, tmp_path)


def _places(first: str, store: str, folder: Path) -> list[str]:
    found = [str(folder / "run"), f"{store}-a", str(folder / "copy"), f"{store}-b"]
    return found[:3] if first == "directory" else found[1:]


def _facts(where: str) -> tuple[dict[int, str | None], set[int]]:
    root = open_root(where)
    return root.saves(), root.pinned_steps()


@pytest.mark.parametrize("first", ["directory", "bucket"])
def test_a_root_that_is_copied_is_the_same_root(
    first: str, bucket: Bucket, tmp_path: Path, queue: ckpt.AsyncCallsQueue
) -> None:
    """There and back: each time readers find the steps, and a job resumes, saves, and removes."""
    places = _places(first, bucket.url, tmp_path)
    with ckpt.Checkpointer(places[0], queue=queue) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(_state(step), step)
        checkpointer.restore(_state(0), 2)
        checkpointer.save(_state(4), 4)  # step 3 is superseded
        checkpointer.pin(1)
    for number, (source, target) in enumerate(itertools.pairwise(places)):
        newest = 4 + number
        _copy(source, target)
        assert _facts(target) == _facts(source)
        with ckpt.open(target) as opened:
            assert opened.step == newest
        assert str(ckpt.load(target, 1)) == str(_state(1))
        for command in (["validate", target], ["show", target], ["ls", target]):
            assert main(command) == 0, command
        state = _state(0)
        with ckpt.Checkpointer(target, queue=queue, keep=ckpt.Latest(2)) as checkpointer:
            assert checkpointer.restore(state) == newest
            assert str(state) == str(_state(newest))
            assert checkpointer.all_steps() == ([1, 2, 4] if number == 0 else [1, 4, 5])
            with pytest.raises(ckpt.StorageError, match="pinned"):
                checkpointer.delete(1)
            checkpointer.save(_state(newest + 1), newest + 1)
            assert checkpointer.all_steps() == [1, newest, newest + 1]
        assert main(["validate", target]) == 0
        assert str(ckpt.load(target, 1)) == str(_state(1))


def test_nothing_is_left_of_a_copied_step_that_is_removed(places: list[str]) -> None:
    _saved(places[0])
    _copy(places[0], places[1])
    with ckpt.Checkpointer(places[1], keep=ckpt.Latest(1)) as checkpointer:
        checkpointer.recover()
        checkpointer.save_request(_state(4), 4).execute_sync()
        assert checkpointer.all_steps() == [4]
    with ckpt.Checkpointer(places[1]) as checkpointer:
        checkpointer.save_request(_state(5), 5).execute_sync()
    assert main(["clean", places[1]]) == 0
    if _is_store(places[1]):
        packs = {each.key.split("/packs/")[0] for each in _store(places[1]).below("") if "/packs/" in each.key}
        assert {name.rpartition("/")[2][:13] for name in packs} == {"step_00000004", "step_00000005"}
    else:
        packs = {str(path.parent.parent) for path in Path(places[1]).rglob("packs/*/*")}
        assert {os.path.basename(os.path.dirname(name)) for name in packs} <= {"step_00000004", "step_00000005"}
        left = {path.name for path in Path(places[1]).iterdir()}
        assert not left & {"records", "saves", "owner", "readers"}, left


def test_a_copied_step_can_be_superseded_deleted_and_published_again(
    places: list[str], queue: ckpt.AsyncCallsQueue
) -> None:
    _saved(places[0])
    _copy(places[0], places[1])
    with ckpt.Checkpointer(places[1], queue=queue) as checkpointer:
        checkpointer.restore(_state(0), 1)
        checkpointer.save(_state(9), 2)  # another step 2
        assert checkpointer.all_steps() == [1, 2]
        checkpointer.delete(1)
    assert str(ckpt.load(places[1], 2)) == str(_state(9))
    root = open_root(places[1])
    third = next(moved for moved in root.moved_aside() if moved.step == 3)
    assert main(["restore-branch", places[1], third.name]) == 0
    assert str(ckpt.load(places[1], 3)) == str(_state(3))
    assert main(["validate", places[1]]) == 0


def test_tokens_of_copied_steps_count(
    places: list[str], monkeypatch: pytest.MonkeyPatch, queue: ckpt.AsyncCallsQueue
) -> None:
    """A clock that was set back between lets no step look as saved by a later owner."""
    _saved(places[0])
    _copy(places[0], places[1])
    monkeypatch.setattr("ckpt.storage.ownership.time.time", lambda: 1_000_000.0)
    if not _is_store(places[1]):
        shutil.rmtree(f"{places[1]}/owner")
    with ckpt.Checkpointer(places[1], queue=queue, keep=ckpt.Latest(1)) as checkpointer:
        assert checkpointer.restore(_state(0)) == 3
        checkpointer.save(_state(4), 4)
        assert checkpointer.all_steps() == [4]


def test_a_mirror_that_was_copied(places: list[str], tmp_path: Path) -> None:
    _saved(places[0])
    _copy(places[0], places[1])
    state = _state(0)
    with ckpt.Checkpointer(tmp_path / "new", mirror=ckpt.Mirror(places[1], every=1)) as checkpointer:
        assert checkpointer.restore(state) == 3
        assert str(state) == str(_state(3))


def test_what_was_copied_in_part_is_no_new_beginning(places: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _saved(places[0], (1, 2))
    _copy(places[0], places[1])
    if _is_store(places[1]):
        _store(places[1]).delete(["step_00000001/intent.json", "step_00000002/zarr.json"])
    else:
        shutil.rmtree(f"{places[1]}/records")
    calls: list[Callable[[], object]] = [lambda: ckpt.load(places[1]), lambda: ckpt.load(places[1], 2)]
    with ckpt.Checkpointer(places[1]) as checkpointer:
        for call in (*calls, lambda: checkpointer.restore(_state(0)), lambda: checkpointer.restore(_state(0), 2)):
            with pytest.raises(ckpt.StorageError, match="copied in part"):
                call()
    for command in ("ls", "show", "validate"):
        assert main([command, places[1]]) == 2, command
        assert "copied in part" in capsys.readouterr().err
    if _is_store(places[1]):
        _upload(Path(places[0]) / "step_00000002", f"{places[1]}/step_00000002")
    else:
        _download(f"{places[0]}/records", Path(places[1]) / "records")
    assert str(ckpt.load(places[1])) == str(_state(2))


def test_only_what_was_published_is_a_step(store: str, tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    """Of the saves in a bucket, the records say which are steps; superseded ones stay superseded."""
    _saved(store)
    with ckpt.Checkpointer(store, queue=queue) as checkpointer:
        checkpointer.restore(_state(0), 1)
        checkpointer.save(_state(5), 5)  # steps 2 and 3 are superseded
    before = open_root(store).superseded()
    _download(store, tmp_path / "copy")
    with ckpt.Checkpointer(tmp_path / "copy", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [1, 5]
    with pytest.raises(ckpt.StorageError, match="is a step, not a checkpoint root"):
        ckpt.Checkpointer(tmp_path / "copy/step_00000005")
    with ckpt.Checkpointer(tmp_path / "copy", queue=queue) as checkpointer:
        checkpointer.recover()
        checkpointer.save(_state(6), 6)
        assert checkpointer.all_steps() == [1, 5, 6]
    assert open_root(tmp_path / "copy").superseded() == before
    assert sorted(path.name for path in (tmp_path / "copy").glob("step_*")) == [f"step_0000000{n}" for n in (1, 5, 6)]


def test_a_step_that_is_read_is_renamed_by_a_later_owner(
    store: str, tmp_path: Path, queue: ckpt.AsyncCallsQueue
) -> None:
    _saved(store)
    _download(store, tmp_path)
    with ckpt.open(tmp_path, 2) as opened:
        with ckpt.Checkpointer(tmp_path, queue=queue) as checkpointer:
            checkpointer.save(_state(4), 4)
            assert checkpointer.all_steps() == [1, 2, 3, 4]
        assert not (tmp_path / "step_00000002").exists()
        assert float(opened["w"][0]) == 2.0
    with ckpt.Checkpointer(tmp_path, queue=queue) as checkpointer:
        checkpointer.save(_state(5), 5)
        assert checkpointer.all_steps() == [1, 2, 3, 4, 5]
    assert (tmp_path / "step_00000002").exists()
    assert not (tmp_path / "records").exists()


def test_other_files_with_these_names_are_left_alone(store: str, tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    """Neither what people keep beside their steps, nor what is behind a link, is a root in a store."""
    root = tmp_path / "run"
    (root / "saves/mine").mkdir(parents=True)
    (root / "records").mkdir()
    (root / "records/notes.txt").write_text("mine")
    _saved(root, (1,))
    _saved(store, (2,))
    _download(store, root)
    _saved(root, (3,))
    with ckpt.Checkpointer(root, queue=queue) as checkpointer:
        assert checkpointer.all_steps() == [1, 2, 3]
    assert (root / "step_00000002").is_dir()
    assert (root / "saves/mine").is_dir()
    assert (root / "records/notes.txt").read_text() == "mine"
    _download(store, tmp_path / "outside")
    (tmp_path / "linked").mkdir()
    for name in ("saves", "records", "owner"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "outside" / name)
    before = sorted(path for path in (tmp_path / "outside").rglob("*"))
    _saved(tmp_path / "linked", (4,))
    with ckpt.Checkpointer(tmp_path / "linked", queue=queue) as checkpointer:
        assert checkpointer.all_steps() == [4]
    assert sorted(path for path in (tmp_path / "outside").rglob("*")) == before


def test_both_names_of_a_directory_at_once(tmp_path: Path) -> None:
    """`directory://` has the protocol of a bucket: no two jobs that do not know of each other save to one directory."""
    _saved(tmp_path / "plain")
    with pytest.raises(ckpt.StorageError, match=f"is a root in a directory; give its path, {tmp_path}/plain"):
        ckpt.Checkpointer(f"directory://{tmp_path}/plain")
    program = """
import sys, torch, ckpt
with ckpt.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save({"w": torch.full((900,), 1.0), "n": 1}, 1)
    print("saved", flush=True)
    sys.stdin.readline()
"""
    where = tmp_path / "other"
    command = [sys.executable, "-c", program, f"directory://{where}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"saved\n"
        assert str(ckpt.load(where)) == str(_state(1))
        with ckpt.Checkpointer(where) as checkpointer, pytest.raises(ckpt.CheckpointError, match="this host saves to"):
            checkpointer.save(_state(2), 2)
        other.communicate(b"\n", timeout=60)
    with ckpt.Checkpointer(where) as checkpointer:
        checkpointer.save(_state(2), 2)
        assert checkpointer.all_steps() == [1, 2]


@pytest.mark.parametrize("name", ["step_00000002", "best"])
def test_one_step_that_was_copied(name: str, store: str, tmp_path: Path) -> None:
    _saved(tmp_path / "run")
    where = f"{store}/{name}"
    _upload(tmp_path / "run/step_00000002", where)
    assert str(ckpt.load(where)) == str(_state(2))
    assert main(["validate", where]) == 0
    _saved(f"{store}-run", (1,))
    (save,) = {each.key.split("/")[1] for each in _store(f"{store}-run").below("saves/")}
    _download(f"{store}-run/saves/{save}", tmp_path / "one")
    assert str(ckpt.load(tmp_path / "one")) == str(_state(1))


@pytest.mark.parametrize("has_own", [False, True])
def test_a_step_that_was_copied_to_a_bucket_of_its_number(has_own: bool, store: str, tmp_path: Path) -> None:
    """It is a step of the root there, unless the root has one with this number."""
    _saved(tmp_path, (2,))
    with ckpt.Checkpointer(store) as checkpointer:
        for step in (1, 2) if has_own else (1,):
            checkpointer.save(_state(step), step)
    own = open_root(store).save_of(2)
    _upload(tmp_path / "step_00000002", f"{store}/step_00000002")
    with ckpt.Checkpointer(store) as checkpointer:
        assert checkpointer.restore(_state(0)) == 2
        checkpointer.save(_state(3), 3)
        assert checkpointer.all_steps() == [1, 2, 3]
    assert open_root(store).save_of(2) == (own or open_root(tmp_path).save_of(2))


def test_a_step_under_the_number_of_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saved(tmp_path)
    (tmp_path / "step_00000003").rename(tmp_path / "step_00000007")
    message = f"{tmp_path}/step_00000007 has the name of step 7 and holds step 3: it was copied or renamed"
    with ckpt.Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING, "ckpt"):
        state = _state(0)
        assert checkpointer.restore(state) == 7
        assert state["n"] == 3
        assert message in caplog.text
    for where in (tmp_path, tmp_path / "step_00000007"):
        caplog.clear()
        ckpt.load(where)
        assert message in caplog.text
    caplog.clear()
    ckpt.load(tmp_path, 2)
    assert not caplog.messages
