"""`convert` makes steps of Zarr arrays that others wrote, in directories and OCDBT databases."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
import zarr

from ckpt import load, load_foreign
from ckpt.formats import tensorstore_arrays
from tests.tools.inspect_ckpt.commands import Commands, peak_growth

_NUMBERS = np.random.default_rng(0).standard_normal((37, 20), dtype=np.float32)


def write_array(
    kvstore: dict[str, Any],
    array: Any,
    chunks: tuple[int, ...],
    driver: str = "zarr",
    fill: float | None = None,
    **metadata: Any,
) -> None:
    """Write an array with tensorstore, all of its chunks."""
    grid = {"chunks": chunks}
    if driver == "zarr3":
        grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}}}
    spec = {
        "driver": driver,
        "kvstore": kvstore,
        "metadata": {"shape": array.shape, **grid, **metadata},
        "dtype": array.dtype.name,
        "schema": {} if fill is None else {"fill_value": fill},
        "store_data_equal_to_fill_value": True,
    }
    tensorstore.open(spec, create=True).result().write(array).result()


def file_store(path: Path, key: str = "") -> dict[str, Any]:
    return {"driver": "file", "path": f"{path / key}/"}


def ocdbt_store(path: Path, key: str, **options: Any) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": file_store(path), "path": f"{key}/", **options}


def converted(run: Commands, source: Path, root: Path, *options: str) -> Any:
    assert "all bits are equal" in run("convert", source, root, *options)
    return load(root)


def equal(tensor: Any, array: Any) -> bool:
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return tuple(tensor.shape) == array.shape and bits.tobytes() == np.ascontiguousarray(array).tobytes()


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_groups_of_zarr_python(run: Commands, tmp_path: Path, version: int) -> None:
    arrays: dict[str, Any] = {
        "w": _NUMBERS,
        "layers/0/kernel": _NUMBERS.astype(np.float16),
        "layers/0/größe ü": np.arange(9),
        "flags": np.array([True, False]),
        "no elements": np.empty((0, 4), np.int16),
        "scalar": np.array(7, np.uint8),
        "complex": (_NUMBERS * 1j).astype(np.complex64),
        "big endian": np.arange(5, dtype=">i4"),
    }
    group = zarr.open_group(tmp_path / "tree", mode="w", zarr_format=version)  # type: ignore[arg-type]
    for name, array in arrays.items():
        group.create_array(name, data=array, chunks=tuple(max(1, min(8, size)) for size in array.shape))
    group.create_array("fortran", data=_NUMBERS, chunks=(8, 8), **({"order": "F"} if version == 2 else {}))
    group.attrs["note"] = "left out"
    state = converted(run, tmp_path / "tree", tmp_path / "root")
    for name, array in arrays.items():
        node = state
        for key in name.split("/"):
            node = node[key]
        assert equal(node, array.astype(array.dtype.newbyteorder("="))), name
    assert equal(state["fortran"], _NUMBERS)
    assert set(state) == {*(name.split("/")[0] for name in arrays), "fortran"}


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
def test_what_tensorstore_writes(run: Commands, tmp_path: Path, driver: str, ocdbt: bool) -> None:
    """Arrays of all of jax's dtypes that torch has, without groups or anything that lists them."""
    store = ocdbt_store if ocdbt else file_store
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "uint32"]
    names += [] if driver == "zarr3" else ["float8_e4m3fnuz", "float8_e5m2fnuz"]
    for name in names:
        array = _NUMBERS.astype(getattr(ml_dtypes, name, name))
        write_array(store(tmp_path / "tree", f"a/{name} x"), array, (16, 20), driver)
    state = converted(run, tmp_path / "tree", tmp_path / "root", "--under", "model")
    for name in names:
        tensor = state["model"]["a"][f"{name} x"]
        assert str(tensor.dtype) == f"torch.{name}"
        assert equal(tensor, _NUMBERS.astype(getattr(ml_dtypes, name, name)))
    what = "an OCDBT database" if ocdbt else "a directory of Zarr arrays"
    assert "a/float8_e5m2 x" in run("show", tmp_path / "tree")
    for command in ("ls", "validate"):
        line = run.refused(command, tmp_path / "tree")
        assert f"tree is {what}, not a checkpoint of ckpt; to make a step of it: inspect_ckpt convert" in line


def test_large_arrays_are_read_in_pieces(run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to read: by a cache of one row of chunks, by one chunk after the other, and by a temporary file."""
    monkeypatch.setattr(tensorstore_arrays, "_ROW_BYTES", 1 << 20)
    monkeypatch.setattr(tensorstore_arrays, "_PIECE_BYTES", 1 << 20)
    array = np.arange(8_000_000, dtype=np.int32).reshape(4000, 2000)  # 32 MB, two chunks of a step
    for name, chunks in {"tiles": (90, 110), "columns": (4000, 500), "rows": (1500, 2000), "one": (4000, 2000)}.items():
        write_array(file_store(tmp_path / "tree", name), array, chunks)
    sharded = [
        {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": [100, 500], "codecs": [{"name": "bytes"}, {"name": "zstd"}]},
        }
    ]
    write_array(file_store(tmp_path / "tree", "sharded"), array, (2000, 1000), "zarr3", codecs=sharded)
    state = converted(run, tmp_path / "tree", tmp_path / "root")
    assert set(state) == {"tiles", "columns", "rows", "one", "sharded"}
    for name, tensor in state.items():
        assert torch.equal(tensor, torch.from_numpy(array)), name
    shutil.rmtree(tmp_path)


@pytest.mark.timeout(180)  # it moves much data, and a disk may be slow
def test_memory_is_for_one_chunk(tmp_path: Path) -> None:
    """Chunks are columns, and a step is written in rows: the array is neither held nor decoded for each of these."""
    array = np.broadcast_to(np.float32(3), (10000, 10000))  # 400 MB, which compress to little
    write_array(file_store(tmp_path / "tree", "w"), array, (10000, 1000), compressor={"id": "zstd", "level": 1})
    imports = ("ckpt.formats.torch_file", "ckpt.formats.zarr_tree")
    grown, _ = peak_growth(("convert", tmp_path / "tree", tmp_path / "root"), imports=imports)
    assert grown < 288 << 20
    shutil.rmtree(tmp_path)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_dtypes_that_torch_does_not_have(run: Commands, tmp_path: Path) -> None:
    write_array(file_store(tmp_path / "tree", "a/b"), np.ones((4, 4), ml_dtypes.int4), (4, 4))
    line = run.refused("convert", tmp_path / "tree", tmp_path / "root")
    assert "a/b is of dtype int4, which torch does not have" in line
    assert "cast it" in line
    zarr.create_array(tmp_path / "words" / "c", data=np.array(["a", "bc"]), zarr_format=2)
    assert "c cannot be read" in run.refused("convert", tmp_path / "words", tmp_path / "root", code=1)
    assert not (tmp_path / "root").exists()


def test_a_single_array(run: Commands, tmp_path: Path) -> None:
    write_array(file_store(tmp_path / "tree", "w"), _NUMBERS, (10, 20))
    line = run.refused("convert", tmp_path / "tree" / "w", tmp_path / "root")
    assert "is a single array, without a name; give the directory that contains it" in line


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
def test_chunks_that_are_not_stored(
    run: Commands, tmp_path: Path, caplog: pytest.LogCaptureFixture, driver: str, ocdbt: bool
) -> None:
    """They are the fill value, as Zarr says, and the user is told so; without a fill value they are missing."""
    kvstore = (ocdbt_store if ocdbt else file_store)(tmp_path / "tree", "w")
    write_array(kvstore, _NUMBERS, (10, 20), driver, fill=1.5)
    store = tensorstore.KvStore.open(kvstore).result()
    del store["c/1/0" if driver == "zarr3" else "1.0"]
    out = run("convert", tmp_path / "tree", tmp_path / "root")
    assert "w has chunks that are not stored: they are the fill value, 1.5" in out
    wanted = _NUMBERS.copy()
    wanted[10:20] = 1.5
    assert equal(load(tmp_path / "root")["w"], wanted)
    assert equal(load_foreign(tmp_path / "tree")["w"], wanted)
    assert "w has chunks that are not stored" in caplog.text


def test_a_missing_chunk_without_a_fill_value(run: Commands, tmp_path: Path) -> None:
    write_array(file_store(tmp_path / "tree", "w"), _NUMBERS, (10, 20))
    (tmp_path / "tree" / "w" / "1.0").unlink()
    line = run.refused("convert", tmp_path / "tree", tmp_path / "root", code=1)
    assert "a chunk of w is missing, and the array has no fill value" in line
    assert not list((tmp_path / "root").glob("step_*"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("w/zarr.json", b""),
        ("w/zarr.json", b'{"node_type": "array"}'),
        ("w/zarr.json", b'{"node_type": 7}'),
        ("w/zarr.json", b"[" * 100_000),
        ("w/c/1/0", b"too short"),
        ("w/c/1/0", b"\0" * 800),
    ],
)
def test_damage_names_the_array(run: Commands, tmp_path: Path, file: str, content: bytes) -> None:
    codecs = [{"name": "bytes"}, {"name": "crc32c"}]
    write_array(file_store(tmp_path / "tree", "w"), _NUMBERS, (10, 20), "zarr3", codecs=codecs)
    write_array(file_store(tmp_path / "tree", "v"), _NUMBERS, (10, 20), "zarr3")
    (tmp_path / "tree" / file).write_bytes(content)
    line = run.refused("convert", tmp_path / "tree", tmp_path / "root", code=1)
    assert "w cannot be read" in line or f"{file} is damaged" in line
    assert not list((tmp_path / "root").glob("step_*"))


@pytest.mark.parametrize(
    "more",
    [
        {"storage_transformers": [{"name": "exec", "configuration": {"command": "true"}}]},
        {"codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle"}]},
        {"kvstore": {"driver": "http", "base_url": "http://127.0.0.1:1"}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 36, 20]}}, "shape": [1 << 36, 20]},
        {"shape": [1 << 50, 20]},
    ],
    ids=["transformer", "codec", "kvstore", "huge chunks", "huge shape"],
)
def test_metadata_choose_no_code_and_no_place(run: Commands, tmp_path: Path, more: dict[str, Any]) -> None:
    write_array(file_store(tmp_path / "tree", "w"), _NUMBERS, (10, 20), "zarr3")
    file = tmp_path / "tree" / "w" / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    code = run.exit_code("convert", tmp_path / "tree", tmp_path / "root")
    assert code
    assert ": w " in run.err


@pytest.mark.parametrize("prefix", [b"../outside", b"././././a/", b"//////////"])
def test_data_files_outside_of_the_database(run: Commands, tmp_path: Path, prefix: bytes) -> None:
    """A manifest names its data files by path: one that leads out is refused, whatever lies there."""
    options = {"config": {"compression": None, "max_inline_value_bytes": 0}, "value_data_prefix": "inside/abc"}
    write_array(ocdbt_store(tmp_path / "db", "w", **options), _NUMBERS, (37, 20), compressor=None)
    assert equal(converted(run, tmp_path / "db", tmp_path / "root")["w"], _NUMBERS)
    for file in (tmp_path / "db" / "inside").iterdir():
        shutil.copy(file, tmp_path / file.name.replace("abc", "outside", 1))
    changed = 0
    for file in (tmp_path / "db" / "d").iterdir():  # the nodes, each with a checksum at its end
        data = file.read_bytes()
        if b"inside/abc" in data:
            body = data[:-4].replace(b"inside/abc", prefix)
            file.write_bytes(body + google_crc32c.value(body).to_bytes(4, "little"))
            changed += 1
    assert changed
    line = run.refused("convert", tmp_path / "db", tmp_path / "other", code=1)
    assert "w cannot be read" in line
    assert "Invalid key" in line


@pytest.mark.parametrize("file", ["manifest.ocdbt", "d"])
def test_damaged_databases(run: Commands, tmp_path: Path, file: str) -> None:
    write_array(ocdbt_store(tmp_path / "db", "w"), _NUMBERS, (37, 20))
    if file == "d":
        shutil.rmtree(tmp_path / "db" / "d")
    else:
        data = bytearray((tmp_path / "db" / file).read_bytes())
        data[40] ^= 1
        (tmp_path / "db" / file).write_bytes(data)
    assert f"{tmp_path / 'db'}: " in run.refused("convert", tmp_path / "db", tmp_path / "root", code=1)


def test_links_inside_of_the_directory(run: Commands, tmp_path: Path) -> None:
    write_array(file_store(tmp_path / "tree", "a/x"), _NUMBERS, (10, 20))
    (tmp_path / "tree" / "a" / "y").symlink_to("x")
    (tmp_path / "tree" / "a" / "around").symlink_to("..")  # there is no end to what is below
    state = load_foreign(tmp_path / "tree")
    assert set(state["a"]) == {"x", "y"}
    assert equal(state["a"]["y"], _NUMBERS)


def test_links_out_of_the_directory(run: Commands, tmp_path: Path) -> None:
    write_array(file_store(tmp_path / "other", "w"), _NUMBERS, (10, 20))
    write_array(file_store(tmp_path / "tree", "v"), _NUMBERS, (10, 20))
    (tmp_path / "tree" / "w").symlink_to(tmp_path / "other" / "w")
    line = run.refused("convert", tmp_path / "tree", tmp_path / "root")
    assert "tree/w is a link to" in line
    assert "--follow-links" in line
    state = converted(run, tmp_path / "tree", tmp_path / "root", "--follow-links")
    assert equal(state["w"], _NUMBERS)
    (tmp_path / "tree" / "w").unlink()
    chunk = tmp_path / "tree" / "v" / "1.0"
    chunk.rename(tmp_path / "chunk")
    chunk.symlink_to(tmp_path / "chunk")
    assert "v/1.0 is a link to" in run.refused("convert", tmp_path / "tree", tmp_path / "root", "--step", "1")
    chunk.unlink()
    os.mkfifo(chunk)  # to open it would wait
    assert "v/1.0 is not a regular file" in run.refused("convert", tmp_path / "tree", tmp_path / "root", "--step", "1")


# -- what a directory is -----------------------------------------------------------------------------------------------


def test_steps_and_roots_of_our_own(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    """A step is one, although its zarr.json is that of a group, and whatever another format would have beside it."""
    root = Path(shutil.copytree(saved["one"], tmp_path / "root"))
    step = sorted(root.glob("step_*"))[-1]
    assert (step / "manifest.ocdbt").exists()
    (step / "_METADATA").write_bytes(b"{}")
    for path in (root, step):
        assert "is already a checkpoint of ckpt" in run.refused("convert", path, tmp_path / "new")
    run("show", step)


def test_directories_without_arrays(run: Commands, tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "group", mode="w")
    assert "holds no array" in run.refused("convert", tmp_path / "group", tmp_path / "root")
    (tmp_path / "folder" / "below").mkdir(parents=True)
    assert "not a checkpoint" in run.refused("convert", tmp_path / "folder", tmp_path / "root")


def test_arrays_need_no_groups_above_them(run: Commands, tmp_path: Path) -> None:
    write_array(file_store(tmp_path / "tree", "a/b/c"), _NUMBERS, (10, 20))
    write_array(file_store(tmp_path / "tree", "a/parts"), _NUMBERS, (10, 20))
    state = converted(run, tmp_path / "tree", tmp_path / "root")
    assert equal(state["a"]["b"]["c"], _NUMBERS)
    assert equal(state["a"]["parts"], _NUMBERS)
    assert math.prod(state["a"]["parts"].shape) == _NUMBERS.size
