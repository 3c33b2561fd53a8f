"""Small saves in the process of the test, and checks of the root afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import note_seen
from ckpt.validation import validate


def state_of(value: float) -> dict[str, Any]:
    """Return the state that is saved as step `value`."""
    return {"large": torch.arange(3000.0) * value, "small": torch.tensor([value, 2.0]), "value": value}


@contextmanager
def opened(root: Path, *, reuse_files: bool | None = None, **options: Any) -> Iterator[ckpt.Checkpointer]:
    """Return a Checkpointer whose writer uses one thread, and that goes on from the steps that are there."""
    note_seen(str(root))
    with ckpt.Checkpointer(root, staging=ckpt.Staging(threads=1, reuse_files=reuse_files), **options) as checkpointer:
        yield checkpointer


def save(checkpointer: ckpt.Checkpointer, step: int) -> None:
    """Save a step, entirely in this thread."""
    checkpointer.save_request(state_of(float(step)), step).execute_sync()


def assert_whole(root: Path, *, strays: bool = False) -> list[int]:
    """Check that every published step is valid and has its own bytes, and return the steps.

    With `strays` they may contain temporary files."""
    steps = CheckpointRoot(str(root)).steps()
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        for step in steps:
            problems = validate(str(root / f"step_{step:08d}")).problems
            assert not [p for p in problems if p.fatal or not (strays and str(p.file).endswith(".tmp"))], problems
            state, expected = state_of(-1.0), state_of(float(step))
            assert checkpointer.restore(state, step) == step
            assert state["value"] == step
            for name in ("large", "small"):
                assert state[name].equal(expected[name]), f"{name} of step {step}"
    return steps


class _Died(BaseException):
    """Raised in place of a death; nothing handles it."""


def _die_before_the_commit(root: Path) -> None:
    """Leave a complete, unpublished save."""
    from tests.ckpt.storage.syscalls import Call, Syscalls

    def hook(call: Call, perform: Callable[..., Any]) -> Any:
        if call.name == "renameat2" and os.path.basename(call.args[1]) == "step_00000002":
            raise _Died
        return perform(*call.args)

    try:
        with opened(root) as checkpointer, Syscalls().hooked(hook):
            save(checkpointer, 2)
    except _Died:
        return
    raise AssertionError("there was no commit")


@dataclass(frozen=True)
class Scenario:
    """A save of `step` with `options`, onto a root where `earlier` steps were saved (with the same options)."""

    step: int
    earlier: int
    options: dict[str, Any]
    complete_save_left: bool = False

    def prepare(self, root: Path) -> None:
        """Make the root in its state before the save."""
        with opened(root, **self.options) as checkpointer:
            for step in range(1, self.earlier + 1):
                save(checkpointer, step)
            retired = root / ".retired"
            kept = [(path, root / path.name) for path in retired.iterdir()] if retired.exists() else []
            for path, aside in kept:
                path.rename(aside)
        for path, aside in kept:  # `close` removes them
            aside.rename(path)
        if self.complete_save_left:
            _die_before_the_commit(root)


SCENARIOS = {
    "first": Scenario(1, 0, {}),
    "second": Scenario(2, 1, {}),
    "retention": Scenario(2, 1, {"keep": 1, "reuse_files": False}),
    "reuse": Scenario(4, 3, {"keep": 1, "reuse_files": True}),
    "adoption": Scenario(3, 1, {"keep": 2}, complete_save_left=True),
}
