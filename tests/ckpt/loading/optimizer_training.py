"""A small model, one training loop for all optimizers, and a comparison of state dicts by their bits."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

_SECOND_ORDER = ("AdaHessian", "SophiaH")


def model_of(seed: int) -> nn.Module:
    """Return a model with matrices, vectors, and a parameter that is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train with inputs and random numbers that depend on the number of the step alone."""
    second_order = type(optimizer).__name__ in _SECOND_ORDER
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(5, 9)

        @torch.enable_grad()
        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward(create_graph=second_order)
            return loss.detach()

        if hasattr(optimizer, "train"):
            optimizer.train()
        closure()
        optimizer.step(closure)


def same(a: Any, b: Any) -> bool:
    """Return whether two state dicts are equal in types, dtypes and bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape, _bits(a)) == (b.dtype, b.shape, _bits(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _bits(tensor: torch.Tensor) -> bytes:
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copied.copy_(tensor.detach()).reshape(-1).view(torch.uint8).numpy().tobytes()
