"""Copies between pinned memory and a GPU, many rows in one call of CUDA's driver.

PyTorch makes one copy for each run of memory, which is slow: 8,000 inner chunks, 4 bytes apart, take several times as
long as all their bytes in one run. The driver copies rows that are some distance apart (`cuMemcpy2DAsync` of
CUDA's driver API) at the speed of the bus.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import numpy as np
import torch

from ckpt.staging.copy_table import RowTable

_log = logging.getLogger("ckpt")
Array = np.ndarray[Any, np.dtype[Any]]
_HOST, _DEVICE = 1, 2
_END = ("x", "y", "kind", "host", "device", "array", "pitch")
_TYPES = {"kind": np.uint32}
# CUDA_MEMCPY2D of the driver API; `x` is in bytes, `kind` says which of the three addresses counts.
_COPY = np.dtype(
    [(f"{end}_{name}", _TYPES.get(name, np.uint64)) for end in ("from", "to") for name in _END]
    + [("row_bytes", np.uint64), ("rows", np.uint64)],
    align=True,
)


@functools.cache
def _driver() -> Any:
    """Return CUDA's driver, which PyTorch has loaded; None if it is not found, or the GPU is of another vendor."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        _log.warning("copies from and to GPUs are slow, because libcuda.so.1 cannot be loaded: %s", error)
        return None
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def can_copy_rows() -> bool:
    """Return whether there is a driver that copies rows."""
    return _driver() is not None


def copies_of_rows(table: RowTable, addresses: Array, usable: Array, slot: int, *, into_slot: bool) -> Array:
    """Return the copies of the `usable` tensors, all on one GPU, at these addresses; `slot` is that of the slot."""
    chosen = np.flatnonzero(usable[table.tensor])
    copies = np.zeros(len(chosen), _COPY)
    on_gpu, in_slot = ("from", "to") if into_slot else ("to", "from")
    copies[f"{on_gpu}_kind"], copies[f"{in_slot}_kind"] = _DEVICE, _HOST
    copies[f"{on_gpu}_device"] = addresses[table.tensor[chosen]] + table.in_tensor[chosen]
    copies[f"{in_slot}_host"] = table.in_slot[chosen] + np.uint64(slot)
    copies[f"{on_gpu}_pitch"] = copies["row_bytes"] = table.nbytes[chosen]
    copies[f"{in_slot}_pitch"] = table.pitch[chosen]
    copies["rows"] = table.rows[chosen]
    return copies


def queue_copies(copies: Array, stream: torch.cuda.Stream) -> None:
    """Queue all copies on a stream of the current device of this thread. RuntimeError with the reason of CUDA."""
    driver, handle = _driver(), stream.cuda_stream
    first = copies.__array_interface__["data"][0]
    for address in range(first, first + copies.nbytes, _COPY.itemsize):
        error = driver.cuMemcpy2DAsync_v2(address, handle)
        if error:
            reason = ctypes.c_char_p()
            driver.cuGetErrorString(error, ctypes.byref(reason))
            text = reason.value.decode() if reason.value else "unknown"
            raise RuntimeError(f"CUDA error {error} when copying between GPU and staging memory: {text}")
