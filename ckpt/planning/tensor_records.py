"""Where the elements of many tensors are, and what they are: addresses, dtypes, devices, sizes, strides.

Read in C through libtorch's stable interface: in Python, each property of 10,000 tensors takes 0.7 to 2 ms. No
interface tells where an object of Python has its tensor, and a tensor its storage, and the bits of conjugated and
negated ones: these are found in a few tensors of which they are known.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.native import can_look, describe_tensors

Array = np.ndarray[Any, np.dtype[Any]]

_GETTERS = ("layout", "data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")  # as in tensors.c
_IMPLEMENTATION_BYTES = 176  # of a TensorImpl


@dataclass(frozen=True, slots=True)
class TensorRecords:
    """The address of each tensor's elements, and all of their dtypes, devices, sizes and strides in one array.

    Tensors with equal records are saved alike. The records keep neither a tensor nor its memory.
    """

    addresses: Array
    described: Array

    @classmethod
    def of(cls, tensors: list[torch.Tensor], dtensors: Sequence[torch.Tensor] = ()) -> TensorRecords | None:
        """Read those of plain tensors. None if one is not strided, or conjugated or negated, or if this is impossible.

        Of `dtensors`, which have no memory of their own, the sizes and strides are added. It is impossible without
        compiled code, and with a version of PyTorch that does not have what is needed.
        """
        interface = _interface()
        return None if interface is None else _read(interface, tensors, dtensors)

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
    """The addresses of libtorch's functions, the code of the layout of most tensors, and where parts of one are."""

    getters: Array
    strided: int
    layout: Array


def _interface() -> _Interface | None:
    """Return the functions of libtorch; None if they do not say of some tensors what Python says."""
    return _checked_interface() if can_look() else None


@functools.cache
def _checked_interface() -> _Interface | None:
    try:
        library = ctypes.CDLL(torch._C.__file__)  # whose dependencies have them
        functions = [getattr(library, f"aoti_torch_get_{name}") for name in _GETTERS]
        strided = int(library.aoti_torch_layout_strided())
    except (OSError, AttributeError):
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    matrix = torch.zeros(4, 6, dtype=torch.bfloat16)
    samples = [
        torch.zeros(()),
        matrix,
        matrix[1:, ::2].T,
        torch.zeros(0, 3, dtype=torch.int8),
        torch.nn.Parameter(matrix),
    ]
    layout = _layout(samples)
    if layout is None:
        return None
    found = _Interface(np.array(addresses, np.uint64), strided, layout)
    records = _read(found, samples)
    if records is None or records.addresses.tolist() != [sample.data_ptr() for sample in samples]:
        return None
    words = records.described.tolist()
    for sample in samples:
        described, words = words[2 : 3 + 2 * sample.dim()], words[3 + 2 * sample.dim() :]
        if described != [sample.dim(), *sample.shape, *sample.stride()]:
            return None
    return found


def _layout(samples: list[torch.Tensor]) -> Array | None:
    """Return where the parts of tensors are, and the bits of keys, as `struct layout` in tensors.c.

    They are where they are found in these samples: in C++ each is at the same place in all tensors. None if one is not
    found.
    """
    objects = [_words(id(sample), torch.Tensor.__basicsize__) for sample in samples]
    implementations = [_words(sample._cdata, _IMPLEMENTATION_BYTES) for sample in samples]
    at = [n for n, each in enumerate(zip(*objects, strict=True)) if [*each] == [sample._cdata for sample in samples]]
    storages = [sample.untyped_storage()._cdata for sample in samples]
    storage_at = [n for n, each in enumerate(zip(*implementations, strict=True)) if [*each] == storages]
    plain, complex_one = torch.zeros(3), torch.zeros(3, dtype=torch.complex64)
    negated, conjugated = _changed(plain, torch._neg_view(plain)), _changed(complex_one, complex_one.conj())
    keys = [n for n in negated.keys() & conjugated.keys() if negated[n] != conjugated[n]]
    if not len(at) == len(storage_at) == len(keys) == 1:
        return None
    bits = negated[keys[0]] | conjugated[keys[0]]
    if any(words[keys[0]] & bits for words in implementations):
        return None
    return np.array([8 * at[0], 8 * storage_at[0], 8 * keys[0], bits], np.uint64)


def _changed(tensor: torch.Tensor, view: torch.Tensor) -> dict[int, int]:
    """Return the only bit that is 1 in a word of a view and 0 in that of the tensor, by the number of the word."""
    words = zip(_words(tensor._cdata, _IMPLEMENTATION_BYTES), _words(view._cdata, _IMPLEMENTATION_BYTES), strict=True)
    changed = {number: (before ^ after, after) for number, (before, after) in enumerate(words)}
    return {number: bit for number, (bit, after) in changed.items() if bit.bit_count() == 1 and bit & after}


def _words(address: int, nbytes: int) -> list[int]:
    return list((ctypes.c_uint64 * (nbytes // 8)).from_address(address))


def _read(
    interface: _Interface, tensors: list[torch.Tensor], dtensors: Sequence[torch.Tensor] = ()
) -> TensorRecords | None:
    where = interface.getters, interface.strided, interface.layout
    addresses = np.empty(len(tensors), np.uint64)
    described = describe_tensors(tensors, *where, addresses)
    if described is not None and dtensors:
        wholes = describe_tensors(list(dtensors), *where, None)
        described = None if wholes is None else np.concatenate([described, wholes])
    return None if described is None else TensorRecords(addresses, described)
