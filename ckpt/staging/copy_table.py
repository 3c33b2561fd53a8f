"""What is copied between tensors and a slot: single operations, and tables for a whole slot. Free of torch.

Thousands of operations are examined one by one only when a state is planned. For each save they are one table of runs
of memory, to which the addresses of the tensors are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ckpt.native import CHECKSUM_BYTES, RUN
from ckpt.paths import Path

Array = np.ndarray[Any, np.dtype[Any]]
_RUN_BYTES = 4 << 20
_MANY = 8  # rows, from which on making them one by one takes longer
_MOST_ROW_BYTES = 1 << 30  # CUDA copies no rows of 2 GiB


class Rows(NamedTuple):
    """Some of the bytes of a box, from `first` on, as `rows` rows of `nbytes`.

    In the slot the first row is at `offset`, each other one `pitch` bytes behind the one before.
    """

    first: int
    offset: int
    nbytes: int
    rows: int
    pitch: int


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One box of a local tensor and where its bytes go.

    `source` indexes the box in the local tensor. `flat` is (first element, elements) of the box when it is one run of
    memory in a contiguous local tensor of the planned shape.

    With `chunk_bytes` the box fills, in C order, inner chunks of so many bytes from `offset` on, with room for a
    checksum behind each; behind the box there are zeros in the last one. Without, it lies somewhere in an inner chunk:
    as one run if it is `flat`, else in the first corner of an array of `full_shape`.
    """

    path: Path
    source: tuple[slice, ...]
    flat: tuple[int, int] | None
    offset: int
    full_shape: tuple[int, ...]
    itemsize: int
    chunk_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """The size of the box in bytes."""
        elements: int = math.prod(part.stop - part.start for part in self.source)
        return elements * self.itemsize

    @property
    def rest(self) -> int:
        """The bytes of the box behind the last inner chunk that it fills."""
        return self.nbytes % self.chunk_bytes if self.chunk_bytes else self.nbytes

    @property
    def fills_chunks(self) -> bool:
        """Whether it is one run, of inner chunks that are not divided further; zeros fill the last one."""
        return self.flat is not None and self.chunk_bytes is not None and self.chunk_bytes <= _RUN_BYTES

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Return where the bytes of the box go, if not to a corner: offset, first of the bytes, and how many."""
        nbytes = self.nbytes
        size = self.chunk_bytes or nbytes
        for number, first in enumerate(range(0, nbytes, size) if size else ()):
            yield self.offset + number * (size + CHECKSUM_BYTES), first, min(size, nbytes - first)

    def rows(self) -> Iterator[Rows]:
        """Return where the bytes of the box go, with as few blocks of rows as possible."""
        nbytes = self.nbytes
        if self.chunk_bytes is not None and self.chunk_bytes <= _MOST_ROW_BYTES:
            yield from _rows(0, self.offset, nbytes, self.chunk_bytes, self.chunk_bytes + CHECKSUM_BYTES)
        elif self.chunk_bytes is not None or self.flat is not None:
            for offset, first, size in self.runs():
                yield from _rows(first, offset, size, _MOST_ROW_BYTES, _MOST_ROW_BYTES)
        else:
            yield from self._rows_of_corner()

    def _rows_of_corner(self) -> Iterator[Rows]:
        """Cut at the last dimension that the box does not fill: a row spans it and those behind it."""
        shape = [part.stop - part.start for part in self.source]
        cut = max((dim for dim, size in enumerate(shape) if size != self.full_shape[dim]), default=0)
        row_bytes = math.prod(shape[cut:]) * self.itemsize
        pitch = math.prod(self.full_shape[cut:]) * self.itemsize
        rows = shape[cut - 1] if cut else 1
        strides = [math.prod(self.full_shape[dim + 1 :]) * self.itemsize for dim in range(len(shape))]
        for number, index in enumerate(product(*map(range, shape[: max(cut - 1, 0)]))):
            at = sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield Rows(number * rows * row_bytes, self.offset + at, row_bytes, rows, pitch)


def _rows(first: int, offset: int, nbytes: int, row_bytes: int, pitch: int) -> Iterator[Rows]:
    """Return a run of bytes of a box as rows, and the rest behind the last one."""
    whole, rest = divmod(nbytes, row_bytes)
    if whole:
        yield Rows(first, offset, row_bytes, whole, pitch)
    if rest:
        yield Rows(first + nbytes - rest, offset + whole * pitch, rest, 1, rest)


@dataclass(frozen=True)
class Copies:
    """The copies that fill a slot or, in reverse, restore from it.

    `table` has those of them that are runs of memory in a contiguous tensor, and `rows` the same ones for a GPU;
    `elements` is how many elements of each tensor they copy, and `offsets` where in the slot runs begin that do not
    fill an inner chunk.
    """

    ops: tuple[CopyOp, ...]
    table: RunTable
    rows: RowTable
    elements: dict[Path, int]
    offsets: frozenset[int]

    @classmethod
    def of(cls, ops: Iterable[CopyOp]) -> Copies:
        """Make the tables of all operations: takes long, so it is done before any save needs them."""
        ops = tuple(ops)
        elements: dict[Path, int] = {}
        for op in ops:
            elements[op.path] = elements.get(op.path, 0) + op.nbytes // op.itemsize
        table = RunTable.of(ops)
        numbers = {path: number for number, path in enumerate(table.paths)}
        runs = ((numbers[op.path], op.flat[0] * op.itemsize, op) for op in ops if op.flat is not None)
        partial = (op for op in ops if not op.fills_chunks and (op.chunk_bytes is None or op.flat is None or op.rest))
        offsets = frozenset(offset for op in partial for offset, _, _ in op.runs())
        offsets = offsets and offsets - table.chunk_offsets  # which takes a while to list
        return cls(ops, table, RowTable.of(runs), elements, offsets)


@dataclass(frozen=True)
class RunTable:
    """Runs of memory between tensors and a slot, of some MB at most.

    `tensor` is an index of `paths`; -1 is for bytes that are zero. A run that `continues` has one checksum with the run
    before. `checksum_at` is where in the slot the checksum of a whole inner chunk goes; 0 for other runs. The inner
    chunks that are filled have an offset in the slot, and the runs from first to end (exclusive). `has_all` says that
    no operation is left out.
    """

    paths: tuple[Path, ...]
    tensor: Array
    in_tensor: Array
    in_slot: Array
    nbytes: Array
    checksum_at: Array
    continues: Array
    chunk_offset: Array
    chunk_first: Array
    chunk_end: Array
    has_all: bool

    @classmethod
    def of(cls, ops: Iterable[CopyOp]) -> RunTable:
        """Make the table of the operations that are one run in a contiguous tensor."""
        rows = _Rows()
        has_all = True
        for op in ops:
            if op.flat is not None:
                rows.add(op)
            else:
                has_all = False
        (tensor, in_tensor, in_slot, nbytes, checksum_at, continues), (offsets, firsts, ends) = rows.columns()
        return cls(
            tuple(rows.numbers),
            tensor,
            in_tensor.view(np.uint64),
            in_slot.view(np.uint64),
            nbytes.view(np.uint64),
            checksum_at.view(np.uint64),
            continues.view(np.uint64),
            offsets,
            firsts,
            ends,
            has_all,
        )

    @cached_property
    def long_chunks(self) -> Array:
        """The numbers of the inner chunks whose checksum is joined from those of several runs."""
        return np.flatnonzero(self.checksum_at[self.chunk_end - 1] == 0) if len(self.chunk_end) else self.chunk_end

    @cached_property
    def chunk_offsets(self) -> frozenset[int]:
        """The offsets of all inner chunks."""
        return frozenset(self.chunk_offset.tolist())

    def into_slot(self, addresses: Array, usable: Array, slot: int) -> tuple[Array, Array]:
        """Return the runs with the addresses of the tensors and of the slot, and which inner chunks they fill.

        Runs of tensors that are not `usable` have no bytes.
        """
        runs, whole = self._begin(usable)
        runs["from"] = self._in_memory(addresses)
        runs["to"] = self.in_slot + np.uint64(slot)
        last = self.chunk_end[whole] - 1
        runs["checksum_at"][last] = np.where(self.checksum_at[last] > 0, self.checksum_at[last] + np.uint64(slot), 0)
        return runs, whole

    def out_of_slot(self, addresses: Array, usable: Array, checked: Array, slot: int) -> tuple[Array, Array]:
        """Return the same runs in reverse. Those of tensors to be `checked`, and zeros, are read but not copied."""
        runs, whole = self._begin(usable | checked)
        runs["from"] = self.in_slot + np.uint64(slot)
        runs["to"] = np.where(np.append(usable, False)[self.tensor], self._in_memory(addresses), 0)
        return runs, whole

    def _begin(self, usable: Array) -> tuple[Array, Array]:
        """Return the runs without addresses, and which inner chunks have all their runs."""
        runs = np.zeros(len(self.tensor), RUN)
        used = np.append(usable, True)[self.tensor]
        runs["bytes"] = np.where(used, self.nbytes, 0)
        runs["continues"] = self.continues
        missing = np.concatenate(([0], np.cumsum(~used)))
        return runs, missing[self.chunk_end] == missing[self.chunk_first]

    def _in_memory(self, addresses: Array) -> Array:
        """Return the addresses of the runs in the tensors; 0 for zeros."""
        return np.append(addresses, np.uint64(0))[self.tensor] + self.in_tensor


class _Rows:
    """The columns of a `RunTable`, row by row; many rows of one box at once."""

    def __init__(self) -> None:
        self.numbers: dict[Path, int] = {}
        self._runs: list[tuple[int, ...]] = []
        self._chunks: list[tuple[int, int, int]] = []
        self._before: list[tuple[Array, Array]] = []  # the columns of the rows before these
        self._count = 0  # of runs, in all

    def add(self, op: CopyOp) -> None:
        """Add a box that fills inner chunks, or lies in one."""
        assert op.flat is not None
        number, start = self.numbers.setdefault(op.path, len(self.numbers)), op.flat[0] * op.itemsize
        if op.fills_chunks:
            assert op.chunk_bytes is not None
            self._fill(number, start, op.offset, op.nbytes, op.chunk_bytes)
            return
        for offset, first, size in op.runs():
            if size == op.chunk_bytes:
                self._chunks.append((offset, self._count, self._count + -(-size // _RUN_BYTES)))
            for at in range(0, size, _RUN_BYTES):
                self._add(number, start + first + at, offset + at, min(_RUN_BYTES, size - at), 0, False)

    def columns(self) -> tuple[Array, Array]:
        """Return the columns of the runs, and those of the inner chunks that are filled."""
        self._flush()
        runs, chunks = zip(*self._before, strict=True)
        return np.concatenate(runs, axis=1), np.concatenate(chunks, axis=1)

    def _fill(self, number: int, start: int, offset: int, nbytes: int, size: int) -> None:
        """Fill inner chunks of `size` with a run each, the last one with zeros behind it."""
        whole, rest = divmod(nbytes, size)
        if whole >= _MANY:
            self._flush()
            steps = np.arange(whole, dtype=np.int64)
            slot = offset + steps * (size + CHECKSUM_BYTES)
            filled = np.full_like
            runs = (filled(steps, number), start + steps * size, slot, filled(steps, size), slot + size, 0 * steps)
            self._before.append((np.stack(runs), np.stack((slot, self._count + steps, self._count + steps + 1))))
            self._count += whole
        done = whole if whole >= _MANY else 0
        for at in range(done, whole):
            self._end_chunk(number, start + at * size, offset + at * (size + CHECKSUM_BYTES), size, size)
        if rest:
            self._end_chunk(number, start + whole * size, offset + whole * (size + CHECKSUM_BYTES), rest, size)

    def _end_chunk(self, number: int, in_tensor: int, offset: int, nbytes: int, size: int) -> None:
        """Add an inner chunk: a run, zeros if it is shorter than the chunk, and the checksum behind that."""
        first, end = self._count, offset + size
        if nbytes == size:
            self._add(number, in_tensor, offset, nbytes, end, False)
        else:
            self._add(number, in_tensor, offset, nbytes, 0, False)
            self._add(-1, 0, offset + nbytes, size - nbytes, end, True)
        self._chunks.append((offset, first, self._count))

    def _add(self, *run: int) -> None:
        self._runs.append(run)
        self._count += 1

    def _flush(self) -> None:
        runs, chunks = np.array(self._runs, np.int64), np.array(self._chunks, np.int64)
        self._before.append((runs.reshape(-1, 6).T, chunks.reshape(-1, 3).T))
        self._runs, self._chunks = [], []


@dataclass(frozen=True)
class RowTable:
    """Rows of memory, the same distance apart, between tensors and a slot: what one call copies from or to a GPU.

    `tensor` is the index of the tensor. The rows are contiguous there; in the slot they begin `pitch` bytes apart.
    """

    tensor: Array
    in_tensor: Array
    in_slot: Array
    nbytes: Array
    rows: Array
    pitch: Array

    @classmethod
    def of(cls, sources: Iterable[tuple[int, int, CopyOp]]) -> RowTable:
        """Make the table of operations that are one run: index of the tensor, byte where the box begins, operation."""
        found = [(number, start + first, *rest) for number, start, op in sources for first, *rest in op.rows()]
        tensor, *others = np.array(found, np.uint64).reshape(-1, 6).T.copy()
        return cls(tensor.astype(np.intp), *others)
