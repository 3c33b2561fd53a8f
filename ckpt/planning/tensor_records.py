"""Where the elements of many tensors are, and what they are: addresses, dtypes, devices, sizes, strides.

Read in C through libtorch's stable interface: in Python, each property of 10,000 tensors takes 0.7 to 2 ms.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ckpt.native import describe_tensors

__all__ = ["TensorRecords"]

Array = np.ndarray[Any, np.dtype[Any]]

_GETTERS = ("layout", "data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")  # as in tensors.c
_implementation = attrgetter("_cdata")


@dataclass(frozen=True, slots=True)
class TensorRecords:
    """The address of each tensor's elements, and all of their dtypes, devices, sizes and strides in one array.

    Tensors with equal records are saved alike. The records keep neither a tensor nor its memory.
    """

    addresses: Array
    described: Array

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> TensorRecords | None:
        """Read those of plain tensors. None if one is not strided, or conjugated or negated, or if this is impossible.

        It is impossible without compiled code, and with a version of PyTorch that does not have what is needed.
        """
        interface = _interface()
        return None if interface is None else _read(interface, tensors)

    def are_equal(self, others: TensorRecords | None) -> bool:
        """Whether other tensors have the same records."""
        mine = self.addresses, self.described
        return others is not None and all(map(np.array_equal, mine, (others.addresses, others.described)))

    @property
    def are_distinct(self) -> bool:
        """Whether every tensor has memory, and no two of them begin at the same address."""
        ordered = np.sort(self.addresses)  # the first call of numpy.unique takes 29 ms
        return bool(self.addresses.all()) and bool((ordered[1:] != ordered[:-1]).all())


@dataclass(frozen=True, slots=True)
class _Interface:
    """The addresses of libtorch's functions, and the code of the layout of most tensors."""

    getters: Array
    strided: int


@functools.cache
def _interface() -> _Interface | None:
    """Return the functions of libtorch; None if they do not say of some tensors what Python says."""
    try:
        library = ctypes.CDLL(torch._C.__file__)  # whose dependencies have them
        functions = [getattr(library, f"aoti_torch_get_{name}") for name in _GETTERS]
        strided = int(library.aoti_torch_layout_strided())
    except (OSError, AttributeError):
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    found = _Interface(np.array(addresses, np.uint64), strided)
    matrix = torch.zeros(4, 6, dtype=torch.bfloat16)
    samples = [
        torch.zeros(()),
        matrix,
        matrix[1:, ::2].T,
        torch.zeros(0, 3, dtype=torch.int8),
        torch.nn.Parameter(matrix),
    ]
    records = _read(found, samples)
    if records is None or records.addresses.tolist() != [sample.data_ptr() for sample in samples]:
        return None
    words = records.described.tolist()
    for sample in samples:
        described, words = words[2 : 3 + 2 * sample.dim()], words[3 + 2 * sample.dim() :]
        if described != [sample.dim(), *sample.shape, *sample.stride()]:
            return None
    return found


def _read(interface: _Interface, tensors: list[torch.Tensor]) -> TensorRecords | None:
    # An at::Tensor is a pointer to its implementation, so an array of these is one of tensors.
    own = np.fromiter(map(_implementation, tensors), np.uint64, len(tensors))
    found = describe_tensors(own, interface.getters, interface.strided)
    # These need not be equal from save to save: they are the only properties that are not in the records.
    if found is None or any(map(torch.Tensor.is_neg, tensors)):
        return None
    return TensorRecords(*found)
