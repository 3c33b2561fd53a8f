"""Pieces that several tensors share are sealed while they are copied, and checked while they are copied back."""

from __future__ import annotations

import google_crc32c
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.staging.copy import Unstaged, stage, unstage
from ckpt.staging.copy_table import Copies, CopyOp, Shared
from ckpt.staging.runs import copy_together

_START = 16

Laid = tuple[tuple[CopyOp, ...], tuple[Shared, ...], dict[tuple[str, ...], torch.Tensor], int]


def laid_out(chunks: list[list[tuple[int, int]]]) -> Laid:
    """Pieces of float32 tensors, each some bytes behind the one before, and as many zeros behind the last."""
    ops: list[CopyOp] = []
    shared, tensors = [], {}
    at = _START
    for entries in chunks:
        first, start = len(ops), at
        for gap, elements in entries:
            at += gap
            path = (f"t{len(tensors)}",)
            tensors[path] = torch.randn(elements)
            ops.append(CopyOp(path, (slice(0, elements),), (0, elements), at, (elements,), 4))
            at += 4 * elements
        at += entries[-1][0]
        shared.append(Shared(start, at - start, first, len(ops)))
        at += 4
    return tuple(ops), tuple(shared), tensors, at


def found_by(unstaged: Unstaged) -> dict[int, int]:
    """The checksums of chunks, by offset."""
    return dict(zip(unstaged.offsets.tolist(), unstaged.checksums.tolist(), strict=True))


@given(st.lists(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 400)), min_size=1, max_size=5), max_size=4))
def test_every_chunk_is_sealed_and_known(chunks: list[list[tuple[int, int]]]) -> None:
    ops, shared, tensors, size = laid_out(chunks)
    copies = Copies.of(ops, shared)
    slot = torch.zeros(size, dtype=torch.uint8)
    staged = stage(copies, tensors, slot, None)
    assert staged.checksummed == {piece.offset for piece in shared}
    checksums = {}
    for piece in shared:
        end = piece.offset + piece.nbytes
        checksums[piece.offset] = google_crc32c.value(bytes(slot[piece.offset : end].numpy()))
        assert int.from_bytes(bytes(slot[end : end + 4].numpy()), "little") == checksums[piece.offset]
    assert not copies.offsets

    restored = {path: torch.zeros_like(tensor) for path, tensor in tensors.items()}
    unstaged = unstage(copies, restored, slot)
    assert found_by(unstaged) == checksums
    assert not len(unstaged.unchecked)
    assert all(torch.equal(restored[path], tensor) for path, tensor in tensors.items())
    assert unstaged.nbytes == {path: 4 * tensor.numel() for path, tensor in tensors.items()}


@given(elements=st.integers(1, 3000), piece=st.integers(1, 700))
def test_zeros_behind_the_last_element_belong_to_its_piece(elements: int, piece: int) -> None:
    tensor = torch.randn(elements)
    op = CopyOp(("t",), (slice(0, elements),), (0, elements), _START, (elements,), 4, 4 * piece)
    copies = Copies.of((op,))
    count = -(-elements // piece)
    slot = torch.zeros(_START + count * (4 * piece + 4), dtype=torch.uint8)
    staged = stage(copies, {("t",): tensor}, slot, None)
    assert staged.checksummed == {_START + number * (4 * piece + 4) for number in range(count)}
    assert not copies.offsets
    content = b"".join(bytes(slot[at : at + 4 * piece].numpy()) for at in sorted(staged.checksummed))
    assert content == tensor.numpy().tobytes().ljust(4 * piece * count, b"\0")
    for at in staged.checksummed:
        image = bytes(slot[at : at + 4 * piece + 4].numpy())
        assert google_crc32c.value(image[:-4]) == int.from_bytes(image[-4:], "little")
    restored = torch.zeros_like(tensor)
    assert found_by(unstage(copies, {("t",): restored}, slot)).keys() == staged.checksummed
    assert torch.equal(restored, tensor)


def test_what_goes_to_a_gpu_is_only_checked() -> None:
    ops, shared, tensors, size = laid_out([[(8, 10), (0, 20)], [(4, 30)]])
    padded = CopyOp(("t0",), ops[0].source, ops[0].flat, size, (10,), 4, 16)
    copies = Copies.of((*ops, padded), shared)
    slot = torch.zeros(size + 3 * 20, dtype=torch.uint8)
    staged = stage(copies, tensors, slot, None)
    table = copies.table
    nowhere = np.zeros(len(table.paths), np.uint64)
    on_gpu = np.ones(len(table.paths), bool)
    runs, whole = table.out_of_slot(nowhere, ~on_gpu, on_gpu, slot.data_ptr())
    copy_together(runs)
    assert whole.all()
    found = dict(zip(table.chunk_offset.tolist(), runs["crc32c"][table.chunk_end - 1].tolist(), strict=True))
    assert found == found_by(unstage(copies, tensors, slot))
    assert found.keys() == staged.checksummed

    runs, whole = table.into_slot(nowhere, ~on_gpu, slot.data_ptr())
    before = bytes(slot.numpy())
    copy_together(runs)
    assert not whole.any()
    assert bytes(slot.numpy()) == before


def test_damage_anywhere_in_a_chunk_shows_also_between_the_tensors() -> None:
    ops, shared, tensors, size = laid_out([[(8, 10), (8, 10)]])
    copies = Copies.of(ops, shared)
    for at in range(_START, size - 4):
        slot = torch.zeros(size, dtype=torch.uint8)
        stage(copies, tensors, slot, None)
        sealed = int.from_bytes(bytes(slot[-4:].numpy()), "little")
        slot[at] += 1
        assert found_by(unstage(copies, tensors, slot))[_START] != sealed
        tensors = {path: torch.randn(10) for path in tensors}


def test_a_chunk_is_left_to_the_writer_when_a_tensor_is_no_run_of_memory() -> None:
    ops, shared, tensors, size = laid_out([[(0, 10), (4, 12)], [(0, 30)]])
    strided = {**tensors, ("t1",): torch.randn(12, 2)[:, 0]}
    copies = Copies.of(ops, shared)
    slot = torch.full((size,), 7, dtype=torch.uint8)
    assert stage(copies, strided, slot, None).checksummed == {shared[1].offset}
    assert bytes(slot[shared[0].offset + shared[0].nbytes :][:4].numpy()) == b"\x07" * 4
    restored = {path: torch.zeros(30, 2)[: len(tensor), 0] for path, tensor in tensors.items()}
    unstaged = unstage(copies, restored, slot)
    assert not len(unstaged.checksums)
    assert set(unstaged.unchecked.tolist()) == {piece.offset for piece in shared}
    assert all(torch.equal(restored[path], tensor) for path, tensor in strided.items())

    of_columns = (CopyOp(("t0",), ops[0].source, None, ops[0].offset, (10,), 4), *ops[1:])
    copies = Copies.of(of_columns, shared)
    assert stage(copies, tensors, slot, None).checksummed == {shared[1].offset}
    assert np.array_equal(slot[_START : _START + 40].numpy(), tensors[("t0",)].numpy().view(np.uint8))
    assert copies.offsets == {op.offset for op in ops[:2]}
