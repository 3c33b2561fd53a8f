"""Rows, as a GPU copies them, bring the same bytes to the same places as the copies of the CPU."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.native import CHECKSUM_BYTES
from ckpt.staging.copy import stage
from ckpt.staging.copy_table import Copies, CopyOp, RowTable

_OFFSET = 24
PATH = ("t",)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...], int | None]:
    """Shape of a tensor, a box of it, the shape of what the box is in a corner of, and the elements of a piece."""
    full = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    box = tuple(draw(st.integers(1, size)) for size in full)
    low = tuple(draw(st.integers(0, 3)) for _ in full)
    shape = tuple(a + n + draw(st.integers(0, 2)) for a, n in zip(low, box, strict=True))
    source = tuple(slice(a, a + n) for a, n in zip(low, box, strict=True))
    return shape, source, full, draw(st.none() | st.integers(1, 9))


def copied_in_rows(op: CopyOp, tensor: torch.Tensor, slot_bytes: int) -> tuple[bytes, int]:
    """The slot, and how many bytes went there."""
    box = tensor[op.source].contiguous().view(-1).view(torch.uint8).numpy()
    slot, count = np.zeros(slot_bytes, np.uint8), 0
    for rows in op.rows():
        assert rows.pitch >= rows.nbytes
        for number in range(rows.rows):
            at, first = rows.offset + number * rows.pitch, rows.first + number * rows.nbytes
            slot[at : at + rows.nbytes] = box[first : first + rows.nbytes]
            count += rows.nbytes
    return slot.tobytes(), count


@given(boxes(), st.sampled_from([torch.uint8, torch.float32, torch.complex64]))
def test_the_same_bytes_in_the_same_places(
    drawn: tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...], int | None], dtype: torch.dtype
) -> None:
    shape, source, full, piece = drawn
    tensor = (torch.arange(1, 1 + int(np.prod(shape))) % 251 + 1).reshape(shape).to(dtype)
    itemsize = tensor.element_size()
    piece_bytes = None if piece is None else piece * itemsize
    op = CopyOp(PATH, source, None, _OFFSET, full, itemsize, piece_bytes)
    slot = torch.zeros(2 * _OFFSET + 6**4 * (itemsize + CHECKSUM_BYTES), dtype=torch.uint8)
    stage(Copies.of((op,)), {PATH: tensor}, slot, None)
    rows, count = copied_in_rows(op, tensor, slot.numel())
    assert rows == bytes(slot.numpy())
    assert count == op.nbytes


@given(st.integers(0, 5 << 30), st.none() | st.integers(1, 3 << 30))
def test_no_row_is_longer_than_a_gpu_takes(nbytes: int, piece_bytes: int | None) -> None:
    op = CopyOp(PATH, (slice(0, nbytes),), (0, nbytes), _OFFSET, (nbytes,), 1, piece_bytes)
    if piece_bytes is not None and nbytes // piece_bytes > 1000:
        return
    found = sorted(
        (rows.first + number * rows.nbytes, rows.offset + number * rows.pitch, rows.nbytes)
        for rows in op.rows()
        for number in range(rows.rows)
    )
    ends = 0
    for first, offset, size in found:
        assert first == ends
        assert size <= 1 << 30
        before = 0 if piece_bytes is None else first // piece_bytes * CHECKSUM_BYTES
        assert offset == _OFFSET + first + before
        ends += size
    assert ends == nbytes
    assert all(rows.pitch < 1 << 31 for rows in op.rows())


def test_a_table_has_the_bytes_of_all_operations() -> None:
    ops = tuple(
        CopyOp((str(n),), (slice(0, 10 + n),), (0, 10 + n), 100 * n, (10 + n,), 4, 8 if n % 2 else None)
        for n in range(6)
    )
    copies = Copies.of(ops)
    assert int((copies.rows.nbytes * copies.rows.rows).sum()) == sum(op.nbytes for op in ops)
    assert RowTable.of(()).tensor.size == 0
