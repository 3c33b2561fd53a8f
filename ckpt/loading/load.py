"""`ckpt.load`: the state of a step without a state to restore into. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch

from ckpt.errors import CheckpointCorruptError, StateMismatchError
from ckpt.loading.index import CheckpointIndex
from ckpt.loading.lazy import Checkpoint, open_checkpoint
from ckpt.loading.new_tensors import read_tensors
from ckpt.paths import Path, display
from ckpt.values.containers import rebuild

_SHOWN = 20
_T = TypeVar("_T")


def load(
    path: str | os.PathLike[str] | Checkpoint,
    step: int | None = None,
    *,
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    exclude: str | Collection[str | int] = (),
    lazy: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the state of a published step, nested as it was saved, with new torch tensors. Needs no template.

    `path` is a checkpoint root (then `step`, or the newest one), or the directory of a step; it may be a URL, with the
    `storage_options` of `Checkpointer`; or a step that `ckpt.open` has opened, which stays open. With `prefix`, keys
    joined by "/", what is there is returned: ``prefix="model"`` gives the state dict of a model. What is below the
    topmost keys in `exclude`, such as ``exclude=["optimizer"]``, is left out, and not read. `dtype` is that of
    floating-point tensors, except float8 ones and parts of quantized tensors; `device` is where the tensors are put.
    What belongs to single ranks (`PerRank`, `RngState`) is left out, unless `rank` says whose to take.

    With `lazy`, tensors are `LazyTensor`, which read their elements when they are indexed or converted (`torch()`);
    as long as one of them is in use, retention keeps the step, as `ckpt.open` describes. `dtype` and `device` must not
    be given then.

    Objects with ``state_dict`` are returned as what that returned, numpy arrays as tensors. Values and tensor
    subclasses of classes that this program has not registered are returned as `Unregistered`, and as dicts of their
    parts. Nothing in the checkpoint is executed.

    For any thread, without communication. Raises what `ckpt.open` raises; CheckpointCorruptError for damaged bytes;
    StateMismatchError if the step has nothing at `prefix`.
    """
    if lazy and (dtype is not None or device is not None):
        raise ValueError("a lazy tensor is read as it was saved; give dtype and device to its torch()")
    left_out = frozenset((exclude,) if isinstance(exclude, str) else exclude)
    if isinstance(path, Checkpoint):
        return _load(path, prefix, dtype, device, rank, left_out, lazy)
    checkpoint = open_checkpoint(path, step, storage_options=storage_options)
    try:
        return _load(checkpoint, prefix, dtype, device, rank, left_out, lazy)
    finally:
        if not lazy:
            checkpoint.close()


def _load(
    checkpoint: Checkpoint,
    prefix: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    rank: int | None,
    exclude: Collection[str | int],
    lazy: bool,
) -> Any:
    index = checkpoint.index
    if rank is not None and not 0 <= rank < index.world_size:
        raise ValueError(f"rank {rank} is not one of the {index.world_size} ranks that wrote {checkpoint.path}")
    at = _prefix(index, prefix)

    def wanted_of(items: Mapping[Path, _T]) -> dict[Path, _T]:
        return {path: item for path, item in items.items() if path[: len(at)] == at and path[:1] not in excluded}

    excluded = {(key,) for key in exclude}
    tensors = wanted_of(index.tensors) | wanted_of(_of_rank(index.per_rank_tensors, rank))
    values = wanted_of(index.values) | wanted_of(_of_rank(index.per_rank_values, rank))
    containers = wanted_of(index.containers) | wanted_of(_of_rank(index.per_rank_containers, rank))
    aliases = {}
    for path, target in wanted_of(index.aliases).items():
        stored = index.tensor(target) or index.tensor(target, rank)
        if stored is not None:
            aliases[path] = stored
    named = tensors | aliases
    made: dict[int, Any]
    if lazy:
        made = {id(each): checkpoint.lazy(display(path), each) for path, each in reversed(named.items())}
    else:
        inside = {path for path, container in containers.items() if container.kind == "tensor"}
        parts = {id(each) for path, each in named.items() if path[:-1] in inside}
        wanted = {id(each): (path, each) for path, each in reversed(named.items())}
        made = read_tensors(index, {key: item for key, item in wanted.items() if key not in parts}, dtype, device)
        made |= read_tensors(index, {key: item for key, item in wanted.items() if key in parts}, None, device)
        checkpoint.check()
        checkpoint.count_restored(sum(tensor.nbytes for tensor in made.values()))
    leaves = {path: made[id(each)] for path, each in named.items()} | values
    try:
        return rebuild(
            {path[len(at) :]: leaf for path, leaf in leaves.items()},
            {path[len(at) :]: container for path, container in containers.items()},
        )
    except ValueError as error:
        raise CheckpointCorruptError(f"{checkpoint.path} records a state that cannot be made: {error}") from error


def _prefix(index: CheckpointIndex, prefix: str | None) -> Path:
    """Return the path with a name. StateMismatchError if nothing or several paths have it, or begin with it."""
    if prefix is None:
        return ()
    name = prefix.rstrip("/")
    paths = {path[:length] for path in _paths(index) for length in range(1, len(path) + 1)}
    found = [path for path in paths if display(path) == name]
    if len(found) > 1:
        raise StateMismatchError(
            f"{prefix!r} names several places in {index.path}: {sorted(map(list, found), key=repr)}; load without it",
            step=index.step,
        )
    if not found:
        shown = sorted({display(path[:1]) for path in paths})
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        raise StateMismatchError(
            f"{index.path} has nothing at {prefix!r}; its items are {', '.join(shown[:_SHOWN])}{more}", step=index.step
        )
    return found[0]


def _paths(index: CheckpointIndex) -> Iterator[Path]:
    return chain(index.tensors, index.aliases, index.per_rank_tensors, index.values, index.per_rank_values)


def _of_rank(items: Mapping[Path, Mapping[int, _T]], rank: int | None) -> dict[Path, _T]:
    return {} if rank is None else {path: own[rank] for path, own in items.items() if rank in own}
