"""Symbolic links in a root: only the link itself is ever removed, and nothing outside of the root is touched.

A root may be unpacked from elsewhere, and a step moved to an archive with a link left in its place. Each test replaces
one place by a link to where its content has been moved, lets a job and the tools do all they do, and compares.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.mirroring.step_copy import StepCopy, Throttle
from ckpt.ranks.failure import Failure
from ckpt.saving.remover import Remover
from ckpt.storage.names import SaveId
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.storage.small_saves import opened, save, state_of
from tests.ckpt.storage.syscalls import Call, Syscalls
from tests.support.selection import FULL
from tools.inspect_ckpt.__main__ import main as inspect_ckpt

_OWN = (".owner", ".pending", ".abandoned", ".retired", ".readers", "pins", ".superseded", ".damaged")

# `*` stands for the one or two names that there are; with "/new" the place does not exist before.
_CHILDREN = (
    ".owner/*[0-9]",
    ".pending/*",
    ".pending/*/packs",
    ".pending/*/parts",
    ".pending/*/parts/000",
    ".abandoned/*-o*",
    ".abandoned/*-o*/packs",
    ".abandoned/*-removed-*",
    ".abandoned/*-removed-*/packs",
    ".retired/*",
    ".retired/*/packs",
    ".retired/*/packs/000",
    ".retired/new",
    ".readers/*",
    ".readers/new",
    ".superseded/*",
    ".damaged/*",
)
_STEPS = tuple(f"step_0000000{step}{below}" for step in (2, 3) for below in ("", "/packs", "/packs/000", "/parts"))


class _Died(BaseException):
    """Raised in place of a death; nothing handles it."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which every place of the format exists."""
    root = tmp_path_factory.mktemp("template") / "root"

    def die(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "renameat2" and os.path.basename(call.args[1]) == "step_00000008":
            raise _Died
        return perform(*call.args)

    def kept(checkpointer: ckpt.Checkpointer) -> None:
        """Keep the recycled files, which `close` removes."""
        shutil.copytree(root / ".retired", root.parent / "retired", dirs_exist_ok=True)

    with opened(root, keep=4, reuse_files=True) as checkpointer:
        for step in range(1, 6):
            save(checkpointer, step)
        kept(checkpointer)
    own = CheckpointRoot(str(root))
    own.move_aside(4, own.ownership.newest(), "superseded")
    own.move_aside(5, own.ownership.newest(), "damaged")
    own.retire_step(1, own.ownership.newest())
    with opened(root) as checkpointer:
        save(checkpointer, 6)
        try:
            with Syscalls().hooked(die):
                save(checkpointer, 8)
        except _Died:
            pass
    shutil.copytree(root.parent / "retired", root / ".retired", dirs_exist_ok=True)
    token = own.ownership.newest()
    shutil.copytree(root / "step_00000006", root / ".abandoned" / f"step_00000001-removed-{token}-0123abcd")
    lost = own.pending_save(SaveId(7, token, "0" * 16))
    lost.join()
    shutil.copytree(root / "step_00000006" / "packs", Path(lost.path, "packs"))
    lost.abandon(Failure(0, "StorageError", "of the test"))
    for step in (2, 3, 6):
        readers = root / ".readers" / str(own.save_of(step))
        readers.mkdir(parents=True)
        (readers / "0000-1-1-ended").touch()
    own.pin_step(6)
    own.unpin_step(6)
    (root / "pins").mkdir(exist_ok=True)
    return root


def _tree(path: Path) -> dict[str, Any]:
    """Return all names below a directory, with what they are, their times and contents."""
    found: dict[str, Any] = {}
    for each in (path, *path.rglob("*")):
        about = each.lstat()
        content = each.read_bytes() if each.is_file() else None
        found[str(each)] = about.st_ino, about.st_mode, about.st_mtime_ns, content
    return found


def _replace(place: Path, canary: Path) -> None:
    """Move what is at a place to the canary, and leave a link there."""
    canary.mkdir()
    (canary / "victim" / "deeper").mkdir(parents=True)
    (canary / "victim" / "deeper" / "file").write_bytes(b"not of any checkpoint")
    target = canary / "moved"
    if place.exists():
        place.rename(target)
    else:
        target.mkdir()
    shutil.copytree(canary / "victim", target / "victim")
    (target / "reason.json").exists() or (target / "file").write_bytes(b"not of any checkpoint")
    place.symlink_to(target)


def _restore(root: Path) -> None:
    with ckpt.Checkpointer(root) as checkpointer:
        checkpointer.restore(state_of(-1.0))


def _read(root: Path) -> None:
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        checkpointer.restore(state_of(-1.0))
    for step in (6, 3, 2):
        with ckpt.open(root, step):
            pass


def _train(root: Path, reuse_files: bool) -> None:
    with opened(root, keep=2, reuse_files=reuse_files) as checkpointer:
        checkpointer.restore(state_of(-1.0))
        for step in (9, 10, 11):
            save(checkpointer, step)
        checkpointer.pin(11)
        checkpointer.delete(10)
    for rank in (1, 0):  # what writer processes do after their saves
        remover = Remover(CheckpointRoot(str(root)), rank, 2)
        remover.start()
        remover.close()


def _branch(root: Path) -> None:
    with opened(root) as checkpointer:
        checkpointer.restore(state_of(-1.0), 2)
        save(checkpointer, 3)


def _tools(root: Path) -> None:
    for command in ("ls --all {}", "clean --dry-run {}", "clean --stale-after 0 --yes {}", "rm --yes {} 4 5 3"):
        inspect_ckpt(command.format(root).split())
    inspect_ckpt(["restore-branch", str(root), "4"])


_ACTS: dict[str, Callable[[Path], None]] = {
    "read": _read,
    "restore": _restore,
    "train": lambda root: _train(root, False),
    "train and reuse": lambda root: _train(root, True),
    "branch": _branch,
    "tools": _tools,
}


@pytest.mark.parametrize(
    ("pattern", "act"),
    [
        (pattern, act)
        for pattern in (*_OWN, *_CHILDREN, *_STEPS)
        for act in _ACTS
        if FULL or act != "train and reuse" or pattern.startswith((".retired", ".pending"))
    ],
)
def test_nothing_outside_is_touched(template: Path, tmp_path: Path, pattern: str, act: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(template, root, symlinks=True)
    places = [root / pattern] if pattern.endswith("new") else sorted(root.glob(pattern))
    assert places, pattern
    for number, place in enumerate(places):
        _replace(place, tmp_path / f"canary{number}")
    before = [_tree(tmp_path / f"canary{number}") for number in range(len(places))]
    refused: Exception | None = None
    try:
        _ACTS[act](root)
    except ckpt.CheckpointError as error:
        refused = error
    if refused is not None:
        assert "symbolic link" in str(refused)
        assert pattern not in ("step_00000002", "step_00000003"), refused
    else:
        assert pattern not in _OWN or act in ("read", "tools"), "the linked directory was used"
    assert [_tree(tmp_path / f"canary{number}") for number in range(len(places))] == before


@pytest.mark.parametrize("place", ["", "packs", "packs/000", "parts", "parts/000"])
def test_a_copy_in_a_mirror_is_not_written_through_a_link(template: Path, tmp_path: Path, place: str) -> None:
    """The name of the save that it is copied under is known from the step."""
    root, mirror = CheckpointRoot(str(template)), CheckpointRoot(str(tmp_path / "mirror"))
    mirror.make()
    name = str(root.save_of(6))
    where = Path(mirror.pending_path, name, place)
    where.parent.mkdir(parents=True, exist_ok=True)
    if place:
        shutil.copy(template / "step_00000006" / "intent.json", Path(mirror.pending_path, name))
        Path(mirror.pending_path, name, "parts").mkdir(exist_ok=True)
    else:
        shutil.copytree(template / "step_00000006", where)
    if place == "parts":
        where.rmdir()
    _replace(where, tmp_path / "canary")
    before = _tree(tmp_path / "canary")
    token = mirror.ownership.claim_as(root.owner_of(6))
    copy = StepCopy(root.source_of(6), mirror, token, Throttle(None, threading.Event()))
    with pytest.raises(ckpt.StorageError, match="is a symbolic link"):
        copy.run(lambda: None)
    assert _tree(tmp_path / "canary") == before


@pytest.mark.parametrize("place", ["", "packs", "packs/000"])
def test_node_local_files_are_not_written_through_a_link(template: Path, tmp_path: Path, place: str) -> None:
    """The directory itself may be a link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "node").symlink_to(tmp_path / "disk")
    packs = NodePacks(str(tmp_path / "node"), CheckpointRoot(str(template)))
    packs.claim()
    save = SaveId(9, CheckpointRoot(str(template)).ownership.newest(), "1" * 16)
    where = tmp_path / "disk" / save.name / place
    where.parent.mkdir(parents=True, exist_ok=True)
    _replace(where, tmp_path / "canary")
    before = _tree(tmp_path / "canary")
    with pytest.raises(ckpt.StorageError, match="is a symbolic link"):
        packs.writer(save, 0, threads=1).write_documents({"packs/000/rank_00000_000": b"data"})
    packs.note_decided(save)
    packs.clean(lambda: None)
    assert _tree(tmp_path / "canary") == before
