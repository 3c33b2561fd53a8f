"""Boxes of arrays are read from packs, whatever their layout; damage is named; no more is read than needed."""

from __future__ import annotations

import dataclasses
import os
import re
from itertools import pairwise, product
from pathlib import Path
from threading import Barrier
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ckpt import native
from ckpt.errors import CheckpointCorruptError, StorageError
from ckpt.storage import dtypes
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_codec import verify_chunk
from ckpt.storage.chunk_reader import ArrayRead, ChunkReader
from ckpt.storage.compression import Compression
from ckpt.storage.direct_reads import WholeReads
from ckpt.storage.step_source import LocalStep, OpenFile
from tests.ckpt.storage.chunks import CASES, Case, bits, boxes, elements
from tests.ckpt.storage.packs import Pack, write_pack
from tests.support import LeakCheck


def read(pack: Pack, *wanted: tuple[int, tuple[int, ...], Any]) -> None:
    """Read boxes: the number of the array, the offset, the destination."""
    reader = ChunkReader(str(pack.root), pack.index, threads=2, timeout_s=20)
    reads = [ArrayRead("model/weight", pack.index.arrays[n], offset, target) for n, offset, target in wanted]
    reader.read(reads)


COMPRESSIONS = [
    Compression(codec, level=level, shuffle=shuffle)
    for codec, level, shuffle in (
        ("zstd", 1, "byte"),
        ("zstd", 3, "none"),
        ("zstd", 1, "bit"),
        ("lz4", 1, "bit"),
        ("lz4", 9, "byte"),
    )
]


def part(meta: ArrayMeta, array: Any, box: tuple[slice, ...]) -> Any:
    return np.asarray(array[box])


@pytest.mark.parametrize("compression", [None, *COMPRESSIONS], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reads_any_box(tmp_path: Path, case: Case, compression: Compression | None) -> None:
    meta = dataclasses.replace(case.meta, compression=compression)
    array = elements(meta)
    pack = write_pack(tmp_path, {"w": (meta, array)})
    for box in boxes(meta.shape):
        expected = part(meta, array, box)
        destination = np.empty(expected.shape, expected.dtype)
        read(pack, (0, tuple(s.start for s in box), destination))
        assert bits(destination) == bits(expected)


@st.composite
def reads_of_an_array(draw: st.DrawFn) -> tuple[ArrayMeta, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """Return an array, and boxes of it: offset, shape, and the order of the dimensions in memory."""
    dims = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(dims))
    inner = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    chunk = tuple(size * draw(st.integers(1, 3)) for size in inner)
    meta = ArrayMeta(
        shape, draw(st.sampled_from(["int8", "int16", "complex32"])), chunk, draw(st.sampled_from([None, inner]))
    )
    wanted = []
    for _ in range(draw(st.integers(1, 3))):
        first = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, first, strict=True))
        wanted.append((first, sizes, draw(st.integers(0, 3))))
    return meta, wanted


@pytest.mark.parametrize("level", [-1, 2], ids=["portable", "compiled"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(wanted=reads_of_an_array(), apart=st.integers(0, 2))
def test_boxes_go_to_any_memory(
    tmp_path: Path, level: int, wanted: tuple[ArrayMeta, list[tuple[tuple[int, ...], tuple[int, ...], int]]], apart: int
) -> None:
    """Transposed, reversed and with gaps; several at a time, which may overlap in the array."""
    meta, requests = wanted
    array = elements(meta, seed=apart)
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    pack = write_pack(folder, {"w": (meta, array)})
    native.choose(level)
    try:
        targets = []
        for offset, shape, order in requests:
            whole = np.zeros([size * (apart + 1) for size in reversed(shape)] + list(meta.stored.trailing), array.dtype)
            view = whole[(*(slice(None, None, apart + 1) for _ in shape), ...)]
            if order % 2 and shape:
                view = view[::-1]
            view = np.moveaxis(view, range(len(shape)), range(len(shape) - 1, -1, -1)) if shape else view
            targets.append((offset, view, whole))
        read(pack, *((0, offset, view) for offset, view, _ in targets))
    finally:
        native.choose(2)
    for offset, view, whole in targets:
        box = tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=False))
        assert bits(view) == bits(part(meta, array, box))
        assert np.count_nonzero(np.frombuffer(bits(whole), np.uint8)) == np.count_nonzero(
            np.frombuffer(bits(view), np.uint8)
        )


@pytest.mark.parametrize("name", dtypes.names())
@pytest.mark.parametrize("compression", [None, Compression()], ids=["raw", "zstd"])
def test_every_dtype_of_torch_keeps_its_bits(tmp_path: Path, name: str, compression: Compression | None) -> None:
    dtype, how = dtypes.torch_dtype(name), dtypes.stored(name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (5, 6 * how.itemsize), dtype=torch.uint8)
    meta = ArrayMeta((5, 6), name, (4, 6), (2, 3), compression)
    stored = raw.numpy().view(how.numpy_dtype).reshape(5, 6, *how.trailing)
    pack = write_pack(tmp_path, {"w": (meta, stored)})
    destination = np.empty_like(stored)
    read(pack, (0, (0, 0), destination))
    restored = torch.from_numpy(destination.reshape(-1).view(np.uint8))
    if not dtype.is_floating_point and name.startswith("q"):  # quantized dtypes cannot be viewed
        assert restored.equal(raw.reshape(-1))
    else:
        assert restored.view(dtype).view(torch.uint8).equal(raw.reshape(-1))
        assert restored.view(dtype).numel() == 30


METAS = {
    f"{kind}{compression.codec if compression else ''}": ArrayMeta((8, 6), "float32", (4, 6), inner, compression)
    for (kind, inner), compression in product((("plain", None), ("sharded", (2, 3))), (None, Compression()))
}


def read_all(pack: Pack) -> None:
    read(pack, (0, (0, 0), np.empty((8, 6), np.float32)))


_NAMED = r"tensor model/weight, chunk \(1, 0\): .*/packs/000/rank_00000_000 "


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
def test_a_missing_file_is_an_error(tmp_path: Path, meta: ArrayMeta, leak_check: LeakCheck) -> None:
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    leak_check.rebase()
    pack.file().unlink()
    with pytest.raises(CheckpointCorruptError, match=_NAMED.replace("1, 0", "0, 0") + "is missing"):
        read_all(pack)


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
def test_every_flipped_bit_is_found(tmp_path: Path, meta: ArrayMeta) -> None:
    """`verify_chunk` finds all; a read finds those that it needs: it computes the index of an uncompressed shard."""
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    content = pack.file().read_bytes()
    start, nbytes = pack.place((1, 0))
    not_read = range(start + nbytes - meta.index_bytes, start + nbytes) if meta.compression is None else range(0)
    place = pack.index.place(pack.index.arrays[0], (1, 0))
    for position in range(start, start + nbytes):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        pack.file().write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=_NAMED + ".*offset"):
            verify_chunk(str(tmp_path), place, meta, (1, 0), "model/weight")
        if position % 8 == 0 and position not in not_read:
            with pytest.raises(CheckpointCorruptError, match=_NAMED + ".*offset"):
                read_all(pack)
    pack.file().write_bytes(content)
    read_all(pack)


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
def test_every_truncation_is_found(tmp_path: Path, meta: ArrayMeta) -> None:
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    start, nbytes = pack.place((1, 0))
    place = pack.index.place(pack.index.arrays[0], (1, 0))
    for size in range(start + nbytes - 1, start, -7):
        os.truncate(pack.file(), size)
        with pytest.raises(CheckpointCorruptError, match=_NAMED):
            verify_chunk(str(tmp_path), place, meta, (1, 0), "model/weight")
    with pytest.raises(CheckpointCorruptError, match=_NAMED):
        read_all(pack)


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    meta = METAS["plain"]
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    if kind == "link":
        pack.file().rename(tmp_path / "elsewhere")
        pack.file().symlink_to(tmp_path / "elsewhere")
    else:
        pack.file().unlink()
        os.mkfifo(pack.file()) if kind == "pipe" else pack.file().mkdir()
    with pytest.raises(CheckpointCorruptError, match="link" if kind == "link" else "not a regular file"):
        read_all(pack)


def test_a_compressed_chunk_that_no_part_lists(tmp_path: Path) -> None:
    meta = METAS["plainzstd"]
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    index = dataclasses.replace(pack.index, table=lambda rank: {(0, 0): (0, 0, 100)})
    with pytest.raises(CheckpointCorruptError, match=r"chunk \(1, 0\): no part says where it is"):
        read_all(Pack(tmp_path, index))


@pytest.mark.parametrize("place", [(0, 1 << 62, 100), (0, 0, 1 << 62), (5, 0, 100), (0, 0, 1)])
def test_a_compressed_chunk_in_an_impossible_place(tmp_path: Path, place: tuple[int, int, int]) -> None:
    meta = METAS["plainzstd"]
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    index = dataclasses.replace(pack.index, table=lambda rank: {(0, 0): place, (0, 1): place})
    with pytest.raises(CheckpointCorruptError, match=re.escape("model/weight, chunk (0, 0)")):
        read_all(Pack(tmp_path, index))


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = METAS["plain"]
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    real = os.open

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        if path == "rank_00000_000":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StorageError, match="Permission denied"):
        read_all(pack)


@pytest.mark.parametrize(
    ("offset", "shape", "dtype"),
    [
        ((0, 0), (9, 6), "f4"),
        ((-1, 0), (2, 2), "f4"),
        ((0,), (8, 6), "f4"),
        ((0, 0), (8, 6), "f8"),
        ((0, 0), (8,), "f4"),
    ],
)
def test_impossible_boxes(tmp_path: Path, offset: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> None:
    pack = write_pack(tmp_path, {"w": (METAS["plain"], elements(METAS["plain"]))})
    with pytest.raises(ValueError, match="model/weight"):
        read(pack, (0, offset, np.empty(shape, dtype)))


# -- costs -------------------------------------------------------------------------------------------------------------


_NOISE = 2048  # bytes of the counts themselves, which differ from time to time


def bytes_read(pack: Pack, *wanted: tuple[int, tuple[int, ...], Any]) -> tuple[int, int]:
    """Return how many calls of the system a read takes, and how many bytes these return. Without a map."""

    def counts() -> tuple[int, int]:
        found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(found["syscr"]), int(found["rchar"])

    fastest = native.choose(2)
    native.choose(min(fastest, 0))
    counts()
    first, second = counts(), counts()
    read(pack, *wanted)
    after = counts()
    native.choose(fastest)
    calls, nbytes = (2 * b - a - c for a, b, c in zip(first, second, (0, 0), strict=True))
    return after[0] - calls, after[1] - nbytes


def test_rows_of_a_large_array(tmp_path: Path) -> None:
    """A third of the rows, from the middle of an inner chunk on: two inner chunks are read for a part of each."""
    meta = ArrayMeta((3072, 256), "float32", (768, 256), (32, 256))
    array = elements(meta)
    pack = write_pack(tmp_path, {"w": (meta, array)})
    destination = np.empty((1024, 256), np.float32)
    _, nbytes = bytes_read(pack, (0, (1000, 0), destination))
    assert bits(destination) == bits(array[1000:2024])
    assert nbytes <= destination.nbytes + 2 * (32 * 1024) + 4 * 40
    _, nbytes = bytes_read(pack, (0, (1024, 0), destination))
    assert abs(nbytes - destination.nbytes - 4 * 32) < _NOISE


def test_columns_of_an_array_that_is_cut_into_columns(tmp_path: Path) -> None:
    meta = ArrayMeta((512, 1024), "float32", (512, 256), (8, 256))
    array = elements(meta)
    pack = write_pack(tmp_path, {"w": (meta, array)})
    destination = np.empty((512, 256), np.float32)
    _, nbytes = bytes_read(pack, (0, (0, 256), destination))
    assert bits(destination) == bits(array[:, 256:512])
    assert abs(nbytes - destination.nbytes - 4 * 64) < _NOISE


def test_many_small_arrays_take_few_calls(tmp_path: Path) -> None:
    """They are chunks of one array here, one behind the other in a file, as small tensors are."""
    meta = ArrayMeta((2000, 100), "float32", (1, 100))
    array = elements(meta)
    pack = write_pack(tmp_path, {"w": (meta, array)})
    destination = np.empty((2000, 100), np.float32)
    calls, nbytes = bytes_read(pack, (0, (0, 0), destination))
    assert bits(destination) == bits(array)
    assert calls < 10
    assert nbytes <= 2000 * 416


def test_a_block_that_two_requests_need_is_read_for_each(tmp_path: Path) -> None:
    meta = ArrayMeta((64, 64), "float32", (64, 64))
    array = elements(meta)
    pack = write_pack(tmp_path, {"w": (meta, array)})
    halves = [np.empty((40, 64), np.float32) for _ in range(2)]
    read(pack, (0, (0, 0), halves[0]), (0, (24, 0), halves[1]))
    assert [bits(half) for half in halves] == [bits(array[:40]), bits(array[24:])]


class _Watched(OpenFile):
    """A file that records where the reads of one opener begin. `all_open` is waited for at the first of them."""

    def __init__(self, file: OpenFile, all_open: Barrier) -> None:
        self._file = file
        self._all_open = all_open
        self.starts: list[int] = []
        self.closed = False

    @property
    def size(self) -> int:
        return self._file.size

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        self._note(offset)
        return self._file.read(offset, nbytes)

    def read_checked(self, segments: Any) -> bool:
        self._note(int(segments["base"][0] + segments["at"][0]))
        return self._file.read_checked(segments)

    def _note(self, offset: int) -> None:
        if not self.starts:
            self._all_open.wait(20)
        self.starts.append(offset)

    def close(self) -> None:
        self.closed = True
        self._file.close()


class _WatchedStep(LocalStep):
    piece_bytes = 1 << 10

    def __init__(self, path: str, threads: int) -> None:
        super().__init__(path)
        self._all_open = Barrier(threads)
        self.opened: list[_Watched] = []

    def open(self, name: str) -> OpenFile:
        self.opened.append(_Watched(super().open(name), self._all_open))
        return self.opened[-1]


@pytest.mark.parametrize("compression", [None, Compression()], ids=["raw", "zstd"])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_share_a_file_and_each_reads_forwards(
    tmp_path: Path, threads: int, compression: Compression | None
) -> None:
    """So the kernel reads ahead for each; and all threads read at the same time, or this would not end."""
    meta = ArrayMeta((64, 1024), "uint8", (1, 1024), compression=compression)
    array = np.random.default_rng(3).integers(0, 256, (64, 1024), np.uint8)
    pack = write_pack(tmp_path, {"w": (meta, array)})
    step, destination = _WatchedStep(str(tmp_path), threads), np.empty_like(array)
    ChunkReader(step, pack.index, threads=threads, timeout_s=20).read(
        [ArrayRead("w", pack.index.arrays[0], (0, 0), destination)]
    )
    assert np.array_equal(destination, array)
    assert all(file.closed and file.starts == sorted(file.starts) for file in step.opened)
    between = sorted((file.starts[0], file.starts[-1]) for file in step.opened)
    assert all(last < first for (_, last), (first, _) in pairwise(between))
    assert threads <= len(step.opened) <= 4 * threads


def test_a_file_whose_reads_failed_is_closed(tmp_path: Path) -> None:
    meta = ArrayMeta((64, 1024), "uint8", (1, 1024))
    pack = write_pack(tmp_path, {"w": (meta, elements(meta))})
    data = bytearray(pack.file().read_bytes())
    data[40_000] ^= 1
    pack.file().write_bytes(data)
    step = _WatchedStep(str(tmp_path), 1)
    with pytest.raises(CheckpointCorruptError, match="rank_00000"):
        ChunkReader(step, pack.index, threads=2, timeout_s=20).read(
            [ArrayRead("w", pack.index.arrays[0], (0, 0), np.empty((64, 1024), np.uint8))]
        )
    assert step.opened
    assert all(file.closed for file in step.opened)


WHOLE = {
    f"w{number}": ArrayMeta(shape, name, shape)
    for number, (name, shape) in enumerate(
        [("float32", (6, 4)), ("complex32", ()), ("bfloat16", (3, 5)), ("float64", (1000,)), ("complex64", (2, 1, 2))]
    )
}


def _whole_reads(pack: Pack, targets: dict[str, Any]) -> WholeReads:
    addresses = [target.ctypes.data for target in targets.values()]
    return WholeReads(np.arange(len(pack.index.arrays)), np.array(addresses))


@pytest.mark.parametrize("together", [False, True], ids=["alone", "with a box"])
def test_whole_arrays_are_read_to_their_addresses(tmp_path: Path, together: bool) -> None:
    assert all(meta.is_one_block for meta in WHOLE.values())
    arrays = {name: (meta, elements(meta)) for name, meta in WHOLE.items()}
    pack = write_pack(tmp_path, arrays)
    targets = {name: np.zeros_like(array) for name, (_, array) in arrays.items()}
    box = np.zeros((2, 4), np.float32)
    boxes = [ArrayRead("w0", pack.index.arrays[0], (3, 0), box)] if together else []
    ChunkReader(str(pack.root), pack.index, threads=2, timeout_s=20).read(boxes, _whole_reads(pack, targets))
    for name, (_, array) in arrays.items():
        assert bits(targets[name]) == bits(array)
    assert np.array_equal(box, arrays["w0"][1][3:5]) is together


def test_a_damaged_whole_array_is_named(tmp_path: Path) -> None:
    arrays = {name: (meta, elements(meta)) for name, meta in WHOLE.items()}
    pack = write_pack(tmp_path, arrays)
    targets = {name: np.zeros_like(array) for name, (_, array) in arrays.items()}
    place = pack.index.place(pack.index.arrays[3], (0,))
    path = pack.root / place.file
    data = bytearray(path.read_bytes())
    data[place.offset + 17] ^= 4
    path.write_bytes(data)
    message = rf"tensor w3, chunk \(0,\): .*{place.file} has a wrong checksum"
    with pytest.raises(CheckpointCorruptError, match=message):
        ChunkReader(str(pack.root), pack.index, threads=2, timeout_s=20).read([], _whole_reads(pack, targets))
