"""Checkpoints of Lightning as they are read: by their names, as a whole or without some keys."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch

import ckpt
from ckpt import Checkpointer, CheckpointError, CheckpointNotFoundError, PerRank, RngState, StateError
from ckpt.integrations.lightning_names import is_link, located, names_in, read_name, resolved, root_of

__all__ = [
    "Nothing",
    "load_from_checkpoint",
    "newest",
    "read",
    "read_checkpoint",
    "refuse_objects",
    "taken_steps",
    "wait_for_newest",
]

_log = logging.getLogger("ckpt")
_T = TypeVar("_T")
_StrPath = str | os.PathLike[str]
_Path = tuple[Any, ...]  # of keys
_LAST = "last"  # how the names begin that `ckpt_path="last"` looks for


def wait_for_newest(path: _StrPath, timeout_s: float) -> None:
    """Wait while the newest step of a name is being written, and what this program saves beside it; at most so long."""
    path = located(path)
    root, deadline = root_of(resolved(path)), time.monotonic() + timeout_s
    ckpt.wait_until_written(root, read_name(path)[0], timeout=timeout_s)
    ckpt.wait_until_written(root, timeout=max(deadline - time.monotonic(), 0))  # a link may stand for the step before


def newest(path: _StrPath) -> tuple[str, int] | None:
    """Return root and number of the newest complete step of a name; None if a name for "last" has none.

    A symbolic link (``save_last="link"``) to a checkpoint that was never completed stands for the step before it.
    """
    path = located(path)
    root = root_of(resolved(path))
    steps = read_name(path)
    with Checkpointer(root, read_only=True) as reader:
        published = reader.all_steps()
    complete = [step for step in published if step <= steps[0] and (step in steps or is_link(path))]
    if complete:
        if complete[-1] != steps[0]:
            _log.warning("%s: the save of step %d is not complete; loading step %d", path, steps[0], complete[-1])
        return root, complete[-1]
    if os.path.basename(path).startswith(_LAST):
        _log.warning("%s: its save was not completed, and there was none before; nothing is loaded", path)
        return None
    names = [place for place in names_in(root) if _is_complete(place, published)]
    raise CheckpointNotFoundError(
        f"{path}: its save is not complete. It takes longer than the timeout (CkptIO.teardown() waits for it, as does "
        "the end of `fit`), or was never completed, because a job ended meanwhile or the save failed. Complete "
        f"checkpoints there: {', '.join(names) or 'none'}"
    )


def _is_complete(place: str, published: list[int]) -> bool:
    return not set(_listed(place)).isdisjoint(published)


def taken_steps(root: str) -> list[int]:
    """Return the steps of a root that a new name must not get, but those that are published already.

    Those that names list, and those of saves that are not decided: another process may be about to publish one, also if
    its name was removed.
    """
    return ckpt.pending_steps(root) + [step for place in names_in(root) for step in _listed(place)]


def _listed(place: str) -> list[int]:
    """Return the steps that a name lists; none if it is not a name."""
    with contextlib.suppress(CheckpointError):
        return read_name(place)
    return []


# -- reading -----------------------------------------------------------------------------------------------------------


class Nothing(dict[str, Any]):
    """A checkpoint of which Lightning restores nothing: it counts as false, and has the one member that is read."""

    def __init__(self) -> None:
        from lightning.pytorch import __version__ as version  # here, so that `lightning` says what is missing

        super().__init__({"pytorch-lightning_version": version})

    def __bool__(self) -> bool:
        return False


def read_checkpoint(path: _StrPath, *, timeout: timedelta | float = timedelta(minutes=10)) -> dict[str, Any]:
    """Return a checkpoint of Lightning: ``state_dict``, ``hyper_parameters``, ``callbacks`` and so on, on the CPU.

    In any process, and by any rank alone. Waits while the newest save of the name is being written, at most `timeout`.
    Raises as `CkptIO.load_checkpoint` does, and CheckpointNotFoundError if no save of the name was completed.
    """
    wait_for_newest(path, timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
    found = newest(path)
    if found is None:
        raise CheckpointNotFoundError(f"{os.fspath(path)}: no save of this name was completed")
    return read(*found)


def load_from_checkpoint(kind: type[_T], path: _StrPath, **arguments: Any) -> _T:
    """Return the result of ``kind.load_from_checkpoint(path, **arguments)`` for a file of torch.save.

    `kind` is a LightningModule or LightningDataModule. By any rank alone. In memory, the checkpoint is put into the
    form of such a file, so for a moment it needs its size three times. Raises as `read_checkpoint` does.
    """
    file = io.BytesIO()
    torch.save(read_checkpoint(path), file)
    file.seek(0)
    arguments.setdefault("weights_only", False)  # these are the bytes written above
    model: _T = kind.load_from_checkpoint(file, **arguments)  # type: ignore[attr-defined]
    return model


def read(root: str, step: int, exclude: tuple[str, ...] = (), *, restores: bool = False) -> dict[str, Any]:
    """Return a step without the topmost keys in `exclude`. What belongs to single ranks is that of this rank.

    `restores`: a Trainer goes on from it, as `ckpt.observe` is told.
    """
    rank = ckpt.Ranks().rank
    with ckpt.open(root, step) as checkpoint, checkpoint.restoring() if restores else contextlib.nullcontext():
        has_rank = rank < checkpoint.summary["world_size"]
        state: dict[str, Any] = ckpt.load(checkpoint, rank=rank if has_rank else None, exclude=exclude)
    for path, unknown in _unregistered((), state):
        functions = ", to_json, from_json" if unknown.form == "registered" else ""
        raise StateError(
            f"{_display(path)} of step {step} of {root} is a {unknown.name}, which this program has not registered: "
            f"call ckpt.register_encoder({unknown.name.rpartition('.')[2]}{functions}) before"
        )
    return state


def _unregistered(path: _Path, node: Any) -> Iterator[tuple[_Path, ckpt.Unregistered]]:
    """Yield the placeholders for values of types that are not registered, and where they are."""
    if isinstance(node, ckpt.Unregistered):
        yield path, node
    elif isinstance(node, Mapping):
        for key, item in node.items():
            yield from _unregistered(path, key)
            yield from _unregistered((*path, key), item)
    elif isinstance(node, list | tuple | set | frozenset | deque):
        for number, item in enumerate(node):
            yield from _unregistered((*path, number), item)
    elif isinstance(node, Namespace):
        yield from _unregistered(path, vars(node))


def _display(path: _Path) -> str:
    return "/".join(map(str, path))


def refuse_objects(node: Any, path: _Path) -> None:
    """Raise StateError for an object with a state dict: a load would return the state dict in its place."""
    if isinstance(node, Mapping):
        for key, item in node.items():
            refuse_objects(item, (*path, key))
    elif isinstance(node, list | tuple):
        for number, item in enumerate(node):
            refuse_objects(item, (*path, number))
    elif isinstance(node, torch.nn.Module) or (
        callable(getattr(node, "load_state_dict", None)) and not isinstance(node, RngState | PerRank | torch.Tensor)
    ):
        raise StateError(
            f"{_display(path)} is a {type(node).__name__}, an object that cannot be stored. If it is an argument of "
            f"the LightningModule, leave it out: self.save_hyperparameters(ignore=[{str(path[-1])!r}]); otherwise put "
            "its state_dict() there"
        )
