"""Inner chunks get their checksums while they are copied, and are checked while they are copied back."""

from __future__ import annotations

import google_crc32c
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.staging.copy import Unstaged, stage, unstage
from ckpt.staging.copy_table import Copies, CopyOp
from ckpt.staging.runs import copy_together

_START = 16

Laid = tuple[tuple[CopyOp, ...], dict[tuple[str, ...], torch.Tensor], int]


def laid_out(tensors: list[tuple[int, int]]) -> Laid:
    """Lay out float32 tensors in inner chunks, each with its checksum behind it: elements of a tensor, and of a chunk.

    The last inner chunk of a tensor ends with zeros.
    """
    ops: list[CopyOp] = []
    memory = {}
    at = _START
    for elements, chunk in tensors:
        path = (f"t{len(memory)}",)
        memory[path] = torch.randn(elements)
        ops.append(CopyOp(path, (slice(0, elements),), (0, elements), at, (elements,), 4, 4 * chunk))
        at += -(-elements // chunk) * (4 * chunk + 4)
    return tuple(ops), memory, at


def found_by(unstaged: Unstaged) -> dict[int, int]:
    """The checksums of inner chunks, by offset."""
    return dict(zip(unstaged.offsets.tolist(), unstaged.checksums.tolist(), strict=True))


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 700)), max_size=4))
def test_every_inner_chunk_has_its_checksum_behind_it(sizes: list[tuple[int, int]]) -> None:
    ops, tensors, end = laid_out(sizes)
    copies = Copies.of(ops)
    slot = torch.zeros(end, dtype=torch.uint8)
    staged = stage(copies, tensors, slot, None)
    expected = {}
    for op, (elements, chunk) in zip(ops, sizes, strict=True):
        pitch = 4 * chunk + 4
        offsets = range(op.offset, op.offset + -(-elements // chunk) * pitch, pitch)
        content = b"".join(bytes(slot[at : at + 4 * chunk].numpy()) for at in offsets)
        assert content == tensors[op.path].numpy().tobytes().ljust(4 * chunk * len(offsets), b"\0")
        for at in offsets:
            encoded = bytes(slot[at : at + pitch].numpy())
            expected[at] = google_crc32c.value(encoded[:-4])
            assert expected[at] == int.from_bytes(encoded[-4:], "little")
    assert staged.checksummed == expected.keys()
    assert not copies.offsets

    restored = {path: torch.zeros_like(tensor) for path, tensor in tensors.items()}
    unstaged = unstage(copies, restored, slot)
    assert found_by(unstaged) == expected
    assert not len(unstaged.unchecked)
    assert all(torch.equal(restored[path], tensor) for path, tensor in tensors.items())
    assert unstaged.nbytes == {path: 4 * tensor.numel() for path, tensor in tensors.items()}


def test_what_goes_to_a_gpu_is_only_checked() -> None:
    ops, tensors, end = laid_out([(10, 10), (20, 8), (30, 30), (10, 4)])
    copies = Copies.of(ops)
    slot = torch.zeros(end, dtype=torch.uint8)
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


def test_damage_anywhere_in_a_chunk_shows_also_behind_the_last_element() -> None:
    ops, tensors, end = laid_out([(20, 25)])
    copies = Copies.of(ops)
    for at in range(_START, end - 4):
        slot = torch.zeros(end, dtype=torch.uint8)
        stage(copies, tensors, slot, None)
        recorded = int.from_bytes(bytes(slot[-4:].numpy()), "little")
        slot[at] += 1
        assert found_by(unstage(copies, tensors, slot))[_START] != recorded
        tensors = {path: torch.randn(20) for path in tensors}


def test_a_checksum_is_left_to_the_writer_when_a_tensor_is_no_run_of_memory() -> None:
    ops, tensors, end = laid_out([(10, 10), (12, 12), (30, 30)])
    strided = {**tensors, ("t1",): torch.randn(12, 2)[:, 0]}
    copies = Copies.of(ops)
    slot = torch.full((end,), 7, dtype=torch.uint8)
    assert stage(copies, strided, slot, None).checksummed == {ops[0].offset, ops[2].offset}
    assert bytes(slot[ops[1].offset + 48 :][:4].numpy()) == b"\x07" * 4
    restored = {path: torch.zeros(30, 2)[: len(tensor), 0] for path, tensor in tensors.items()}
    unstaged = unstage(copies, restored, slot)
    assert not len(unstaged.checksums)
    assert set(unstaged.unchecked.tolist()) == {op.offset for op in ops}
    assert all(torch.equal(restored[path], tensor) for path, tensor in strided.items())

    of_columns = (CopyOp(("t0",), ops[0].source, None, ops[0].offset, (10,), 4), *ops[1:])
    copies = Copies.of(of_columns)
    assert stage(copies, tensors, slot, None).checksummed == {ops[1].offset, ops[2].offset}
    assert np.array_equal(slot[_START : _START + 40].numpy(), tensors[("t0",)].numpy().view(np.uint8))
    assert copies.offsets == {ops[0].offset}
