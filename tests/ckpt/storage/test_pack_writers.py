"""Files of a pack: they hold encoded chunks that standard readers decode, whoever computed the checksums."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.core.dtype import data_type_registry

from ckpt.errors import StorageError
from ckpt.storage import dtypes, zarr_plugin
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.compression import Compression
from ckpt.storage.names import pack_file
from ckpt.storage.pack_index import ALIGNMENT
from ckpt.storage.pack_writers import PackWriter, WrittenFile
from tests.ckpt.storage.chunks import CASES, Case, bits, elements, job
from tests.ckpt.storage.conftest import Mount
from tests.support import LeakCheck
from tests.support.seeds import random_bytes

FULL = [case for case in CASES if 0 not in case.meta.shape]


def write(root: Path, meta: ArrayMeta, array: Any, **options: Any) -> tuple[WrittenFile, bytes, dict[str, bytes]]:
    """Write all chunks of an array as file 3 of rank 700; return it, its bytes, and each chunk by its Zarr key."""
    file, chunks = job(meta, array, number=3, **options)
    writer = PackWriter(str(root), 700)
    written = writer.write(file)
    writer.finish()
    content = (root / pack_file(700, 3)).read_bytes()
    places = {copy: (at, nbytes) for _, copy, at, nbytes in written.chunks}
    encoded = {}
    for copy, (index, offset, nbytes) in enumerate(chunks):
        at, size = places.get(copy, (offset, nbytes))
        assert at % ALIGNMENT == 0
        encoded[meta.chunk_key(index)] = content[at : at + size]
    return written, content, encoded


def read_with_tensorstore(meta: ArrayMeta, chunks: dict[str, bytes]) -> Any:
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": meta.array_document()}
    spec |= {"fill_missing_data_reads": False}
    store = ts.open(spec, create=True).result()
    for key, data in chunks.items():
        store.kvstore.write(key, data).result()
    return store.read().result()


@pytest.mark.parametrize("case", FULL, ids=str)
def test_chunks_are_those_of_zarr(tmp_path: Path, case: Case) -> None:
    array = elements(case.meta)
    written, content, chunks = write(tmp_path, case.meta, array)
    assert written.nbytes == len(content)
    read = read_with_tensorstore(case.meta, chunks)
    assert read.dtype == array.dtype
    assert bits(read) == bits(array)


@pytest.mark.parametrize("case", FULL, ids=str)
def test_it_makes_no_difference_who_computed_a_checksum(tmp_path: Path, case: Case) -> None:
    array = elements(case.meta)
    results = []
    for checksummed in (0, 1, 10**6):
        root = tmp_path / str(checksummed)
        root.mkdir()
        results.append(write(root, case.meta, array, checksummed=checksummed))
    assert results[0] == results[1] == results[2]


def test_the_checksum_tells_contents_apart(tmp_path: Path) -> None:
    seen = set()
    for case in FULL:
        for seed in (1, 2):
            root = tmp_path / f"{case}{seed}"
            root.mkdir()
            seen.add(write(root, case.meta, elements(case.meta, seed=seed))[0].crc32c)
    assert len(seen) == 2 * len(FULL)


@pytest.mark.parametrize("inner", [None, (10, 100)], ids=["plain", "sharded"])
def test_compressed_chunks(tmp_path: Path, inner: tuple[int, ...] | None) -> None:
    meta = ArrayMeta((90, 100), "float32", (40, 100), inner, Compression())
    array = np.arange(9000, dtype=np.float32).reshape(90, 100)
    written, content, chunks = write(tmp_path, meta, array)
    assert [(number, copy) for number, copy, _, _ in written.chunks] == [(0, 0), (0, 1), (0, 2)]
    assert written.nbytes == len(content) < array.nbytes
    assert bits(read_with_tensorstore(meta, chunks)) == bits(array)
    if inner is None:
        checksums = b"".join(data[-4:] for data in chunks.values())
        assert written.crc32c == google_crc32c.value(checksums)


@pytest.mark.parametrize("inner", [(2 << 20,), None], ids=["small frames", "large frames"])
@pytest.mark.parametrize("file_system", [None, "ramfs"], ids=["direct", "buffered"])
def test_compressed_files_are_written_in_blocks(
    tmp_path: Path, file_system: str | None, inner: tuple[int] | None, mount: Mount
) -> None:
    """Also when a block fails: then all of them are written again."""
    meta = ArrayMeta((11 << 20,), "uint8", (6 << 20,), inner, Compression("lz4"))
    array = np.frombuffer(random_bytes(11 << 20), np.uint8)
    root = tmp_path if file_system is None else mount(file_system)
    file, chunks = job(meta, array, number=3)
    writer = PackWriter(str(root), 700)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def allow(error: StorageError) -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        failed.append(error)
        return True

    failed: list[StorageError] = []
    writer.tries_again = allow
    resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, limit[1]))
    try:
        written = writer.write(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    writer.finish()
    assert len(failed) == 1
    content = (root / pack_file(700, 3)).read_bytes()
    assert written.nbytes == len(content) > 11 << 20
    places = [(at, nbytes) for _, _, at, nbytes in written.chunks]
    keys = [meta.chunk_key(index) for index, _, _ in chunks]
    encoded = {key: content[at : at + nbytes] for key, (at, nbytes) in zip(keys, places, strict=True)}
    assert bits(read_with_tensorstore(meta, encoded)) == bits(array)


def test_does_not_bring_an_abandoned_save_back(tmp_path: Path) -> None:
    meta = CASES[0].meta
    with pytest.raises(StorageError, match="abandoned"):
        write(tmp_path / "gone", meta, elements(meta))
    assert not (tmp_path / "gone").exists()


def test_a_file_is_written_once_unless_files_are_reused(tmp_path: Path) -> None:
    meta = CASES[0].meta
    first, second = (job(meta, elements(meta, seed=seed))[0] for seed in (1, 2))
    PackWriter(str(tmp_path), 0).write(first)
    with pytest.raises(StorageError, match="rank_00000_000"):
        PackWriter(str(tmp_path), 0).write(second)
    reusing = PackWriter(str(tmp_path), 0, reuse=True)
    reusing.write(second)
    reusing.finish()
    assert (tmp_path / pack_file(0, 0)).read_bytes() == bytes(second.memory[: second.nbytes])


def test_disk_full(mount: Mount) -> None:
    root = mount("tmpfs", "size=1m")
    meta = ArrayMeta((2 << 20,), "uint8", (2 << 20,))
    with pytest.raises(StorageError, match=r"rank_00700_003.*full"):
        write(root, meta, elements(meta))


def test_without_o_direct(mount: Mount, leak_check: LeakCheck) -> None:
    meta = ArrayMeta((3000, 5), "float32", (1000, 5))
    array = elements(meta)
    _, _, chunks = write(mount("ramfs"), meta, array)
    assert bits(read_with_tensorstore(meta, chunks)) == bits(array)


@pytest.fixture
def registered_plugin() -> None:
    zarr_plugin.register()


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
    ours = {found._zarr_v3_name for found in vars(zarr_plugin).values() if hasattr(found, "_zarr_v3_name")}
    native = {name for name in dtypes.names() if not dtypes.stored(name).raw}
    assert ours == native - (set(data_type_registry.contents) - ours)


def test_imports_are_cheap() -> None:
    code = """
import importlib, sys
for name in ("files", "directories", "pack_writers", "chunk_reader", "zarr_plugin"):
    importlib.import_module(f"ckpt.storage.{name}")
    assert not {"torch", "tensorstore"} & set(sys.modules), name
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
