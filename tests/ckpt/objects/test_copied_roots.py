"""Roots whose files another program has copied between a directory and a bucket: never a new beginning."""

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.options import StorageOptions
from ckpt.storage.roots import open_root
from ckpt.storage.stores.interface import Store
from ckpt.storage.stores.opening import open_store
from tests.support.object_server import Bucket
from tools.inspect_ckpt.__main__ import main


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((900,), float(step)), "n": step}


def _saved(root: Any, steps: tuple[int, ...] = (1, 2, 3)) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        for step in steps:
            checkpointer.save(_state(step), step)


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


@pytest.fixture(params=["a directory in a bucket", "a bucket in a directory"])
def copied(request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path) -> tuple[str, str]:
    """Return where the files of a root lie in the other layout, and a place for a root of that layout."""
    if request.param.startswith("a directory"):
        _saved(tmp_path / "run")
        _upload(tmp_path / "run", bucket.url)
        return bucket.url, f"{bucket.url}-taken"
    _saved(bucket.url)
    _download(bucket.url, tmp_path / "copy")
    return str(tmp_path / "copy"), str(tmp_path / "taken")


def _is_refused(where: str, call: Any) -> None:
    with pytest.raises(ckpt.StorageError, match="has no step of its own, but files of step 1, 2, 3 in the") as caught:
        call()
    assert f"{where} has no step" in str(caught.value)
    assert f"inspect_ckpt import {where} ROOT" in str(caught.value)


def test_files_of_steps_are_no_new_beginning(copied: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    where, _ = copied
    state = _state(0)
    with ckpt.Checkpointer(where) as checkpointer:
        _is_refused(where, lambda: checkpointer.restore(state))
        _is_refused(where, lambda: checkpointer.restore(state, 3))
        _is_refused(where, checkpointer.recover)
    assert state["n"] == 0
    for call in (ckpt.load, ckpt.open):
        _is_refused(where, lambda call=call: call(where))
        _is_refused(where, lambda call=call: call(where, 2))
    for command in ("ls", "show", "validate"):
        assert main([command, where]) == 2, command
        assert f"inspect_ckpt import {where} ROOT" in capsys.readouterr().err, command


def test_a_mirror_with_files_of_steps_is_no_new_beginning(copied: tuple[str, str], tmp_path: Path) -> None:
    where, _ = copied
    mirror = ckpt.Mirror(where, every=1)
    with ckpt.Checkpointer(tmp_path / "new", mirror=mirror) as checkpointer:
        _is_refused(where, lambda: checkpointer.restore(_state(0)))


@pytest.mark.parametrize("kind", ["same", "own layout", "other layout"])
def test_import(
    copied: tuple[str, str], kind: str, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, other = copied
    taken = {"same": where, "own layout": other}.get(kind) or (
        str(tmp_path / "back") if where.startswith("s3:") else f"{bucket.url}-back"
    )
    assert main(["import", where, taken, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["imported"], document["present"], document["damaged"]) == ([1, 2, 3], [], [])
    assert main(["import", where, taken]) == 0, "again"
    assert "step 2: is in" in capsys.readouterr().out
    assert main(["validate", taken]) == 0
    state = _state(0)
    with ckpt.Checkpointer(taken) as checkpointer:
        assert checkpointer.restore(state) == 3
        assert str(state) == str(_state(3))
        checkpointer.save(_state(4), 4)
        assert checkpointer.all_steps() == [1, 2, 3, 4]
    assert str(ckpt.load(taken, 2)) == str(_state(2))


def test_import_of_some_and_of_damaged_steps(copied: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    where, taken = copied
    assert main(["import", where, taken, "--step", "2"]) == 0
    with ckpt.Checkpointer(taken, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [2]
    assert main(["import", where, taken, "--step", "7"]) == 2
    if where.startswith("s3:"):
        _store(where).put("step_00000001/packs/000/rank_00000_000", b"damaged")
        _store(where).delete(["step_00000003/zarr.json"])
    else:
        steps = {path.name[:13]: path for path in (Path(where) / "saves").iterdir()}
        (steps["step_00000001"] / "packs/000/rank_00000_000").write_bytes(b"damaged")
        (steps["step_00000003"] / "zarr.json").unlink()
    capsys.readouterr()
    assert main(["import", where, taken]) == 1
    out = capsys.readouterr().out
    assert "step 1: is left out" in out
    assert "step 3: is left out" in out
    assert main(["import", taken, f"{taken}-2"]) == 2
    assert "a checkpoint root already" in capsys.readouterr().err


def test_only_what_was_published_is_taken_in(bucket: Bucket, tmp_path: Path) -> None:
    """Of the saves in a bucket, the records say which are steps."""
    _saved(bucket.url)
    with ckpt.Checkpointer(bucket.url) as checkpointer:
        checkpointer.restore(_state(0), 1)
        checkpointer.save(_state(5), 5)  # steps 2 and 3 are superseded
    _download(bucket.url, tmp_path / "copy")
    assert main(["import", str(tmp_path / "copy"), str(tmp_path / "taken")]) == 0
    with ckpt.Checkpointer(tmp_path / "taken", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [1, 5]
    shutil.rmtree(tmp_path / "copy/records")
    with pytest.raises(ckpt.StorageError, match="files of step 1, 2, 3, 5 in the layout of an object store"):
        ckpt.load(tmp_path / "copy")


@pytest.mark.parametrize("first", ["bucket", "directory"])
def test_a_root_in_a_store_that_is_copied_is_the_same_root(first: str, bucket: Bucket, tmp_path: Path) -> None:
    """From a bucket to a directory and back, or the other way round: each time a job resumes, and retention goes on."""
    urls = [f"{bucket.url}-a", f"directory://{tmp_path}/b", f"{bucket.url}-c"]
    if first == "directory":
        urls = [f"directory://{tmp_path}/a", f"{bucket.url}-b", f"directory://{tmp_path}/c"]
    with ckpt.Checkpointer(urls[0]) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(_state(step), step)
        checkpointer.restore(_state(0), 2)
        checkpointer.save(_state(4), 4)  # step 3 is superseded
        checkpointer.pin(1)
    for number, (source, target) in enumerate(itertools.pairwise(urls)):
        for each in _store(source).below(""):
            data = _store(source).get(each.key, 1 << 30)
            assert data is not None
            _store(target).put(each.key, data)
        before, after = open_root(source), open_root(target)
        assert (after.saves(), after.superseded(), after.pinned_steps()) == (
            before.saves(),
            before.superseded(),
            before.pinned_steps(),
        )
        state = _state(0)
        with ckpt.Checkpointer(target, keep=ckpt.Latest(2)) as checkpointer:
            newest = 4 + number
            assert checkpointer.restore(state) == newest
            assert str(state) == str(_state(newest))
            with pytest.raises(ckpt.StorageError, match="pinned"):
                checkpointer.delete(1)
            checkpointer.save(_state(newest + 1), newest + 1)
            assert checkpointer.all_steps() == [1, newest, newest + 1]


def test_one_step_that_was_copied(bucket: Bucket, tmp_path: Path) -> None:
    _saved(tmp_path / "run")
    where = f"{bucket.url}/step_00000002"
    _upload(tmp_path / "run/step_00000002", where)
    with pytest.raises(ckpt.StorageError, match="files of step 2 in the layout of a directory"):
        ckpt.load(where)
    assert main(["import", where, str(tmp_path / "taken")]) == 0
    assert str(ckpt.load(tmp_path / "taken", 2)) == str(_state(2))
    _saved(bucket.url, (1,))
    (save,) = {each.key.split("/")[1] for each in _store(bucket.url).below("saves/")}
    _download(f"{bucket.url}/saves/{save}", tmp_path / "one")
    assert str(ckpt.load(tmp_path / "one")) == str(_state(1)), "it is a step in a directory as it is"


def test_a_root_with_steps_of_its_own_is_used(copied: tuple[str, str]) -> None:
    where, _ = copied
    _saved(where, (7,))
    with ckpt.Checkpointer(where) as checkpointer:
        assert checkpointer.restore(_state(0)) == 7


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
