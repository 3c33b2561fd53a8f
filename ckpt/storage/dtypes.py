"""How each torch dtype is stored in a Zarr array.

A dtype is stored as itself if Zarr has a registered name for it that common readers support. Every other one is stored
as raw bytes (``uint8``, with a trailing dimension if an element has several), and the array's attribute ``torch_dtype``
names it. Dtypes have torch's names without the ``torch.``. Only `torch_dtype` imports torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.errors import StateError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredDtype:
    """How one torch dtype is stored.

    If `raw`, the stored elements are ``uint8``, `itemsize` of them for each element of the tensor.
    """

    zarr_name: str
    itemsize: int
    raw: bool

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the stored elements."""
        return _numpy_dtype(self.zarr_name)

    @property
    def trailing(self) -> tuple[int, ...]:
        """The dimensions of the stored array after those of the tensor."""
        return (self.itemsize,) if self.raw and self.itemsize > 1 else ()

    @property
    def fill_value(self) -> bool | int | float | str | list[float]:
        """The JSON form of the element whose bytes are all zero."""
        if self.zarr_name in _OF_ML_DTYPES:
            return "0x00" if self.zarr_name == "float8_e8m0fnu" else 0.0  # it has no zero; these bits are 2**-127
        match self.numpy_dtype.kind:
            case "b":
                return False
            case "i" | "u":
                return 0
            case "c":
                return [0.0, 0.0]
            case _:
                return 0.0


_OF_NUMPY = (
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
)
"""Stored under their own names."""

_OF_ML_DTYPES = MappingProxyType(
    {"bfloat16": 2} | dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1)
)
"""Stored under their own names: the number of bytes of an element."""

_RAW = MappingProxyType(
    {"complex32": 4, "bits16": 2, "qint32": 4}
    | dict.fromkeys(("float8_e4m3fn", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1)
    | dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4"), 1)
    | {f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)}
)
"""Stored as raw bytes: the number of bytes of an element."""


def names() -> tuple[str, ...]:
    """Return the names of all dtypes that can be stored."""
    return (*_OF_NUMPY, *_OF_ML_DTYPES, *_RAW)


@functools.cache
def stored(dtype_name: str) -> StoredDtype:
    """Return how `dtype_name` is stored; `StateError` if it is not a known dtype."""
    if dtype_name in _OF_NUMPY:
        return StoredDtype(dtype_name, np.dtype(dtype_name).itemsize, raw=False)
    if dtype_name in _OF_ML_DTYPES:
        return StoredDtype(dtype_name, _OF_ML_DTYPES[dtype_name], raw=False)
    if dtype_name in _RAW:
        return StoredDtype("uint8", _RAW[dtype_name], raw=True)
    raise StateError(f"tensors of dtype {dtype_name!r} cannot be stored; convert them to one of {', '.join(names())}")


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name in _OF_ML_DTYPES:
        import ml_dtypes  # here: the writer of a save that is not compressed needs no more than sizes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


@functools.cache
def torch_dtype(dtype_name: str) -> torch.dtype:
    """Return the dtype with this name; `StateError` if this version of torch has none. Imports torch."""
    import torch

    dtype = vars(torch).get(dtype_name)  # getattr would import some modules
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"torch {torch.__version__} has no dtype {dtype_name!r}; a newer version may have")
    return dtype


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`."""
    return str(dtype).removeprefix("torch.")
