"""Data loaders with a state: how they are recognised, and their state as one value of this rank.

The state of a `torchdata.stateful_dataloader.StatefulDataLoader` is not like that of other objects: it is the position
of this rank, its keys differ before and after the first batch and from rank to rank, and asking a new loader for it
starts its workers. So it is one value, whatever is in it, and is restored without comparing it with anything. Tensors
and arrays in it, such as the state of a random number generator, are part of the value. Runs in the trainer; torchdata
is not imported.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckpt.errors import CheckpointCorruptError, StateError
from ckpt.paths import Path, display
from ckpt.planning.tensors import check_array, check_storable
from ckpt.storage.dtypes import torch_dtype, torch_dtype_name
from ckpt.values.registry import ArrayValue

_CLASSES = frozenset({("torchdata.stateful_dataloader", "StatefulDataLoader"), ("torchdata.nodes", "Loader")})
"""Packages, and names of classes in them. Subclasses elsewhere are recognised by these bases."""

_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_MAX_NESTING = 100


def is_data_loader(kind: type[Any]) -> bool:
    """Return whether a class is a data loader of torchdata, or derived from one."""
    return any(
        base.__name__ == name and (base.__module__ == package or base.__module__.startswith(f"{package}."))
        for base in kind.__mro__
        for package, name in _CLASSES
    )


def storable(path: Path, state: Any) -> Any:
    """Return a state as one value: its tensors and arrays as `ArrayValue`, everything else as it is.

    StateError, naming the path, for a tensor that is not on the CPU or has no elements to copy.
    """
    return _mapped(path, state, _stored_leaf)


def loadable(value: Any) -> Any:
    """Return the state that `storable` has made `value` of. CheckpointCorruptError for an invalid array."""
    return _mapped((), value, _loaded_leaf)


def _mapped(path: Path, node: Any, leaf: Callable[[Path, Any], Any]) -> Any:
    """Copy the containers of a state, and replace its leaves."""
    if len(path) > _MAX_NESTING:
        raise StateError(f"{display(path[:8])}/...: the state is nested deeper than {_MAX_NESTING}, or contains itself")
    kind = type(node)
    if kind is dict or kind is OrderedDict:
        return kind((key, _mapped((*path, _shown(key)), item, leaf)) for key, item in node.items())
    if kind is list or kind is tuple:
        return kind(_mapped((*path, number), item, leaf) for number, item in enumerate(node))
    return leaf(path, node)


def _shown(key: Any) -> str | int:
    return key if isinstance(key, str | int) else repr(key)


def _stored_leaf(path: Path, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        check_storable(path, leaf)
        if not leaf.is_cpu:
            raise StateError(
                f"{display(path)}: a tensor on {leaf.device} in the state of a data loader; move it to the CPU"
            )
        whole = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return ArrayValue("torch", torch_dtype_name(leaf.dtype), tuple(leaf.shape), data)
    if isinstance(leaf, np.ndarray):
        check_array(path, leaf)
        if _NUMPY_DTYPE.fullmatch(leaf.dtype.str) is None:
            raise StateError(f"{display(path)}: numpy arrays of dtype {leaf.dtype} cannot be stored")
        return ArrayValue("numpy", leaf.dtype.str, leaf.shape, leaf.tobytes())
    return leaf


def _loaded_leaf(path: Path, leaf: Any) -> Any:
    if not isinstance(leaf, ArrayValue):
        return leaf
    try:
        return _array(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointCorruptError(f"{display(path)} is not {leaf!r}: {error}") from None


def _array(value: ArrayValue) -> Any:
    """Return the tensor or array. An exception if its bytes are not those of its dtype and shape."""
    if value.library == "numpy":
        if _NUMPY_DTYPE.fullmatch(value.dtype) is None:
            raise ValueError("it is not a dtype of numbers")
        return np.frombuffer(value.data, value.dtype).reshape(value.shape).copy()
    dtype = torch_dtype(value.dtype)
    if not value.data:
        if math.prod(value.shape):
            raise ValueError("it has no data")
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).view(dtype).reshape(value.shape)
