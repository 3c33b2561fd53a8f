"""Read into tensors that are not plain CPU memory, through a bounce buffer.

The buffer has two halves: one is read into while the other is copied to its targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.loading.fetch import BoxRead, Fetch
from ckpt.loading.index import StoredTensor
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import stored, torch_dtype, torch_dtype_name

_HALF_BYTES = 32 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BouncedRead:
    """A request to read the elements `box` of a stored tensor into `target`.

    The target is on a GPU, conjugated, or of another dtype: then the copy to it converts.
    """

    name: str
    tensor: StoredTensor
    box: Box
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The number of bytes to read."""
        return self.target.numel() * stored(self.tensor.dtype).itemsize

    def split(self, nbytes: int) -> Iterator[BouncedRead]:
        """Split it into groups of rows of at most `nbytes` (or one row), at boundaries of inner chunks if possible."""
        if self.nbytes <= nbytes or not self.box.shape:
            yield self
            return
        rows = max(1, nbytes * self.box.shape[0] // self.nbytes)
        meta = self.tensor.boxes[0].meta
        unit = (meta.inner_chunk_shape or meta.chunk_shape)[0]
        step = rows // unit * unit or rows
        low, end = self.box.offset[0], self.box.offset[0] + self.box.shape[0]
        for first in (low, *range((low // step + 1) * step, end, step)):
            last = min(end, (first // step + 1) * step)
            part = Box((first, *self.box.offset[1:]), (last - first, *self.box.shape[1:]))
            yield BouncedRead(self.name, self.tensor, part, self.target[first - low : last - low])


def read_bounced(fetch: Fetch, requests: Iterable[BouncedRead]) -> None:
    """Fill every target; complete when this returns, also on a GPU. Raises as `fetch` does."""
    parts = [part for request in requests for part in request.split(_HALF_BYTES)]
    if not parts:
        return
    half_bytes = max(_HALF_BYTES, *(_padded_bytes(part) for part in parts))
    pinned = any(part.target.is_cuda for part in parts)
    halves = [_Half(min(half_bytes, sum(map(_padded_bytes, parts))), pinned)]
    groups = list(_batches(parts, half_bytes))
    if len(groups) > 1:
        halves.append(_Half(half_bytes, pinned))
    for number, group in enumerate(groups):
        halves[number % 2].fill(fetch, group)
    for half in halves:
        half.wait()


class _Half:
    """One half of the bounce buffer. Copies from it may be pending until `wait`."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._copied: list[torch.cuda.Event] = []

    def fill(self, fetch: Fetch, group: list[BouncedRead]) -> None:
        """Read all of a group, and start to copy it to its targets."""
        self.wait()
        parts, at = [], 0
        for request in group:
            part = self._memory[at : at + request.nbytes].view(torch_dtype(request.tensor.dtype))
            part = part.view(request.target.shape)
            parts.append(part)
            at += _padded_bytes(request)
        fetch.read(
            [
                BoxRead(request.name, request.tensor, request.box, as_numpy(part))
                for request, part in zip(group, parts, strict=True)
            ]
        )
        for request, part in zip(group, parts, strict=True):
            overwrite(request.target, part, non_blocking=request.target.is_cuda)
        for device in {request.target.device for request in group if request.target.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def wait(self) -> None:
        """Wait for pending copies to GPUs."""
        while self._copied:
            self._copied[-1].synchronize()
            self._copied.pop()


def overwrite(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy the elements of a tensor to another one, also to one that was made in inference mode."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(source, non_blocking=non_blocking)


def _batches(parts: Iterable[BouncedRead], nbytes: int) -> Iterator[list[BouncedRead]]:
    """Group the parts, in order, such that each group fits into `nbytes`."""
    group: list[BouncedRead] = []
    used = 0
    for part in parts:
        if group and used + _padded_bytes(part) > nbytes:
            yield group
            group, used = [], 0
        group.append(part)
        used += _padded_bytes(part)
    yield group


def _padded_bytes(part: BouncedRead) -> int:
    return math.ceil(part.nbytes / _ALIGNMENT) * _ALIGNMENT


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the memory of a CPU tensor as an array of its stored dtype (with the trailing dimension of raw ones)."""
    how = stored(torch_dtype_name(tensor.dtype))
    if not how.raw and how.numpy_dtype.isbuiltin == 1:
        return tensor.numpy()
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    if how.trailing:
        bits = bits.unsqueeze(-1).view(torch.uint8)
    return bits.numpy().view(how.numpy_dtype)
