"""The memory of tensors, as arrays of what is stored for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckpt.storage.dtypes import stored, torch_dtype_name

__all__ = ["as_numpy"]


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory of a CPU tensor as an array of its stored dtype (with the trailing dimension of raw ones)."""
    how = stored(torch_dtype_name(tensor.dtype))
    if not how.raw and how.numpy_dtype.isbuiltin == 1:
        return tensor.numpy()
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    if how.trailing:
        bits = bits.unsqueeze(-1).view(torch.uint8)
    return bits.numpy().view(how.numpy_dtype)
