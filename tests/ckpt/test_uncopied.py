"""What owns processes, descriptors or leases is not copied: a copy would close those of the original."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import ckpt
from ckpt.async_calls import DistributedAsyncCaller
from ckpt.storage.directories import lock_shared
from ckpt.storage.node_lock import NodeLock
from inprocess.ipc.packets import Channel, Codec
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.wakeup import Wakeup
from tests.support.saves import save_here

_COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of an object that holds it": lambda made: copy.deepcopy(_Holder(made)),
    "pickle": pickle.dumps,
    "cloudpickle": cloudpickle.dumps,
}


class _Holder:
    """As a module or the hyperparameters of a program."""

    def __init__(self, held: Any) -> None:
        self.held = held


@contextlib.contextmanager
def _step(folder: Path) -> Iterator[Any]:
    with ckpt.Checkpointer(folder) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
    with ckpt.open(folder / "step_00000001") as step:
        yield step


@contextlib.contextmanager
def _watcher(folder: Path) -> Iterator[Any]:
    with ckpt.Checkpointer(folder) as checkpointer, ckpt.PreemptionWatcher(checkpointer) as watcher:
        yield watcher


@contextlib.contextmanager
def _channel(folder: Path) -> Iterator[Any]:
    channel, other = Channel.pair(Codec())
    with contextlib.closing(channel), other:
        yield channel


_MADE: dict[str, Callable[[Path], Any]] = {
    "Checkpointer": ckpt.Checkpointer,
    "AsyncCallsQueue": lambda folder: ckpt.AsyncCallsQueue(),
    "DistributedAsyncCaller": lambda folder: contextlib.closing(DistributedAsyncCaller()),
    "Channel": _channel,
    "Wakeup": lambda folder: contextlib.closing(Wakeup()),
    "SharedMemory": lambda folder: SharedMemory.create("test", 4096),
    "DirectoryLock": lambda folder: contextlib.closing(lock_shared(str(folder))),  # type: ignore[type-var]
    "NodeLock": lambda folder: contextlib.nullcontext(NodeLock("test")),
    "observation": lambda folder: ckpt.observe(print),
    "step": _step,
    "PreemptionWatcher": _watcher,
}


@pytest.mark.parametrize("name", _MADE)
def test_copies_are_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    with _MADE[name](tmp_path) as made:
        for how, make in _COPIES.items():
            with pytest.raises(TypeError) as refused:
                make(made)
            assert any(text in str(refused.value) for text in ("cannot be copied", "can only be passed")), how


def test_tensor_of_a_step_is_not_copied(tmp_path: Path) -> None:
    with _step(tmp_path) as step:
        for make in _COPIES.values():
            with pytest.raises(TypeError, match="cannot be copied"):
                make(step["w"])
        assert step["w"][:].tolist() == [1.0, 1.0, 1.0]


def test_saves_go_on_after_a_copy_was_refused(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
        with pytest.raises(TypeError, match=r"ckpt\.checkpointer\.Checkpointer cannot be copied"):
            copy.deepcopy({"options": _Holder(checkpointer)})
        save_here(checkpointer, {"w": torch.ones(3)}, 2)
        assert checkpointer.all_steps() == [1, 2]
