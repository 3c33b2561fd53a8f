"""Copy the boxes this rank owns from its tensors into a slot.

CPU tensors are copied by as many threads as PyTorch uses (see `runs`), and where a box is all of a piece of a file, its
checksum is made on the way and put behind it: the writer need not read the memory again.

CUDA tensors go over a side stream into pinned memory: the copies wait for the work already queued on the current
stream, and `Staged.wait` waits for the copies.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ckpt.paths import Path
from ckpt.staging.copy_op import CopyOp
from ckpt.staging.runs import Runs

__all__ = ["Staged", "Unstaged", "stage", "unstage"]


_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class Staged:
    """The copies of one save. On the CPU they are done at once; on CUDA when their event has passed.

    `sealed` are the offsets in the slot of pieces that have their checksum behind them.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        event: torch.cuda.Event | None,
        keep: list[torch.Tensor],
        sealed: frozenset[int],
    ) -> None:
        self.sealed = sealed
        self._stream = stream
        self._event = event
        self._keep = keep  # temporaries of strided tensors must live until they are copied

    @property
    def done(self) -> bool:
        """Whether every byte has arrived in the slot."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block this thread until every byte has arrived."""
        if self._event is not None:
            self._event.synchronize()
        self._keep.clear()

    def then_set(self, flag: torch.Tensor, value: int) -> None:
        """Set a flag in pinned memory behind the copies: whoever sees it sees all of them."""
        if self._stream is None or self._event is None:
            flag.fill_(value)
            return
        with torch.cuda.stream(self._stream):
            source = torch.full_like(flag, value, device=self._stream.device)
            flag.copy_(source, non_blocking=True)
            self._keep.append(source)
            self._event.record(self._stream)

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Make work queued on `stream` from now on run after the copies, without blocking this thread."""
        if self._event is not None:
            stream.wait_event(self._event)


@dataclass(frozen=True, slots=True)
class Unstaged:
    """What was copied back: how many bytes of each tensor, and the checksums, by offset, of the pieces whose bytes all
    went through the copy. Of the others there are none."""

    nbytes: dict[Path, int]
    checksums: dict[int, int]


def stage(
    ops: Iterable[CopyOp], tensors: Mapping[Path, torch.Tensor], slot: torch.Tensor, stream: torch.cuda.Stream | None
) -> Staged:
    """Copy every box. `slot` is uint8, 1-d. With a `stream` the copies of CUDA tensors are queued there."""
    keep: list[torch.Tensor] = []
    if stream is None:
        return Staged(None, None, [], _copy_all(ops, tensors, slot, keep, None))
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        sealed = _copy_all(ops, tensors, slot, keep, stream)
        event = torch.cuda.Event()
        event.record(stream)
    return Staged(stream, event, keep, sealed)


def unstage(
    ops: Iterable[CopyOp], tensors: Mapping[Path, torch.Tensor], slot: torch.Tensor, *, alone: bool = False
) -> Unstaged:
    """Copy every box back from a slot. Done when this returns, also on CUDA.

    The tensors are as the operations were made for: same shapes and dtypes. With `alone`, by this thread only.
    """
    runs = Runs()
    nbytes: dict[Path, int] = {}
    slot_address = slot.data_ptr()
    for op in ops:
        tensor = tensors[op.path]
        if op.flat is not None and tensor.is_cpu and _is_plain(tensor):
            first, count = op.flat[0] * op.itemsize, op.flat[1] * op.itemsize
            runs.add(tensor.data_ptr() + first, slot_address + op.offset, count, op.offset if op.is_piece else None)
        else:
            box = tensor[op.source]
            stored = _corner(slot, op, box.shape).reshape(-1).clone()  # at an address that fits the dtype
            count = stored.numel()
            box.copy_(stored.view(box.dtype).view(box.shape))
        nbytes[op.path] = nbytes.get(op.path, 0) + count
    return Unstaged(nbytes, runs.copy(alone))


def _copy_all(
    ops: Iterable[CopyOp],
    tensors: Mapping[Path, torch.Tensor],
    slot: torch.Tensor,
    keep: list[torch.Tensor],
    stream: torch.cuda.Stream | None,
) -> frozenset[int]:
    """Returns the offsets of the pieces that are sealed."""
    flat_bytes: dict[Path, torch.Tensor] = {}
    runs = Runs()
    ends: dict[int, int] = {}
    slot_address = slot.data_ptr()
    for op in ops:
        tensor = tensors[op.path]
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)  # its memory is not given to others before the copy has run
        if op.flat is not None and _is_plain(tensor):
            first, count = op.flat[0] * op.itemsize, op.flat[1] * op.itemsize
            if tensor.is_cpu:
                piece = op.offset if op.is_piece else None
                runs.add(slot_address + op.offset, tensor.data_ptr() + first, count, piece)
                if op.is_piece:
                    ends[op.offset] = op.offset + count
                continue
            source = flat_bytes.get(op.path)
            if source is None:
                source = flat_bytes[op.path] = tensor.reshape(-1).view(torch.uint8)
            slot[op.offset : op.offset + count].copy_(source[first : first + count], non_blocking=stream is not None)
        else:
            box = _contiguous(tensor[op.source])
            keep.append(box)
            source = box.reshape(-1).view(torch.uint8).view(*box.shape, op.itemsize)
            _corner(slot, op, box.shape).copy_(source, non_blocking=stream is not None)
    memory = slot.numpy().data
    checksums = runs.copy()
    for offset, checksum in checksums.items():
        struct.pack_into("<I", memory, ends[offset], checksum)
    return frozenset(checksums)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the elements one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _contiguous(box: torch.Tensor) -> torch.Tensor:
    """The same bits in C order. As integers where possible, for there are dtypes that torch has no copy kernel for."""
    as_integer = _INTEGERS.get(box.element_size())
    if box.is_conj() or box.is_neg() or as_integer is None:
        return box.resolve_conj().resolve_neg().contiguous()
    return box.view(as_integer).contiguous()


def _corner(slot: torch.Tensor, op: CopyOp, shape: torch.Size) -> torch.Tensor:
    strides = [math.prod(op.full_shape[dim + 1 :]) * op.itemsize for dim in range(len(shape))]
    return slot.as_strided((*shape, op.itemsize), (*strides, 1), op.offset)
