"""Refuse a state whose tensors share a part of their memory: whatever is read last would win there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter

import numpy as np
import torch

from ckpt.errors import StateError
from ckpt.loading.match import Read
from ckpt.paths import Path, display

_nbytes = attrgetter("nbytes")
_MOST_WORK = 10_000  # of numpy, which solves a hard problem for each pair


def check_overlaps(reads: Sequence[Read], step: int) -> None:
    """Raise StateError, naming both, if two tensors to be read have some of their elements in the same memory.

    Tensors that are the same memory in the same form are one tensor with two names; they are not among the reads twice.
    """
    read = [leaf.local for _, _, leaf in reads]
    sizes = list(map(_nbytes, read))
    tensors = list(compress(read, sizes))
    begins = np.array(list(map(torch.Tensor.data_ptr, tensors)), np.uint64)
    if all(map(torch.Tensor.is_contiguous, tensors)):
        ends = begins + np.array(list(compress(sizes, sizes)), np.uint64)
    else:
        ends = begins + np.array(list(map(_extent, tensors)), np.uint64)
    order = np.lexsort((ends, begins))
    if not (begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any():
        return
    paths = list(compress((path for path, _, _ in reads), sizes))
    before: list[tuple[str, int, Path, torch.Tensor]] = []
    for number in order.tolist():
        path, tensor = paths[number], tensors[number]
        device, begin, end = str(tensor.device), int(begins[number]), int(ends[number])
        before = [other for other in before if other[0] != device or other[1] > begin]
        for other_device, _, other_path, other in before:
            if other_device == device and _share(tensor, other):
                raise StateError(
                    f"{display(other_path)} and {display(path)} of the state are views of memory that overlap: what is "
                    "restored last would overwrite a part of the other. Give each its own memory, or restore one of "
                    "them with only=",
                    step=step,
                )
        before.append((device, end, path, tensor))


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes there are from the first byte of a tensor to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _share(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have a byte in common; False if that is too hard to tell."""
    if (one.data_ptr(), one.shape, one.stride(), one.dtype) == (two.data_ptr(), two.shape, two.stride(), two.dtype):
        return False
    try:
        return np.shares_memory(_Bytes(one).array, _Bytes(two).array, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


class _Bytes:
    """The bytes of a tensor on any device as a numpy array that is never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }

    @property
    def array(self) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
        return np.asarray(self)
