"""Copy the boxes this rank owns from its tensors into a slot.

CPU tensors are copied by as many threads as PyTorch uses (see `runs`). Where one box or several fill an inner chunk,
its checksum is computed during the copy and put behind it: the writer need not read the memory again.

CUDA tensors are copied on a stream of their own into pinned memory, a chunk in one call (see `cuda_copy`): the
copies wait for the work already queued on the current stream, and `Staged.wait` waits for the copies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ckpt.native import crc32c_joined
from ckpt.paths import Path
from ckpt.staging.copy_table import Copies, CopyOp, RunTable
from ckpt.staging.cuda_copy import can_copy_rows, copies_of_rows, queue_copies
from ckpt.staging.held_runs import HeldRuns
from ckpt.staging.runs import copy_together
from ckpt.staging.strided import copy_boxes, take_box

Array = np.ndarray[Any, np.dtype[Any]]


class Staged:
    """The copies of one save: on the CPU complete, on CUDA complete when their event has passed.

    `checksummed` are the offsets in the slot of inner chunks that have their checksum behind them.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        event: torch.cuda.Event | None,
        keep: list[torch.Tensor],
        checksummed: frozenset[int],
    ) -> None:
        self.checksummed = checksummed
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
        """Set a flag in pinned memory behind the copies: a process that sees it sees all of them."""
        if self._stream is None or self._event is None:
            flag.fill_(value)
            return
        with torch.cuda.stream(self._stream):
            source = torch.full_like(flag, value, device=self._stream.device)
            flag.copy_(source, non_blocking=True)
            self._keep.append(source)
            self._event.record(self._stream)

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Let work that is queued on `stream` from now on wait for the copies, without blocking this thread."""
        if self._event is not None:
            stream.wait_event(self._event)


@dataclass(frozen=True, slots=True)
class Unstaged:
    """How many bytes of each tensor were copied back: on the CPU they have arrived, on a GPU when `wait` returns.

    `checksums` are those of the inner chunks at `offsets`, all of whose bytes were copied, or read beside the copy.
    `unchecked` are the offsets of the other bytes: each is in an inner chunk whose checksum was not computed.
    """

    nbytes: dict[Path, int]
    offsets: Array
    checksums: Array
    unchecked: Array
    stream: torch.cuda.Stream | None

    def wait(self) -> None:
        """Block this thread until every byte has arrived."""
        if self.stream is not None:
            self.stream.synchronize()


def stage(
    copies: Copies,
    tensors: Mapping[Path, torch.Tensor],
    slot: torch.Tensor,
    stream: torch.cuda.Stream | None,
    known: tuple[Array, Array, Array] | None = None,
    held: HeldRuns | None = None,
) -> Staged:
    """Copy every box into the slot, which is uint8, 1-d.

    With a `stream` the copies of CUDA tensors, all on its device, are queued there. `known` are the addresses of the
    tensors of the table of copies, whether each has its elements in C order, and whether it is on the CPU. What is in
    the slot already, as far as `held` knows that, is not copied from a CPU.
    """
    keep: list[torch.Tensor] = []
    memory = _Memory.of(copies.table, tensors, None if stream is None else stream.device, known)
    runs, whole = copies.table.into_slot(memory.addresses, memory.on_cpu, slot.data_ptr())
    if held is not None:
        held.begin(runs["bytes"] == 0)
    if stream is None:
        copy_boxes(memory.others(copies), tensors, slot, keep, None)
        return Staged(None, None, [], _copy_runs_in(copies.table, runs, whole, slot, held))
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for path in memory.paths_on_gpu():
            tensors[path].record_stream(stream)  # its memory is not reused before the copy has run
        rows = copies_of_rows(copies.rows, memory.addresses, memory.on_gpu, slot.data_ptr(), into_slot=True)
        queue_copies(rows, stream)
        copy_boxes(memory.others(copies), tensors, slot, keep, stream)
        event = torch.cuda.Event()
        event.record(stream)
    return Staged(stream, event, keep, _copy_runs_in(copies.table, runs, whole, slot, held))


def unstage(copies: Copies, tensors: Mapping[Path, torch.Tensor], slot: torch.Tensor) -> Unstaged:
    """Copy every box back from a slot into tensors of the shapes and dtypes that the operations were made for.

    To a GPU the copies are queued on its current stream, and checksums are computed meanwhile.
    """
    gpu, table = only_gpu(tensors.values()), copies.table
    stream = None if gpu is None else torch.cuda.current_stream(gpu)
    memory = _Memory.of(table, tensors, gpu)
    if stream is not None:
        with torch.cuda.device(gpu):
            rows = copies_of_rows(copies.rows, memory.addresses, memory.on_gpu, slot.data_ptr(), into_slot=False)
            queue_copies(rows, stream)
    runs, whole = table.out_of_slot(memory.addresses, memory.on_cpu, memory.on_gpu, slot.data_ptr())
    copy_together(runs)
    own = table.tensor >= 0
    copied = np.bincount(table.tensor[own], runs["bytes"][own], len(table.paths))
    nbytes = dict(zip(table.paths, copied.astype(np.int64).tolist(), strict=True))
    for op in memory.others(copies):
        box = tensors[op.path][op.source]
        stored = take_box(op, box, slot, gpu)
        box.copy_(stored.view(box.dtype).view(box.shape))
        nbytes[op.path] = nbytes.get(op.path, 0) + op.nbytes
    unchecked = np.fromiter(copies.offsets, np.int64, len(copies.offsets))
    unchecked = np.concatenate((unchecked, table.chunk_offset[~whole]))
    return Unstaged(nbytes, table.chunk_offset[whole], _checksums(table, runs)[whole], unchecked, stream)


def only_gpu(tensors: Collection[torch.Tensor]) -> torch.device | None:
    """Return the GPU of these tensors; None if there is none, or several."""
    if not any(map(attrgetter("is_cuda"), tensors)):
        return None
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return devices.pop() if len(devices) == 1 else None


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where the tensors of a table are, and which are contiguous: `on_cpu`, and `on_gpu` if it can copy rows."""

    paths: tuple[Path, ...]
    addresses: Array
    on_cpu: Array
    on_gpu: Array

    @classmethod
    def of(
        cls,
        table: RunTable,
        tensors: Mapping[Path, torch.Tensor],
        gpu: torch.device | None,
        known: tuple[Array, Array, Array] | None = None,
    ) -> _Memory:
        addresses, plain, on_cpu = _memory_of([tensors[path] for path in table.paths]) if known is None else known
        on_gpu = ~on_cpu if gpu is not None and can_copy_rows() else np.zeros_like(on_cpu)
        return cls(table.paths, addresses, plain & on_cpu, plain & on_gpu)

    def paths_on_gpu(self) -> list[Path]:
        """Return the paths of the contiguous tensors on the GPU."""
        return [self.paths[number] for number in np.flatnonzero(self.on_gpu).tolist()]

    def others(self, copies: Copies) -> Iterable[CopyOp]:
        """Return the operations that are not runs of memory in contiguous tensors."""
        usable = self.on_cpu | self.on_gpu
        if usable.all() and copies.table.has_all:
            return ()
        unusable = {path for path, known in zip(self.paths, usable.tolist(), strict=True) if not known}
        return (op for op in copies.ops if op.flat is None or op.path in unusable)


def _memory_of(tensors: list[torch.Tensor]) -> tuple[Array, Array, Array]:
    """Return the addresses of tensors, which of them are as `is_plain` says, and which are on the CPU."""

    def each(method: Callable[[torch.Tensor], Any], dtype: Any = bool) -> Array:  # no Python code for each tensor
        return np.fromiter(map(method, tensors), dtype, len(tensors))

    tensor = torch.Tensor
    plain = each(tensor.is_contiguous) & ~each(tensor.is_conj) & ~each(tensor.is_neg)
    return each(tensor.data_ptr, np.uint64), plain, each(attrgetter("is_cpu"))


def _copy_runs_in(
    table: RunTable, runs: Array, whole: Array, slot: torch.Tensor, held: HeldRuns | None
) -> frozenset[int]:
    """Copy the runs of memory on the CPU; return the offsets of the inner chunks whose checksum is behind them."""
    copy_together(runs, held)
    memory = slot.numpy().data
    for number in table.long_chunks[whole[table.long_chunks]].tolist():
        part = runs[table.chunk_first[number] : table.chunk_end[number]]
        struct.pack_into("<I", memory, int(table.chunk_offset[number] + part["bytes"].sum()), _joined(part))
    return table.chunk_offsets if whole.all() else frozenset(table.chunk_offset[whole].tolist())


def _checksums(table: RunTable, runs: Array) -> Array:
    """Return the checksums of all inner chunks; only those whose runs were all copied are right."""
    found: Array = runs["crc32c"][table.chunk_end - 1]
    for number in table.long_chunks.tolist():
        found[number] = _joined(runs[table.chunk_first[number] : table.chunk_end[number]])
    return found


def _joined(runs: Array) -> int:
    """Return the checksum of contiguous runs."""
    joined = 0
    for run in runs:
        joined = crc32c_joined(joined, int(run["crc32c"]), int(run["bytes"]))
    return joined
