"""Tensor subclasses that are stored by their parts: those of torchao, and those that the program registers.

Such a tensor has plain tensors inside, which PyTorch's protocol names: `__tensor_flatten__` returns their names and a
context, `__tensor_unflatten__` makes the tensor of them (see "Traceable tensor subclasses" in PyTorch's documentation).
A checkpoint only names a class: none is imported or called unless this table, or the program, has it. Does not import
torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from ckpt.values.registry import name_of

Follows = Literal["shape", "elements", "whole"]
"""How a part is sharded when its tensor is.

"shape": in the same dimensions, also if a dimension has one item for several of the tensor's. "elements": a part with
one dimension, with one item for a fixed number of the tensor's elements in C order. "whole": not at all.
"""


@dataclass(frozen=True)
class SubclassRule:
    """A class that may be stored. Parts that `follows` does not name follow the shape, if theirs allows it."""

    follows: Mapping[str, Follows] = field(default_factory=dict)


_OPTIM: Mapping[str, Follows] = {"scale": "elements", "qmap": "whole"}
_BUILT_IN: Mapping[str, SubclassRule] = MappingProxyType(
    {
        "torchao.optim.subclass_8bit.OptimState8bit": SubclassRule(_OPTIM),
        "torchao.optim.subclass_4bit.OptimState4bit": SubclassRule({**_OPTIM, "codes": "elements"}),
        "torchao.optim.subclass_fp8.OptimStateFp8": SubclassRule(_OPTIM),
        "torchao.quantization.Float8Tensor": SubclassRule(),
        "torchao.quantization.Int8Tensor": SubclassRule(),
        "torchao.quantization.Int4Tensor": SubclassRule(),
        "torchao.quantization.IntxUnpackedToInt8Tensor": SubclassRule(),
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor": SubclassRule(
            {
                "quantized_data": "elements",
                "quantization_factor": "elements",
                "quantized_scalers": "elements",
                "scaler_mean": "whole",
                "nf4": "whole",
            }
        ),
    }
)
_REGISTERED: dict[str, tuple[type[Any], SubclassRule]] = {}  # of the whole process, like registered types of values


def register_tensor_subclass(kind: type[Any], follows: Mapping[str, Follows] | None = None) -> None:
    """Allow tensors of exactly this class in a state, in this process: they are stored by their parts.

    `kind` has `__tensor_flatten__` and `__tensor_unflatten__`. `follows` says, for the names that the first returns,
    how a part is sharded when the tensor is the local part of a DTensor: "shape" (the default), "elements" or "whole",
    see `ckpt.values.tensor_subclasses.Follows`. Call it before saving and before restoring, on every rank. TypeError
    for a class without these methods, ValueError for another word.
    """
    if not isinstance(kind, type) or not all(
        callable(getattr(kind, method, None)) for method in ("__tensor_flatten__", "__tensor_unflatten__")
    ):
        raise TypeError(f"{kind!r} is not a tensor subclass with __tensor_flatten__ and __tensor_unflatten__")
    follows = dict(follows or {})
    for part, word in follows.items():
        if word not in get_args(Follows):
            raise ValueError(f"follows[{part!r}] must be one of {', '.join(get_args(Follows))}, not {word!r}")
    _REGISTERED[name_of(kind)] = kind, SubclassRule(follows)


def rule_of(kind: type[Any]) -> SubclassRule | None:
    """Return the rule for exactly this class; None if it may not be stored."""
    name = name_of(kind)
    registered = _REGISTERED.get(name)
    if registered is not None and registered[0] is kind:
        return registered[1]
    return _BUILT_IN.get(name) if hasattr(kind, "__tensor_flatten__") else None


def class_named(name: str) -> type[Any] | None:
    """Return the class with this name, imported if the table has it; None if it is unknown or not installed."""
    if name in _REGISTERED:
        return _REGISTERED[name][0]
    if name not in _BUILT_IN:
        return None
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
    return kind if isinstance(kind, type) else None
