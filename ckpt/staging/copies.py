"""What to copy where, for a whole slot at once. Free of torch.

Thousands of operations are looked at one by one only once, when a state is planned. For each save they are one table of
runs of memory, to which the addresses of the tensors are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ckpt.native import RUN
from ckpt.paths import Path
from ckpt.staging.copy_op import CopyOp

__all__ = ["Copies", "RowTable", "RunTable"]

Array = np.ndarray[Any, np.dtype[Any]]
_RUN_BYTES = 4 << 20


@dataclass(frozen=True)
class Copies:
    """The copies that fill a slot (or, the other way, restore from it). `table` has those of them that are runs of
    memory in a contiguous tensor, and `rows` the same ones for a GPU; `elements` is how many elements of each tensor
    they copy, and `offsets` where in the slot runs begin that are not all of a piece."""

    ops: tuple[CopyOp, ...]
    table: RunTable
    rows: RowTable
    elements: dict[Path, int]
    offsets: frozenset[int]

    @classmethod
    def of(cls, ops: tuple[CopyOp, ...]) -> Copies:
        """Look at all operations, now and not while a save waits for it."""
        elements: dict[Path, int] = {}
        for op in ops:
            elements[op.path] = elements.get(op.path, 0) + op.nbytes // op.itemsize
        table = RunTable.of(ops)
        numbers = {path: number for number, path in enumerate(table.paths)}
        runs = ((numbers[op.path], op.flat[0] * op.itemsize, op) for op in ops if op.flat is not None)
        partial = (op for op in ops if op.piece_bytes is None or op.flat is None or op.nbytes % op.piece_bytes)
        offsets = frozenset(offset for op in partial for offset, _, _ in op.runs()) - table.piece_offsets
        return cls(ops, table, RowTable.of(runs), elements, offsets)


@dataclass(frozen=True)
class RunTable:
    """Runs of memory between tensors and a slot, of some MB at most.

    `tensor` numbers the `paths`. `seal_at` is where in the slot the checksum of a run goes that is all of a piece; 0
    for others. `pieces` are those that are filled: offset in the slot, number of the tensor, and the runs from first to
    last (exclusive). `has_all` says that no operation is left out.
    """

    paths: tuple[Path, ...]
    tensor: Array
    in_tensor: Array
    in_slot: Array
    nbytes: Array
    seal_at: Array
    pieces: tuple[tuple[int, int, int, int], ...]
    has_all: bool

    @classmethod
    def of(cls, ops: tuple[CopyOp, ...]) -> RunTable:
        """The table of those that are one run in a contiguous tensor."""
        numbers: dict[Path, int] = {}
        rows: list[tuple[int, int, int, int, int]] = []
        pieces = []
        for op in ops:
            if op.flat is None:
                continue
            number = numbers.setdefault(op.path, len(numbers))
            start = op.flat[0] * op.itemsize
            for offset, first, size in op.runs():
                is_piece = size == op.piece_bytes
                if is_piece:
                    pieces.append((offset, number, len(rows), len(rows) + -(-size // _RUN_BYTES)))
                for at in range(0, size, _RUN_BYTES):
                    part = min(_RUN_BYTES, size - at)
                    behind = offset + size if is_piece and part == size else 0
                    rows.append((number, start + first + at, offset + at, part, behind))
        tensor, in_tensor, in_slot, nbytes, seal_at = np.array(rows, np.uint64).reshape(-1, 5).T.copy()
        has_all = all(op.flat is not None for op in ops)
        return cls(tuple(numbers), tensor.astype(np.intp), in_tensor, in_slot, nbytes, seal_at, tuple(pieces), has_all)

    @cached_property
    def long_pieces(self) -> tuple[tuple[int, int, int, int], ...]:
        """Those that are several runs."""
        return tuple(piece for piece in self.pieces if piece[3] - piece[2] > 1)

    @cached_property
    def piece_offsets(self) -> frozenset[int]:
        """Those of all pieces."""
        return frozenset(offset for offset, _, _, _ in self.pieces)

    def into_slot(self, addresses: Array, usable: Array, slot: int) -> Array:
        """The runs with the addresses of the tensors and of the slot; of no bytes from tensors not `usable`."""
        runs = np.zeros(len(self.tensor), RUN)
        used = usable[self.tensor]
        runs["from"] = addresses[self.tensor] + self.in_tensor
        runs["to"] = self.in_slot + np.uint64(slot)
        runs["bytes"] = np.where(used, self.nbytes, 0)
        runs["seal_at"] = np.where(used & (self.seal_at > 0), self.seal_at + np.uint64(slot), 0)
        return runs

    def out_of_slot(self, addresses: Array, usable: Array, checked: Array, slot: int) -> Array:
        """The other way; those of tensors that are only to be `checked` copy nothing."""
        runs = np.zeros(len(self.tensor), RUN)
        used = usable[self.tensor]
        runs["from"] = self.in_slot + np.uint64(slot)
        runs["to"] = np.where(used, addresses[self.tensor] + self.in_tensor, 0)
        runs["bytes"] = np.where(used | checked[self.tensor], self.nbytes, 0)
        return runs


@dataclass(frozen=True)
class RowTable:
    """Rows of memory, the same distance apart, between tensors and a slot: what one call copies from or to a GPU.

    `tensor` numbers the tensors. There the rows lie one behind the other; in the slot they begin `pitch` bytes apart.
    """

    tensor: Array
    in_tensor: Array
    in_slot: Array
    nbytes: Array
    rows: Array
    pitch: Array

    @classmethod
    def of(cls, sources: Iterable[tuple[int, int, CopyOp]]) -> RowTable:
        """Of operations with the number of a tensor and the byte of it where their boxes begin, as one run."""
        found = [(number, start + first, *rest) for number, start, op in sources for first, *rest in op.rows()]
        tensor, *others = np.array(found, np.uint64).reshape(-1, 6).T.copy()
        return cls(tensor.astype(np.intp), *others)
