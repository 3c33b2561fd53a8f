"""The class of an optimizer, which a save records beside its state dict. Imports torch."""

from __future__ import annotations

import torch

from ckpt.values.containers import Container

__all__ = ["class_names", "recorded_class"]


def class_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the name of the class of an optimizer, and those of its base classes below `torch.optim.Optimizer`.

    Of an optimizer that wraps another one as its attribute `optimizer`, as accelerate does, those of the inner one.
    """
    seen = {id(optimizer)}
    while isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer) and id(inner) not in seen:
        optimizer = inner
        seen.add(id(optimizer))
    # Without the module: a class of the program's own script is in `__main__`, or not, as the program was started.
    return tuple(
        kind.__name__
        for kind in type(optimizer).__mro__
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    )


def recorded_class(stateful: object, state_dict: object) -> Container | None:
    """Return what a save records of an optimizer whose state dict is a plain dict; None for anything else."""
    if not isinstance(stateful, torch.optim.Optimizer) or type(state_dict) is not dict:
        return None
    return Container("optimizer", fields=class_names(stateful))
