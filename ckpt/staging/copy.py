"""Copy the boxes this rank owns from its tensors into a slot.

CPU tensors are copied by as many threads as PyTorch uses, without the GIL and at the speed of memory. The threads take
runs of memory until none is left, and meet once, at the end: PyTorch's own copies split each tensor evenly and meet
after each, so that a single busy core (a data loader's) makes them several times as slow.

CUDA tensors go over a side stream into pinned memory: the copies wait for the work already queued on the current
stream, and `Staged.wait` waits for the copies.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from ckpt.paths import Path
from ckpt.staging.copy_op import CopyOp
from ckpt.threads import JoinableThread, join_all

__all__ = ["Staged", "stage", "unstage"]


_RUN_BYTES = 4 << 20
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class Staged:
    """The copies of one save. On the CPU they are done at once; on CUDA when their event has passed."""

    def __init__(
        self, stream: torch.cuda.Stream | None, event: torch.cuda.Event | None, keep: list[torch.Tensor]
    ) -> None:
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


def stage(
    ops: Iterable[CopyOp], tensors: Mapping[Path, torch.Tensor], slot: torch.Tensor, stream: torch.cuda.Stream | None
) -> Staged:
    """Copy every box. `slot` is uint8, 1-d. With a `stream` the copies of CUDA tensors are queued there."""
    keep: list[torch.Tensor] = []
    if stream is None:
        _copy_all(ops, tensors, slot, keep, None)
        return Staged(None, None, [])
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        _copy_all(ops, tensors, slot, keep, stream)
        event = torch.cuda.Event()
        event.record(stream)
    return Staged(stream, event, keep)


def unstage(
    ops: Iterable[CopyOp], tensors: Mapping[Path, torch.Tensor], slot: torch.Tensor, *, alone: bool = False
) -> dict[Path, int]:
    """Copy every box back from a slot; returns how many bytes of each tensor. Done when this returns, also on CUDA.

    The tensors are as the operations were made for: same shapes and dtypes. With `alone`, by this thread only.
    """
    runs: deque[tuple[int, int, int]] = deque()
    copied: dict[Path, int] = {}
    for op in ops:
        tensor = tensors[op.path]
        as_run = op.flat is not None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if as_run and op.flat is not None and tensor.device.type == "cpu":
            first, count = op.flat[0] * op.itemsize, op.flat[1] * op.itemsize
            copied[op.path] = copied.get(op.path, 0) + count
            for at in range(0, count, _RUN_BYTES):
                run_bytes = min(_RUN_BYTES, count - at)
                runs.append((tensor.data_ptr() + first + at, slot.data_ptr() + op.offset + at, run_bytes))
            continue
        box = tensor[op.source]
        stored = _corner(slot, op, box.shape).reshape(-1).clone()  # at an address that fits the dtype
        copied[op.path] = copied.get(op.path, 0) + stored.numel()
        box.copy_(stored.view(box.dtype).view(box.shape))
    _move(runs, alone)
    return copied


def _copy_all(
    ops: Iterable[CopyOp],
    tensors: Mapping[Path, torch.Tensor],
    slot: torch.Tensor,
    keep: list[torch.Tensor],
    stream: torch.cuda.Stream | None,
) -> None:
    flat_bytes: dict[Path, torch.Tensor] = {}
    runs: deque[tuple[int, int, int]] = deque()
    slot_address = slot.data_ptr()
    for op in ops:
        tensor = tensors[op.path]
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)  # its memory is not given to others before the copy has run
        if op.flat is not None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            first, count = op.flat[0] * op.itemsize, op.flat[1] * op.itemsize
            if tensor.is_cpu:
                target, source_address = slot_address + op.offset, tensor.data_ptr() + first
                for at in range(0, count, _RUN_BYTES):
                    runs.append((target + at, source_address + at, min(_RUN_BYTES, count - at)))
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
    _move(runs)


def _move(runs: deque[tuple[int, int, int]], alone: bool = False) -> None:
    """Copy runs of memory: (to, from, bytes). This thread takes its part, and is not held up by helpers that get no
    core."""

    def work() -> None:
        while True:
            try:
                run = runs.popleft()
            except IndexError:
                return
            ctypes.memmove(*run)

    helpers = [JoinableThread(work, "ckpt-stage") for _ in range(0 if alone else _helpers(runs))]
    try:
        for helper in helpers:
            helper.start()
        work()
    finally:
        runs.clear()  # after an interrupt; nobody touches the tensors any more when this returns
        join_all(helpers)


def _helpers(runs: deque[tuple[int, int, int]]) -> int:
    """A thread costs more than it gains for less than a few runs."""
    total_bytes = sum(count for _, _, count in runs)
    return min(torch.get_num_threads() - 1, total_bytes // (4 * _RUN_BYTES))


def _contiguous(box: torch.Tensor) -> torch.Tensor:
    """The same bits in C order. As integers where possible, for there are dtypes that torch has no copy kernel for."""
    as_integer = _INTEGERS.get(box.element_size())
    if box.is_conj() or box.is_neg() or as_integer is None:
        return box.resolve_conj().resolve_neg().contiguous()
    return box.view(as_integer).contiguous()


def _corner(slot: torch.Tensor, op: CopyOp, shape: torch.Size) -> torch.Tensor:
    strides = [math.prod(op.full_shape[dim + 1 :]) * op.itemsize for dim in range(len(shape))]
    return slot.as_strided((*shape, op.itemsize), (*strides, 1), op.offset)
