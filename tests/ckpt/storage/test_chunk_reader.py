import os
from pathlib import Path

import numpy as np
import pytest
import torch
from ckpt.storage.chunk_writers import DirectChunkWriter, TensorStoreChunkWriter

from ckpt.errors import CheckpointCorruptError
from ckpt.storage import dtypes
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_codec import verify_chunk
from ckpt.storage.chunk_reader import ArrayReader
from tests.ckpt.storage.chunks import CASES, Case, bits, boxes, elements, write_array
from tests.support import LeakCheck

TIMEOUT_S = 20


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reads_any_box(tmp_path: Path, case: Case) -> None:
    array = elements(case.meta)
    write_array(DirectChunkWriter(str(tmp_path)), case.meta, "w", array)
    reader = ArrayReader(str(tmp_path))
    for box in boxes(case.meta.shape):
        expected = np.asarray(array[box])
        destination = np.empty(expected.shape, expected.dtype)
        reader.read_into(case.meta, "w", "w", tuple(s.start for s in box), destination).result(TIMEOUT_S)
        assert bits(destination) == bits(expected)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_reads_into_a_view(tmp_path: Path, compression: str | None) -> None:
    meta = ArrayMeta((8, 6), "float32", (8, 6), (2, 3), compression)
    array = np.arange(48, dtype=np.float32).reshape(8, 6)
    write_array(TensorStoreChunkWriter(str(tmp_path)), meta, "w", array)
    whole = np.zeros((10, 12), np.float32)
    ArrayReader(str(tmp_path)).read_into(meta, "w", "w", (1, 2), whole[1:9:2, 3:7]).result(TIMEOUT_S)
    assert (whole[1:9:2, 3:7] == array[1:5, 2:6]).all()
    assert whole.sum() == array[1:5, 2:6].sum()


@pytest.mark.parametrize("name", dtypes.names())
@pytest.mark.parametrize("new_writer", [DirectChunkWriter, TensorStoreChunkWriter])
def test_every_dtype_of_torch_keeps_its_bits(
    tmp_path: Path, name: str, new_writer: type[DirectChunkWriter] | type[TensorStoreChunkWriter]
) -> None:
    dtype = dtypes.torch_dtype(name)
    how = dtypes.stored(name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (5, 6 * how.itemsize), dtype=torch.uint8)
    meta = ArrayMeta((5, 6), name, (4, 6), (2, 3))
    stored = raw.numpy().view(how.numpy_dtype).reshape(5, 6, *how.trailing)
    write_array(new_writer(str(tmp_path)), meta, "w", stored)
    destination = np.empty_like(stored)
    ArrayReader(str(tmp_path)).read_into(meta, "w", "w", (0, 0), destination).result(TIMEOUT_S)
    restored = torch.from_numpy(destination.reshape(-1).view(np.uint8))
    if not dtype.is_floating_point and name.startswith("q"):  # quantized dtypes cannot be viewed
        assert restored.equal(raw.reshape(-1))
    else:
        assert restored.view(dtype).view(torch.uint8).equal(raw.reshape(-1))
        assert restored.view(dtype).numel() == 30


SHARDED = ArrayMeta((8, 6), "float32", (4, 6), (2, 3))
PLAIN = ArrayMeta((8, 6), "float32", (4, 6))
COMPRESSED = ArrayMeta((8, 6), "float32", (4, 6), None, "zstd")
SHARDED_COMPRESSED = ArrayMeta((8, 6), "float32", (4, 6), (2, 3), "zstd")
METAS = {"plain": PLAIN, "sharded": SHARDED, "compressed": COMPRESSED, "sharded-compressed": SHARDED_COMPRESSED}


def read_all(root: Path, meta: ArrayMeta) -> None:
    destination = np.empty((8, 6), np.float32)
    ArrayReader(str(root)).read_into(meta, "w", "model/weight", (0, 0), destination).result(TIMEOUT_S)


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
def test_a_missing_chunk_is_an_error(tmp_path: Path, meta: ArrayMeta, leak_check: LeakCheck) -> None:
    write_array(TensorStoreChunkWriter(str(tmp_path)), meta, "w", elements(meta))
    leak_check.rebase()
    (tmp_path / "w/c.1.0").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"tensor model/weight, chunk \(1, 0\): .*/w/c\.1\.0 is missing"):
        read_all(tmp_path, meta)


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
def test_every_flipped_bit_is_found(tmp_path: Path, meta: ArrayMeta) -> None:
    array = elements(meta)
    write_array(TensorStoreChunkWriter(str(tmp_path)), meta, "w", array)
    file = tmp_path / "w/c.1.0"
    content = file.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=r"tensor model/weight, chunk \(1, 0\): .*/w/c\.1\.0 .*offset"):
            verify_chunk(str(tmp_path), "w", meta, (1, 0), "model/weight")
        if position % 8 == 0:
            with pytest.raises(CheckpointCorruptError, match=r"model/weight, chunk \(1, 0\): .*/w/c\.1\.0 .*offset"):
                read_all(tmp_path, meta)
    file.write_bytes(content)
    read_all(tmp_path, meta)


@pytest.mark.parametrize("meta", METAS.values(), ids=METAS)
def test_every_truncation_is_found(tmp_path: Path, meta: ArrayMeta) -> None:
    write_array(TensorStoreChunkWriter(str(tmp_path)), meta, "w", elements(meta))
    file = tmp_path / "w/c.1.0"
    for size in reversed(range(file.stat().st_size)):
        os.truncate(file, size)
        with pytest.raises(CheckpointCorruptError, match=r"w/c\.1\.0"):
            verify_chunk(str(tmp_path), "w", meta, (1, 0), "model/weight")
    with pytest.raises(CheckpointCorruptError, match=r"w/c\.1\.0"):
        read_all(tmp_path, meta)


def test_a_valid_file_with_other_content_has_another_checksum(tmp_path: Path) -> None:
    for meta in (PLAIN, SHARDED):
        one, two = write_array(DirectChunkWriter(str(tmp_path)), meta, f"w{meta.sharded}", elements(meta))
        os.replace(tmp_path / two.file, tmp_path / one.file)
        found = verify_chunk(str(tmp_path), f"w{meta.sharded}", meta, (0, 0), "w")
        assert found != one
        assert found.crc32c == two.crc32c


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
    with pytest.raises(ValueError, match="model/weight"):
        ArrayReader(str(tmp_path)).read_into(PLAIN, "w", "model/weight", offset, np.empty(shape, dtype))
