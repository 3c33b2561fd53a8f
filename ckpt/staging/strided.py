"""Copy boxes that are not runs of memory: views with strides, columns of a matrix, conjugated tensors.

On the CPU, PyTorch copies them one by one. On a GPU they are made contiguous there, and then copied as rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from ckpt.paths import Path
from ckpt.staging.copy_table import CopyOp, RowTable
from ckpt.staging.cuda_copy import can_copy_rows, copies_of_rows, queue_copies

_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def copy_boxes(
    ops: Iterable[CopyOp],
    tensors: Mapping[Path, torch.Tensor],
    slot: torch.Tensor,
    keep: list[torch.Tensor],
    stream: torch.cuda.Stream | None,
) -> None:
    """Copy the boxes of `ops` into the slot; those of CUDA tensors are queued on the `stream`, if there is one.

    What must live until they are copied is added to `keep`.
    """
    flat_bytes: dict[Path, torch.Tensor] = {}
    on_gpu: list[tuple[CopyOp, torch.Tensor]] = []
    for op in ops:
        tensor = tensors[op.path]
        if stream is not None and tensor.is_cuda:
            memory_of(tensor).record_stream(stream)  # its memory is not reused before the copy has run
        if op.flat is not None and is_plain(tensor):
            start = op.flat[0] * op.itemsize
            source = flat_bytes.get(op.path)
            if source is None:
                source = flat_bytes[op.path] = _bytes_of(tensor)
        else:
            box = _contiguous(tensor[op.source])
            keep.append(box)
            if stream is not None and box.is_cuda and can_copy_rows():
                on_gpu.append((op, box))
                continue
            start, source = 0, _bytes_of(box)
            if op.chunk_bytes is None:
                corner = _corner(slot, op, box.shape)
                corner.copy_(source.view(*box.shape, op.itemsize), non_blocking=stream is not None)
                continue
        for offset, first, size in op.runs():
            part = source[start + first : start + first + size]
            slot[offset : offset + size].copy_(part, non_blocking=stream is not None)
    if stream is not None:
        _queue_boxes(on_gpu, slot, stream, into_slot=True)


def take_box(op: CopyOp, box: torch.Tensor, slot: torch.Tensor, gpu: torch.device | None) -> torch.Tensor:
    """Return the bytes of an operation in C order, on the device of its box; on a GPU copies to them may be queued."""
    if gpu is not None and box.is_cuda and can_copy_rows():
        stored = torch.empty(op.nbytes, dtype=torch.uint8, device=gpu)
        with torch.cuda.device(gpu):
            _queue_boxes([(op, stored)], slot, torch.cuda.current_stream(), into_slot=False)
        return stored
    stored = torch.empty(op.nbytes, dtype=torch.uint8)  # at an address that fits the dtype
    if op.chunk_bytes is None:
        stored.view(*box.shape, op.itemsize).copy_(_corner(slot, op, box.shape))
    else:
        for offset, first, size in op.runs():
            stored[first : first + size] = slot[offset : offset + size]
    return stored


def _queue_boxes(
    boxes: list[tuple[CopyOp, torch.Tensor]], slot: torch.Tensor, stream: torch.cuda.Stream, *, into_slot: bool
) -> None:
    """Copy boxes that are contiguous on the GPU of a stream into the slot, or back, as their operations say."""
    table = RowTable.of((number, 0, op) for number, (op, _) in enumerate(boxes))
    addresses = np.fromiter((box.data_ptr() for _, box in boxes), np.uint64, len(boxes))
    usable = np.ones(len(boxes), bool)
    queue_copies(copies_of_rows(table, addresses, usable, slot.data_ptr(), into_slot=into_slot), stream)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of the tensor is its elements in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def some_bytes(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return the bytes of elements `first` to ``first + count``, in C order, on its device; perhaps its own memory."""
    size = tensor.element_size()
    if is_plain(tensor):
        return _bytes_of(tensor)[first * size : (first + count) * size]
    as_integer = _INTEGERS.get(size)
    if as_integer is not None and not tensor.is_conj() and not tensor.is_neg():
        tensor = tensor.view(as_integer)  # some dtypes cannot be indexed
    index = torch.unravel_index(torch.arange(first, first + count, device=tensor.device), tensor.shape)
    elements = tensor[index] if tensor.dim() else tensor
    return _bytes_of(elements.resolve_conj().resolve_neg())


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that is not conjugated, to call `record_stream` on.

    For conjugated tensors PyTorch takes its fallback for operators without support of conjugation, which corrupted the
    heap in PyTorch 2.11.
    """
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor. One element is contiguous with any strides, but some allow no view."""
    flat = tensor.reshape(-1)
    return (flat if flat.numel() != 1 else flat.as_strided((1,), (1,))).view(torch.uint8)


def _contiguous(box: torch.Tensor) -> torch.Tensor:
    """Return the same bits in C order. As integers where possible, as torch has no copy kernels for some dtypes."""
    as_integer = _INTEGERS.get(box.element_size())
    if box.is_conj() or box.is_neg() or as_integer is None:
        return box.resolve_conj().resolve_neg().contiguous()
    return box.view(as_integer).contiguous()


def _corner(slot: torch.Tensor, op: CopyOp, shape: torch.Size) -> torch.Tensor:
    strides = [math.prod(op.full_shape[dim + 1 :]) * op.itemsize for dim in range(len(shape))]
    return slot.as_strided((*shape, op.itemsize), (*strides, 1), op.offset)
