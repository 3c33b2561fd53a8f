"""The errors of `ckpt`, and the classes of Python as which programs catch them."""

import errno
import inspect
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import errors
from tests.support.saves import save_here

BUILT_IN: dict[str, type[Exception]] = {
    "CheckpointNotFoundError": FileNotFoundError,
    "CheckpointExistsError": FileExistsError,
    "CheckpointTimeoutError": TimeoutError,
}
NUMBERS = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, TimeoutError: errno.ETIMEDOUT}
ALL = sorted(set(errors.__all__) - {"RemoteTraceback"})


@pytest.mark.parametrize("name", ALL)
def test_each_class(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what happened", rank=1, step=2)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (type(each), str(each), each.rank, each.step, each.finalized) == (kind, "what happened", 1, 2, [])
        assert isinstance(each, ckpt.CheckpointError)
    built_in = BUILT_IN.get(name)
    assert isinstance(error, OSError) == (built_in is not None)
    if built_in is not None:
        assert isinstance(error, built_in)
        assert error.errno == NUMBERS[built_in]


def _saved(root: Path) -> Path:
    with ckpt.Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(2)}, 1)
    return root


def _restore(root: Path, step: int) -> None:
    with ckpt.Checkpointer(_saved(root)) as checkpointer:
        checkpointer.restore({"w": torch.ones(2)}, step)


def _no_slot(root: Path) -> None:
    with ckpt.Checkpointer(root, staging=ckpt.Staging(slots=1), timeout=timedelta(seconds=0.1)) as checkpointer:
        request = checkpointer.save_request({"w": torch.ones(2)}, 1)
        try:
            checkpointer.save_request({"w": torch.ones(2)}, 2)
        finally:
            checkpointer.queue.schedule_async_request(request)


def _save(root: Path, step: Any, **options: Any) -> None:
    with ckpt.Checkpointer(_saved(root), **options) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(2)}, step)


CASES: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "open a path that is not there": (ckpt.open, FileNotFoundError),
    "open a step that is not there": (lambda root: ckpt.open(_saved(root), 7), FileNotFoundError),
    "open the directory of a step": (lambda root: ckpt.open(root / "step_00000007"), FileNotFoundError),
    "load a path that is not there": (ckpt.load, FileNotFoundError),
    "load a step that is not there": (lambda root: ckpt.load(_saved(root), 7), FileNotFoundError),
    "zarr_store of a path that is not there": (ckpt.zarr_store, FileNotFoundError),
    "restore a step that is not there": (lambda root: _restore(root, 7), FileNotFoundError),
    "delete a step that is not there": (lambda root: ckpt.Checkpointer(_saved(root)).delete(7), FileNotFoundError),
    "pin a step that is not there": (lambda root: ckpt.Checkpointer(_saved(root)).pin(7), FileNotFoundError),
    "save a step again": (lambda root: _save(root, 1), FileExistsError),
    "wait for a slot": (_no_slot, TimeoutError),
    "save a negative step": (lambda root: _save(root, -1), ValueError),
    "save a step that is no number": (lambda root: _save(root, "2"), ValueError),
    "no slots for snapshots": (lambda root: _save(root, 2, snapshots=1, staging=ckpt.Staging(slots=1)), ValueError),
    "an unknown count of replicas": (lambda root: _save(root, 2, snapshots=ckpt.Snapshots(replicas=2)), ValueError),
}


@pytest.mark.parametrize("what", CASES)
def test_what_a_program_catches(tmp_path: Path, what: str) -> None:
    act, expected = CASES[what]
    with pytest.raises(expected) as caught:
        act(tmp_path / "root")
    if expected is not ValueError:
        assert isinstance(caught.value, ckpt.CheckpointError)


def test_no_class_is_forgotten_in_the_table() -> None:
    classes = {name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, Exception)}
    assert classes == {*ALL, "RemoteTraceback"}
    assert set(BUILT_IN) <= set(ALL)
