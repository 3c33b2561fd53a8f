"""Reads into tensors that are not plain memory of the CPU, by way of some that is: while one half of it is read into,
the other is copied from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.loading.fetch import Fetch, Wanted
from ckpt.loading.index import StoredTensor
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import stored, torch_dtype_name

__all__ = ["Elsewhere", "as_numpy", "read_by_way"]

_HALF_BYTES = 32 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The elements `box` of a stored tensor, to be copied into `target`: of a GPU, or conjugated."""

    name: str
    tensor: StoredTensor
    box: Box
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The bytes that are read."""
        return self.target.numel() * self.target.element_size()

    def cut(self, nbytes: int) -> Iterator[Elsewhere]:
        """Rows of it, of at most so many bytes together if a row has no more; between inner chunks if possible."""
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
            yield Elsewhere(self.name, self.tensor, part, self.target[first - low : last - low])


def read_by_way(fetch: Fetch, wanted: Iterable[Elsewhere]) -> None:
    """Fill every target. Done when this returns, also on a GPU; what `fetch` raises is raised."""
    parts = [part for want in wanted for part in want.cut(_HALF_BYTES)]
    if not parts:
        return
    most = max(_HALF_BYTES, *(_room_for(part) for part in parts))
    pinned = any(part.target.is_cuda for part in parts)
    halves = [_Half(min(most, sum(map(_room_for, parts))), pinned)]
    groups = list(_together(parts, most))
    if len(groups) > 1:
        halves.append(_Half(most, pinned))
    for number, group in enumerate(groups):
        halves[number % 2].fill(fetch, group)
    for half in halves:
        half.wait()


class _Half:
    """Memory to read into. Its copies may be under way until `wait`."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._copied: list[torch.cuda.Event] = []

    def fill(self, fetch: Fetch, group: list[Elsewhere]) -> None:
        """Read all of a group, and begin to copy it to where it belongs."""
        self.wait()
        parts, at = [], 0
        for want in group:
            part = self._memory[at : at + want.nbytes].view(want.target.dtype).view(want.target.shape)
            parts.append(part)
            at += _room_for(want)
        fetch.read(
            [Wanted(want.name, want.tensor, want.box, as_numpy(part)) for want, part in zip(group, parts, strict=True)]
        )
        for want, part in zip(group, parts, strict=True):
            want.target.copy_(part, non_blocking=want.target.is_cuda)
        for device in {want.target.device for want in group if want.target.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def wait(self) -> None:
        """Wait for copies to GPUs that are under way."""
        while self._copied:
            self._copied[-1].synchronize()
            self._copied.pop()


def _together(parts: Iterable[Elsewhere], nbytes: int) -> Iterator[list[Elsewhere]]:
    """As many at a time as there is room for, in their order."""
    group: list[Elsewhere] = []
    used = 0
    for part in parts:
        if group and used + _room_for(part) > nbytes:
            yield group
            group, used = [], 0
        group.append(part)
        used += _room_for(part)
    yield group


def _room_for(part: Elsewhere) -> int:
    return math.ceil(part.nbytes / _ALIGNMENT) * _ALIGNMENT


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory of a CPU tensor as an array of its stored dtype (with the trailing dimension of raw ones)."""
    how = stored(torch_dtype_name(tensor.dtype))
    if not how.raw and how.numpy_dtype.isbuiltin == 1:
        return tensor.numpy()
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    if how.trailing:
        bits = bits.unsqueeze(-1).view(torch.uint8)
    return bits.numpy().view(how.numpy_dtype)
