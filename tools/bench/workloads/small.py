"""Very many small tensors, and the same bytes in one."""

import torch

from tools.bench.state import State

__all__ = ["many_state", "one_state"]


def many_state(count: int, tensor_bytes: int = 4096) -> State:
    """`count` tensors of `tensor_bytes`."""
    values = torch.arange(tensor_bytes // 4, dtype=torch.float32)
    return {"model": {f"layers.{number // 100}.{number % 100}": values + number for number in range(count)}}


def one_state(count: int, tensor_bytes: int = 4096) -> State:
    """One tensor of as many bytes."""
    return {"model": {"all": torch.arange(count * tensor_bytes // 4, dtype=torch.float32)}}
