"""Both chunk writers conform, and standard readers read what they write."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.core.dtype import data_type_registry

from ckpt.errors import StorageError
from ckpt.storage import dtypes, zarr_plugin
from ckpt.storage.array_metadata import ArrayMeta, group_document, groups, root_document
from ckpt.storage.chunk_codec import verify_chunk
from ckpt.storage.chunk_writers import ChunkJob, ChunkWriter, DirectChunkWriter, TensorStoreChunkWriter
from ckpt.storage.documents import canonical_json
from tests.ckpt.storage.chunks import CASES, Case, bits, elements, staged, write_array
from tests.ckpt.storage.conftest import Mount
from tests.support import LeakCheck

NewWriter = Callable[[str], ChunkWriter]
WRITERS: dict[str, NewWriter] = {"direct": DirectChunkWriter, "tensorstore": TensorStoreChunkWriter}


def files_of(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.mark.parametrize("new_writer", WRITERS.values(), ids=WRITERS)
class TestChunkWriter:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_writes_what_it_says(self, tmp_path: Path, new_writer: NewWriter, case: Case) -> None:
        written = write_array(new_writer(str(tmp_path)), case.meta, "m/w", elements(case.meta))
        assert {chunk.file for chunk in written} == set(files_of(tmp_path))
        for chunk, index in zip(written, case.meta.chunk_indices(), strict=True):
            assert verify_chunk(str(tmp_path), "m/w", case.meta, index, "m/w") == chunk

    def test_the_checksum_tells_contents_apart(self, tmp_path: Path, new_writer: NewWriter) -> None:
        for case in CASES:
            if case.meta.shape != (0, 5):
                seen = [
                    write_array(new_writer(str(tmp_path)), case.meta, f"{case}/{seed}", elements(case.meta, seed=seed))
                    for seed in (1, 2)
                ]
                assert [chunk.crc32c for chunk in seen[0]] != [chunk.crc32c for chunk in seen[1]]

    def test_does_not_bring_an_abandoned_save_back(self, tmp_path: Path, new_writer: NewWriter) -> None:
        meta = CASES[0].meta
        with pytest.raises(StorageError, match="abandoned"):
            write_array(new_writer(str(tmp_path / "gone")), meta, "w", elements(meta))
        assert not (tmp_path / "gone").exists()

    def test_does_not_leave_the_save(self, tmp_path: Path, new_writer: NewWriter) -> None:
        (tmp_path / "save").mkdir()
        meta = CASES[0].meta
        with pytest.raises(StorageError, match="below"):
            write_array(new_writer(str(tmp_path / "save")), meta, "../w", elements(meta))
        assert os.listdir(tmp_path) == ["save"]

    def test_disk_full(self, mount: Mount, new_writer: NewWriter) -> None:
        root = mount("tmpfs", "size=1m")
        meta = ArrayMeta((2 << 20,), "uint8", (2 << 20,))
        with pytest.raises(StorageError, match=r"w/c\.0"):
            write_array(new_writer(str(root)), meta, "w", elements(meta))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ways_leave_the_same_files(tmp_path: Path, case: Case) -> None:
    results = []
    for name, new_writer in WRITERS.items():
        root = tmp_path / name
        root.mkdir()
        written = write_array(new_writer(str(root)), case.meta, "w", elements(case.meta))
        results.append((written, files_of(root)))
    assert results[0] == results[1]


def test_zeros_are_stored(tmp_path: Path) -> None:
    meta = ArrayMeta((8, 6), "float32", (8, 6), (2, 3))
    for name, new_writer in WRITERS.items():
        write_array(new_writer(str(tmp_path)), meta, name, np.zeros((8, 6), np.float32))
    first, second = files_of(tmp_path).values()
    assert first == second
    assert len(first) == meta.layout((0, 0)).file_bytes


def test_compressed_chunks(tmp_path: Path) -> None:
    for name, inner in (("plain", None), ("sharded", (10, 100))):
        meta = ArrayMeta((90, 100), "float32", (40, 100), inner, "zstd")
        array = np.arange(9000, dtype=np.float32).reshape(90, 100)
        written = write_array(TensorStoreChunkWriter(str(tmp_path)), meta, name, array)
        for chunk, index in zip(written, meta.chunk_indices(), strict=True):
            assert chunk.file_bytes < meta.layout(index).file_bytes
            assert verify_chunk(str(tmp_path), name, meta, index, name) == chunk
        with pytest.raises(ValueError, match="tensorstore"):
            DirectChunkWriter(str(tmp_path)).write(ChunkJob(meta, "x", (0, 0), staged(meta, (0, 0), array)))


def test_without_o_direct(mount: Mount, leak_check: LeakCheck) -> None:
    root = mount("ramfs")
    meta = ArrayMeta((3000, 5), "float32", (1000, 5))
    written = write_array(DirectChunkWriter(str(root)), meta, "w", elements(meta))
    assert [verify_chunk(str(root), "w", meta, index, "w") for index in meta.chunk_indices()] == written


def test_other_stores_than_files() -> None:
    meta = ArrayMeta((5, 7), "int16", (6, 6), (2, 3), "zstd")
    chunk, _ = write_array(TensorStoreChunkWriter("memory://save"), meta, "w", elements(meta))
    assert chunk.file == "w/c.0.0"
    assert chunk.file_bytes > 0


def write_step(root: Path, arrays: dict[str, tuple[ArrayMeta, Any]]) -> None:
    metas = {directory: meta for directory, (meta, _) in arrays.items()}
    for directory, (meta, array) in arrays.items():
        (root / directory).mkdir(parents=True)
        (root / directory / "zarr.json").write_bytes(meta.document_bytes)
        write_array(DirectChunkWriter(str(root)), meta, directory, array)
    for group in groups(metas):
        (root / group / "zarr.json").write_bytes(canonical_json(group_document()))
    (root / "zarr.json").write_bytes(canonical_json(root_document(metas, {"step": 1})))


def native_cases() -> dict[str, tuple[ArrayMeta, Any]]:
    return {f"model/{case}": (case.meta, elements(case.meta)) for case in CASES}


def test_tensorstore_reads_it(tmp_path: Path) -> None:
    arrays = native_cases()
    write_step(tmp_path, arrays)
    for directory, (_, array) in arrays.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/{directory}"}}
        read = ts.open(spec).result().read().result()
        assert read.dtype == array.dtype
        assert bits(read) == bits(array)


@pytest.fixture
def registered_plugin() -> None:
    zarr_plugin.register()


@pytest.mark.usefixtures("registered_plugin")
@pytest.mark.parametrize("consolidated", [True, False])
def test_zarr_python_reads_it(tmp_path: Path, consolidated: bool) -> None:
    arrays = native_cases()
    write_step(tmp_path, arrays)
    group = zarr.open_group(str(tmp_path), mode="r", use_consolidated=consolidated)
    assert dict(group.attrs) == {"ckpt": {"step": 1}}
    for directory, (_, array) in arrays.items():
        read = np.asarray(group[directory][...])  # type: ignore[index]
        assert read.dtype == array.dtype
        assert bits(read) == bits(array)


@pytest.mark.usefixtures("registered_plugin")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # zarr-python compares nan with the fill value
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_zarr_python_writes_the_types_of_the_plugin(tmp_path: Path, name: str) -> None:
    array = elements(ArrayMeta((300,), name, (300,)))
    zarr.create_array(str(tmp_path / "a"), data=array)
    assert bits(np.asarray(zarr.open_array(str(tmp_path / "a"), mode="r")[...])) == bits(array)
    data_type = data_type_registry.contents[name]()
    for scalar in array:
        encoded = data_type.to_json_scalar(scalar, zarr_format=3)
        assert np.asarray(data_type.from_json_scalar(encoded, zarr_format=3)).tobytes() == scalar.tobytes()
    with pytest.raises(TypeError):
        data_type.cast_scalar("x")


def test_the_plugin_covers_all_native_types_that_zarr_python_lacks() -> None:
    ours = {getattr(zarr_plugin, name)._zarr_v3_name for name in zarr_plugin.__all__ if name != "register"}
    native = {name for name in dtypes.names() if dtypes.native_name(name)}
    assert ours == native - (set(data_type_registry.contents) - ours)


@pytest.mark.parametrize("module", ["chunk_writers", "chunk_reader", "zarr_plugin", "files", "directories"])
def test_import_is_cheap(module: str) -> None:
    code = f"import sys, ckpt.storage.{module}; sys.exit('torch' in sys.modules or 'tensorstore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
