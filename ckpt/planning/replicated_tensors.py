"""Replicated tensors, which several ranks have, and what happens if the ranks' copies differ.

    kind        tensors                                                    written by        if copies differ
    parameter   parameters of modules, state of optimizers; tensors of     any of its ranks  an error
                more than 64 KiB without such an owner; parts of tensor
                subclasses
    buffer      buffers of modules; running statistics, by their names     the lowest rank   expected
    other       all other tensors                                          the lowest rank   a warning

A parameter is divided among its ranks, so that each writes a part. A buffer is not: ranks of data-parallel training
have their own running statistics, and those of one rank must not be mixed with those of another.

A dict of tensors, such as ``model.state_dict()``, does not tell which are parameters. Small tensors cost nothing if one
rank writes them, so only large ones count as parameters there.

Runs in the trainer, once for each structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch

from ckpt.paths import Path
from ckpt.planning.boxes import OwnBoxes
from ckpt.planning.description import TensorSpec
from ckpt.planning.state_dict import FlatState, TensorLeaf
from ckpt.planning.tensors import local_tensor

Kind = Literal["parameter", "buffer", "other"]

_LARGE_BYTES = 64 << 10
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of the normalization layers of PyTorch
_EXTRA_STATE = "_extra_state"


def replica_kinds(flat: FlatState) -> dict[Path, Kind]:
    """Return the kind of each tensor that other ranks may have, too: not per rank, and not only sharded."""
    owners = {owner.path: owner.stateful for owner in flat.owners}
    buffers = {path: _Buffers(owner) for path, owner in owners.items() if isinstance(owner, torch.nn.Module)}
    kinds = {
        path: _kind(path, leaf, owners, buffers) for path, leaf in flat.tensors.items() if _has_replicas(leaf.spec)
    }
    subclasses = {path for path, (container, _) in flat.containers.items() if container.kind == "tensor"}
    return {path: "parameter" if path[:-1] in subclasses else kind for path, kind in kinds.items()}


def _has_replicas(spec: TensorSpec) -> bool:
    if spec.per_rank or 0 in spec.shape or isinstance(spec.sharding, OwnBoxes):
        return False
    if spec.sharding is None:
        return True
    ways = zip(spec.sharding.placements, spec.sharding.mesh_shape, strict=True)
    return any(placement.dim is None and size > 1 for placement, size in ways)


def _kind(path: Path, leaf: TensorLeaf, owners: dict[Path, Any], buffers: dict[Path, _Buffers]) -> Kind:
    for end in range(len(path) - 1, -1, -1):  # from the innermost owner
        owner, name = path[:end], path[end:]
        if owner in buffers:
            if str(name[0]).endswith(_EXTRA_STATE):
                break
            return "buffer" if buffers[owner].has(name, leaf.local) else "parameter"
        if hasattr(owners.get(owner), "param_groups"):
            return "parameter"
    if str(path[-1]).rpartition(".")[2] in _STATISTICS:
        return "buffer"
    return "parameter" if math.prod(leaf.spec.shape) * leaf.spec.itemsize > _LARGE_BYTES else "other"


class _Buffers:
    """The buffers of a module, by name, and by memory because wrappers change names in state dicts."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names: set[Path] = set()
        self._memory: set[tuple[torch.device, int]] = set()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._names.add((name,))
            self._memory.update(_address(buffer))

    def has(self, name: Path, local: torch.Tensor) -> bool:
        return name in self._names or any(where in self._memory for where in _address(local))


def _address(tensor: torch.Tensor) -> Iterator[tuple[torch.device, int]]:
    local = local_tensor(tensor) if hasattr(tensor, "to_local") else tensor
    if local.layout == torch.strided and local.numel():
        yield local.device, local.data_ptr()
