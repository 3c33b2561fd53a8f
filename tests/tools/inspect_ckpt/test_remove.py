"""`pin`, `unpin` and `rm`: what is pinned stays, and removing asks and keeps the last whole step."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.storage.root import CheckpointRoot
from tests.support.saves import save_here
from tests.tools.inspect_ckpt.commands import REPOSITORY, Commands


@pytest.fixture
def root(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the root that two ranks saved to, with steps 3 and 4."""
    return Path(shutil.copytree(saved["two"], tmp_path / "root"))


def steps(root: Path) -> list[int]:
    return CheckpointRoot(str(root)).steps()


def on_a_terminal(
    *arguments: str | Path, answer: str, before: Callable[[], object] = lambda: None, code: int = 0
) -> str:
    """Run a command that asks, call `before`, give it an answer, and return what it printed."""
    master, slave = pty.openpty()
    line = [sys.executable, "-m", "tools.inspect_ckpt", *map(str, arguments)]
    process = subprocess.Popen(line, cwd=REPOSITORY, stdin=slave, stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    out = ""
    assert process.stdout is not None
    while not out.endswith("[y/N] "):
        character = process.stdout.read(1)
        assert character, out
        out += character
    before()
    os.write(master, answer.encode() + b"\n")
    rest, _ = process.communicate(timeout=50)
    os.close(master)
    assert process.returncode == code
    return out + rest


def test_pin_and_unpin(run: Commands, root: Path) -> None:
    assert run("pin", root, "3", "4", "3") == "step 3: pinned\nstep 4: pinned\n"
    assert CheckpointRoot(str(root)).pinned_steps() == {3, 4}
    assert run.json("pin", root, "3")["pinned"] == [3]
    assert "no published step 9" in run.refused("pin", root, "4", "9")
    assert "give --yes" in run.refused("unpin", root, "3")
    assert run.json("unpin", root, "3", "--yes")["unpinned"] == [3]
    assert "pinned steps: 4" in run.refused("unpin", root, "3", "--yes")
    assert CheckpointRoot(str(root)).pinned_steps() == {4}


def test_a_pinned_step_is_not_removed_by_the_job(run: Commands, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
        run("pin", tmp_path, "1")
        save_here(checkpointer, {"w": torch.ones(3)}, 2)
        save_here(checkpointer, {"w": torch.ones(3)}, 3)
        assert checkpointer.all_steps() == [1, 3]
        run("unpin", tmp_path, "1", "--yes")
        save_here(checkpointer, {"w": torch.ones(3)}, 4)
        assert checkpointer.all_steps() == [4]


def test_rm_asks(run: Commands, root: Path) -> None:
    assert "give --yes" in run.refused("rm", root, "3")
    assert "nothing was removed" in on_a_terminal("rm", root, "3", answer="n")
    assert "nothing was removed" in on_a_terminal("rm", root, "3", answer="")
    assert steps(root) == [3, 4]
    assert "removed 1 step" in on_a_terminal("rm", root, "3", answer="y")
    assert steps(root) == [4]


def test_rm_looks_again_after_the_answer(run: Commands, root: Path) -> None:
    """Two people remove a step each, and the questions stand for a while: one whole step is left."""
    on_a_terminal("rm", root, "3", answer="y", before=lambda: run("rm", root, "4", "--yes"), code=2)
    assert steps(root) == [3]


def test_rm_refuses_what_is_pinned_even_with_force(run: Commands, root: Path) -> None:
    run("pin", root, "3")
    assert "unpin" in run.refused("rm", root, "3", "4", "--yes", "--force")
    assert steps(root) == [3, 4]
    run("unpin", root, "3", "--yes")
    assert run.json("rm", root, "3", "--yes")["removed"] == ["3"]


def test_rm_refuses_the_last_whole_step_without_force(run: Commands, root: Path) -> None:
    (root / "step_00000003" / "state.json").unlink()  # what is left is damaged
    assert "--force" in run.refused("rm", root, "4", "--yes")
    assert "--force" in run.refused("rm", root, "3", "4", "--yes")
    run("rm", root, "3", "--yes")
    assert "--force" in run.refused("rm", root, "4", "--yes")
    run("rm", root, "4", "--yes", "--force")
    assert steps(root) == []


def test_rm_removes_all_or_nothing_beside_a_job(run: Commands, root: Path) -> None:
    moved = root / ".superseded" / "step_00000002-o1795423842902-0123456789abcdef"
    shutil.copytree(root / "step_00000003", moved)
    with Checkpointer(root) as checkpointer:
        checkpointer.recover()
        save_here(checkpointer, {"w": torch.ones(3)}, 5)
        assert "is alive" in run.refused("rm", root, "3", moved.name, "--yes")
        assert moved.is_dir()
        run("rm", root, moved.name, "--yes")
        assert not moved.is_dir()
    assert steps(root) == [3, 4, 5]
