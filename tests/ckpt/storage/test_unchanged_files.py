"""Files that are linked from step to step: which, for how long, and what a file system or another process can do."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.errors import StorageError
from ckpt.saving import write
from ckpt.storage import files, unchanged_files
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.names import pack_file, step_name
from ckpt.storage.pack_writers import PackWriter
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.unchanged_files import UnchangedFiles
from tests.ckpt.storage.chunks import job
from tests.ckpt.storage.crash_states import Change, Recorder, Tree, crash, materialise
from tests.ckpt.storage.small_saves import opened, save, state_of
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support import run_ranks
from tests.support.selection import FULL

_META = ArrayMeta((3000,), "float32", (3000,))


def _published(known: UnchangedFiles, root: Path, step: int, values: dict[int, float]) -> list[bool]:
    """Write a step with a file for each of the values; return which were linked."""
    (folder := root / step_name(step)).mkdir(parents=True)
    known.begin("plan")
    writer, written = PackWriter(str(folder), 0), []
    for number, value in values.items():
        array = np.full(_META.shape, value, np.float32)
        file, _ = job(_META, array, number=number)
        written.append(known.write(writer, file))
        assert array.tobytes() in (folder / pack_file(0, number)).read_bytes()
    writer.finish()
    known.synced(writer)
    known.published(CheckpointRoot(str(root)), step)
    return [file.is_linked for file in written]


def test_a_file_is_written_again_after_many_steps(tmp_path: Path) -> None:
    """A damaged one would else be that of all later steps. Several are not written in the same save."""
    known, linked = UnchangedFiles(), []
    for step in range(262):
        linked.append(_published(known, tmp_path, step, {0: 1.0, 1: 2.0}))
        if step >= 2:
            shutil.rmtree(tmp_path / step_name(step - 2))
    written = [[step for step, each in enumerate(linked) if not each[number]] for number in (0, 1)]
    assert written[0] == [0, 1, 130, 259]
    assert len(written[1]) == 4
    assert not set(written[0][2:]) & set(written[1][2:])


def test_a_digest_is_made_only_of_what_seems_not_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = unchanged_files.digest
    monkeypatch.setattr(unchanged_files, "digest", lambda *of: made.append(1) or original(*of))
    known = UnchangedFiles()
    for step in range(4):
        _published(known, tmp_path, step, {0: 1.0, 1: float(step)})
    assert len(made) == 3, "of the file that does not change, from the second save on"


def _source(root: Path) -> tuple[str, files.FileIdentity]:
    (root / "from").mkdir()
    (root / "to").mkdir()
    (root / "from" / "file").write_bytes(b"content")
    identity = files.identity(str(root / "from" / "file"))
    assert identity is not None
    return str(root / "from"), identity


def test_a_link_replaces_a_file(tmp_path: Path) -> None:
    folder, identity = _source(tmp_path)
    other = tmp_path / "to" / "file"
    other.write_bytes(b"recycled")
    assert files.link(folder, "file", str(tmp_path / "to"), identity)
    assert files.identity(str(other)) == identity


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EIO])
@pytest.mark.parametrize("is_made", [False, True], ids=["not made", "made nevertheless"])
def test_a_link_that_fails_leaves_no_name(tmp_path: Path, number: int, is_made: bool) -> None:
    """As of a request to a server that was repeated: what is written next must not be the linked file."""
    folder, identity = _source(tmp_path)

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "link":
            if is_made:
                perform(*call.args)
            raise OSError(number, os.strerror(number))
        return perform(*call.args)

    with Syscalls().hooked(hook):
        assert not files.link(folder, "file", str(tmp_path / "to"), identity)
    assert os.listdir(tmp_path / "to") == []
    assert (tmp_path / "from" / "file").read_bytes() == b"content"


def test_a_name_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    folder, identity = _source(tmp_path)

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name in ("link", "unlink"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return perform(*call.args)

    with Syscalls().hooked(hook), pytest.raises(StorageError, match="cannot link"):
        files.link(folder, "file", str(tmp_path / "to"), identity)


def test_a_file_that_is_replaced_meanwhile_is_not_linked(tmp_path: Path) -> None:
    folder, identity = _source(tmp_path)

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "link":
            os.rename(tmp_path / "from" / "file", tmp_path / "aside")
            (tmp_path / "from" / "file").write_bytes(b"another")
        return perform(*call.args)

    with Syscalls().hooked(hook):
        assert not files.link(folder, "file", str(tmp_path / "to"), identity)
    assert os.listdir(tmp_path / "to") == []


def test_a_file_with_another_name_is_never_written_over(tmp_path: Path) -> None:
    file, _ = job(_META, np.ones(_META.shape, np.float32))
    for step in ("first", "second"):
        writer = PackWriter(str(tmp_path / step), 0, reuse=True)
        (tmp_path / step).mkdir()
        writer.write(file)
        writer.finish()
    path = tmp_path / "second" / pack_file(0, 0)
    path.unlink()
    os.link(tmp_path / "first" / pack_file(0, 0), path)
    before = path.read_bytes()
    writer = PackWriter(str(tmp_path / "second"), 0, reuse=True)
    writer.write(job(_META, np.zeros(_META.shape, np.float32))[0])
    assert (tmp_path / "first" / pack_file(0, 0)).read_bytes() == before != path.read_bytes()


def _record(rank: int, world_size: int, root: Path) -> tuple[Tree, list[Change]]:
    """Save four steps, of which files are linked, and record the last save."""
    known = UnchangedFiles()
    write.UnchangedFiles = lambda: known  # as a writer process keeps it
    state, recorder = state_of(1.0), Recorder()
    staging = ckpt.Staging(threads=1, link_unchanged=True, file_bytes=8 << 10)
    with ckpt.Checkpointer(root, keep=2, staging=staging) as checkpointer:
        for step in (1, 2, 3):
            state["small"][0] = step
            checkpointer.save_request(state, step).execute_sync()
        before = Tree.of(root)
        state["small"][0] = 4
        with Syscalls().hooked(recorder):
            checkpointer.save_request(state, 4).execute_sync()
        return before, recorder.changes


@pytest.mark.timeout(600 if FULL else 120)
def test_what_was_linked_survives_a_loss_of_power(tmp_path: Path) -> None:
    """The steps that are there have all of their values, and the next start works."""
    root = tmp_path / "recorded"
    root.mkdir()
    before, changes = run_ranks(_record, 1, root)[0].value
    assert (root / step_name(4) / pack_file(0, 0)).stat().st_nlink == 2
    for count in {*range(0, len(changes), 1 if FULL else 37), len(changes)}:
        for kept in (False, True, random.Random(count)):
            copy = tmp_path / "state"
            materialise(crash(before, changes[:count], kept), copy)
            steps = CheckpointRoot(str(copy)).steps()
            assert steps in ([2, 3], [2, 3, 4], [3, 4])
            assert 4 in steps or count < len(changes)
            with opened(copy) as checkpointer:
                save(checkpointer, 9)
            for step in (*steps, 9):
                loaded = ckpt.load(copy / step_name(step))
                assert loaded["large"].equal(state_of(9.0 if step == 9 else 1.0)["large"])
                assert loaded["small"].tolist() == state_of(float(step))["small"].tolist()
            shutil.rmtree(copy)
