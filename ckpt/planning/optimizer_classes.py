"""The class of an optimizer, which a save records beside its state dict. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from ckpt.values.containers import Container


def is_optimizer(stateful: Any) -> bool:
    """Return whether an object is an optimizer, or like one: a wrapper that is no `torch.optim.Optimizer`."""
    return isinstance(stateful, torch.optim.Optimizer) or isinstance(getattr(stateful, "param_groups", None), list)


def class_names(optimizer: Any) -> tuple[str, ...]:
    """Return the name of the class of an optimizer, and those of its base classes below `torch.optim.Optimizer`.

    Of one that wraps another optimizer as its attribute `optimizer`, as accelerate's does, those of the inner one.
    Empty if it is none of PyTorch's kind.
    """
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "__dict__", {}).get("optimizer")
        optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    # Without the module: a class of the program's own script is in `__main__` or not, as the program was started.
    return tuple(
        kind.__name__
        for kind in type(optimizer).__mro__
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    )


def recorded_class(stateful: Any, state_dict: object) -> Container | None:
    """Return the record of an optimizer whose state dict is a plain dict; None for anything else."""
    names = class_names(stateful) if type(state_dict) is dict and is_optimizer(stateful) else ()
    return Container("optimizer", fields=names) if names else None
