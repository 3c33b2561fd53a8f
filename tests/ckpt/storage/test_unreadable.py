"""A look at the storage that fails says nothing: whatever cannot be read stays, and is neither abandoned nor replaced.

TESTS=full pytest tests/ckpt/storage/test_unreadable.py      every look of every scene, every error; else some of them
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import CheckpointError
from ckpt.storage import interface
from ckpt.storage.names import parse_save_name
from ckpt.storage.root import CheckpointRoot
from tests.ckpt.storage.small_saves import SCENARIOS, opened, save, state_of
from tests.ckpt.storage.syscalls import FailingLooks, Syscalls
from tests.support.selection import FULL

_ERRORS = (errno.EIO, errno.EACCES, errno.ESTALE)
_EVERY = 1 if FULL else 29  # of the looks of a scene; the errors take turns


@dataclass(frozen=True)
class _Scene:
    """A save of `step`, as the first one of a Checkpointer, onto what `prepare` has left: steps 1 to `earlier`."""

    step: int
    keep: int
    earlier: int = 3
    complete_save_left: bool = False  # of the last of them
    restores: int | None = None
    reuse_files: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"keep": self.keep, "reuse_files": self.reuse_files}

    def prepare(self, root: Path) -> None:
        if self.complete_save_left:
            SCENARIOS["adoption"].prepare(root)
            return
        with opened(root, **self.options) as checkpointer:
            for step in range(1, self.earlier + 1):
                save(checkpointer, step)

    def play(self, root: Path, hook: Callable[..., Any]) -> set[int]:
        """Save, and then once more without errors as step 9; return the steps that must be there."""
        with opened(root, **self.options) as checkpointer:
            with contextlib.suppress(CheckpointError), Syscalls().hooked(hook):
                if self.restores is not None:
                    checkpointer.restore(state_of(-1.0), self.restores)
                save(checkpointer, self.step)
            saved = {self.step} & set(checkpointer.all_steps())
            with Syscalls().hooked(FailingLooks(0)):
                save(checkpointer, 9)
        last = self.earlier if self.restores is None else self.restores
        return set(sorted({*range(1, last + 1), *saved, 9})[-self.keep :])


_SCENES = {
    "retention": _Scene(4, 3),
    "reuse": _Scene(4, 2, reuse_files=True),
    "adoption": _Scene(3, 10, earlier=2, complete_save_left=True),
    "branch": _Scene(4, 10, restores=2),
}


def _restorable(root: Path) -> set[int]:
    """Return the steps that are there with their own content."""
    found = set()
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        for step in checkpointer.all_steps():
            state, saved = state_of(-1.0), state_of(float(step))
            with contextlib.suppress(CheckpointError):
                checkpointer.restore(state, step)
                if state["value"] == step and all(state[name].equal(saved[name]) for name in ("large", "small")):
                    found.add(step)
    return found


@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("name", _SCENES)
def test_a_look_that_fails_removes_nothing(tmp_path: Path, name: str) -> None:
    scene, template, root = _SCENES[name], tmp_path / "template", tmp_path / "root"
    template.mkdir()
    scene.prepare(template)

    def play(hook: FailingLooks) -> set[int]:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        return scene.play(root, hook) - _restorable(root)

    for _ in range(2):  # the first fills caches, such as the name of this host
        counted = FailingLooks(0)
        assert not play(counted)
    cases = [(at, number) for at in range(len(counted.looks)) for number in _ERRORS]
    if not FULL:
        cases = [(at, _ERRORS[at % len(_ERRORS)]) for at in range(0, len(counted.looks), _EVERY)]
    problems = []
    for at, number in cases:
        hook = FailingLooks(number, at=at)
        try:
            lost = play(hook)
        except Exception as error:
            problems.append(f"look {at} ({hook.looks[at]}), {errno.errorcode[number]}: {type(error).__name__}: {error}")
        else:
            if lost:
                problems.append(f"look {at} ({hook.looks[at]}), {errno.errorcode[number]}: {sorted(lost)} are lost")
    print(f"{len(cases)} of {3 * len(counted.looks)} failing looks")
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems)


def _node_local(folder: Path) -> dict[str, Any]:
    return {"node_local": folder / "nvme", "mirror": ckpt.Mirror(folder / "mirror"), "keep": ckpt.Latest(10)}


def _steps_on_the_node(folder: Path) -> list[int]:
    names = (path.name for path in (folder / "nvme").iterdir() if list(path.rglob("rank_*")))
    return sorted(found.step for name in names if (found := parse_save_name(name)) is not None)


@pytest.mark.parametrize("number", _ERRORS, ids=errno.errorcode.get)
def test_a_step_that_cannot_be_read_keeps_its_files_on_the_node(tmp_path: Path, number: int) -> None:
    root, options = tmp_path / "root", _node_local(tmp_path)
    with opened(root, **options) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    hook = FailingLooks(number, "step_00000003/intent.json")
    with opened(root, **options) as checkpointer, Syscalls().hooked(hook):
        save(checkpointer, 4)
    assert any(call.path.endswith("step_00000003/intent.json") for call in hook.looks)
    assert _steps_on_the_node(tmp_path) == [1, 2, 3, 4]


def test_a_step_that_cannot_be_read_is_not_taken_from_its_readers(tmp_path: Path) -> None:
    with opened(tmp_path, keep=ckpt.Latest(1)) as checkpointer:
        save(checkpointer, 1)
        with ckpt.open(tmp_path, 1) as reader:
            os.rename(tmp_path / "step_00000001", tmp_path / "aside")  # so that this process has no lock on it
            shutil.copytree(tmp_path / "aside", tmp_path / "step_00000001")
            hook = FailingLooks(errno.EIO, "step_00000001/intent.json")
            with contextlib.suppress(CheckpointError), Syscalls().hooked(hook):
                save(checkpointer, 2)
            assert (tmp_path / "step_00000001").exists()
            assert reader.step == 1


def test_no_decision_uses_a_function_that_takes_a_failure_for_absence() -> None:
    """`os.path.exists` and its like return False when they cannot tell."""
    package = Path(interface.__file__).parents[1]
    uses = re.compile(r"os\.path\.(exists|lexists|isdir|isfile)\(")
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for folder in ("storage", "saving", "mirroring", "keeper", "replication")
        for path in (package / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if uses.search(line)
    ]
    assert found == []


def test_a_pending_save_whose_part_cannot_be_read_is_not_abandoned(tmp_path: Path) -> None:
    SCENARIOS["adoption"].prepare(tmp_path)
    hook = FailingLooks(errno.EIO, "parts/000/rank_00000.json")
    with opened(tmp_path) as checkpointer, Syscalls().hooked(hook):
        state = state_of(-1.0)
        assert checkpointer.restore(state) == 1, "the older step; the save stays undecided"
    assert [each.step for each in CheckpointRoot(str(tmp_path)).pending()] == [2]
    with opened(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 2
