"""The database of a step: plain tensorstore reads every array, whatever its dtype, layout and name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.saving.for_readers import database_files
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.documents import canonical_json
from ckpt.storage.names import MANIFEST, NODES, pack_file
from ckpt.storage.ocdbt import database
from ckpt.storage.pack_index import PackIndex, Region, StoredArray
from ckpt.storage.zarr_entries import Hierarchy
from ckpt.storage.zarr_names import array_document, array_names, array_texts
from ckpt.validation import validate
from tests.ckpt.interop import read_database, states
from tests.ckpt.interop.by_hand import WORLD_SIZE, Layouts, layouts, write_step
from tests.ckpt.interop.conftest import Saved
from tests.support import run_ranks
from tests.support.calls import count_calls
from tests.support.selection import FULL
from tools.inspect_ckpt.__main__ import main

Found = dict[str, tuple[dict[str, Any], bytes]]
"""The metadata and the bytes of each array, by its name."""


def read(folder: Path, *bases: str) -> list[Found]:
    """Return the findings of plain tensorstore."""
    command = [sys.executable, "-I", read_database.__file__, str(folder), *bases]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr
    found: list[Found] = []
    for number in range(len(bases)):
        about = json.loads((folder / f"{number}.json").read_bytes())
        with np.load(folder / f"{number}.npz") as data:
            found.append({name: (node, data[name].tobytes()) for name, node in about.items()})
    return found


@pytest.fixture(scope="module")
def found(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    bases = [f"file://{step}/" for step in saved.steps.values()]
    return dict(zip(saved.steps, read(tmp_path_factory.mktemp("found"), *bases), strict=True))


@pytest.mark.parametrize("name", ["plain", "large", "zstd"])
def test_every_dtype_and_every_name(found: dict[str, Found], name: str) -> None:
    left = {**found[name]}
    for rank in range(2):
        assert left.pop(f"own/__rank_{rank:05d}")[1] == states.bytes_of(torch.full((800,), rank))
    expected = {(kind, key): tensor for kind, of in states.many_dtypes().items() for key, tensor in of.items()}
    assert len(left) == len(expected)
    assert any(node["codecs"][0]["name"] == "sharding_indexed" for node, _ in left.values())
    for node, data in left.values():
        kind, key = node["attributes"]["ckpt"]["name"]
        assert data == states.bytes_of(expected[kind, key]), (kind, key)


def test_every_layout(found: dict[str, Found], saved: Saved) -> None:
    """Also boxes that are arrays of their own."""
    whole: dict[tuple[str | int, ...], np.ndarray[Any, Any]] = {}
    boxes = 0
    for node, data in found["layouts"].values():
        about = node["attributes"]["ckpt"]
        path = tuple(about["name"])
        if "rank" in about:
            assert data == states.bytes_of(torch.full((about["rank"] + 5, 3), float(about["rank"])))
            continue
        part = np.frombuffer(data, np.dtype(("V", np.dtype(node["data_type"]).itemsize))).reshape(node["shape"])
        if "box_offset" not in about:
            whole[path] = part
            continue
        boxes += 1
        tensor = whole.setdefault(path, np.zeros(about["tensor_shape"], part.dtype))
        tensor[tuple(slice(o, o + n) for o, n in zip(about["box_offset"], part.shape, strict=True))] = part
    assert boxes
    expected = {path: data for path, (_, _, data) in saved.layouts.items() if path not in (("own",), ("again",))}
    assert {path: tensor.tobytes() for path, tensor in whole.items()} == expected


@pytest.mark.parametrize("node_bytes", [1 << 18, 2000, 300])
def test_layouts_of_many_ranks_in_trees_of_every_height(tmp_path: Path, node_bytes: int) -> None:
    made, step = layouts(), tmp_path / "step_00000001"
    write_step(step, made.index, made.contents, WORLD_SIZE)
    manifest, nodes = database(Hierarchy.of(made.index).entries(), node_bytes)
    (step / MANIFEST).write_bytes(manifest)
    (step / NODES).write_bytes(nodes)
    (version,) = ts.ocdbt.dump(ts.KvStore.open(f"file://{step}/").result()).result()["versions"]
    assert version["root_height"] == {1 << 18: 0, 2000: 1, 300: 2}[node_bytes]
    (found,) = read(tmp_path, f"file://{step}/")
    names = array_names(made.index)
    assert {name: data for name, (_, data) in found.items()} == {
        name: values.tobytes() for name, values in zip(names, made.contents, strict=True)
    }


def _values(step: Path, name: str) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = ts.open(f"file://{step}/|ocdbt:{name}|zarr3:").result().read().result()
    return found


def test_a_converted_step(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(12.0)}, tmp_path / "model.pt")
    assert main(["convert", str(tmp_path / "model.pt"), str(tmp_path / "root")]) == 0
    (step,) = (tmp_path / "root").glob("step_*")
    assert np.array_equal(_values(step, "w"), np.arange(12.0))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_step_over_the_limit(tmp_path: Path, compression: str | None) -> None:
    """It says why it has no database, and has one after `inspect_ckpt index`, which disturbs no reader."""
    state = {"a": torch.arange(7.0), "b": torch.arange(3), "n": 1}
    staging = ckpt.Staging(database_chunks=1, compression=compression)
    with ckpt.Checkpointer(tmp_path, staging=staging) as checkpointer:
        checkpointer.save(state, 1)
    step = tmp_path / "step_00000001"
    summary = json.loads((step / "zarr.json").read_bytes())["attributes"]["ckpt"]
    assert summary["without_ocdbt"] == "2 chunks are more than 1: inspect_ckpt index makes it"
    assert not {MANIFEST, NODES} & {path.name for path in step.iterdir()}
    assert validate(str(step)).whole
    with ckpt.open(step) as checkpoint:
        assert main(["index", str(step)]) == 0
        assert np.array_equal(checkpoint["b"][:], np.arange(3))
    assert np.array_equal(_values(step, "a"), np.arange(7.0))
    assert validate(str(step)).whole
    assert main(["index", str(tmp_path)]) == 0
    assert ckpt.load(tmp_path)["n"] == 1


def save_on_nodes(rank: int, world_size: int, folder: Path) -> None:
    own = {"own": ckpt.PerRank(torch.full((3000,), rank))}
    for name, state in (("nodes", own), ("common", {})):
        mirror = ckpt.Mirror(folder / name / "mirror", close_timeout=timedelta(seconds=40))
        disk = folder / name / f"disk{rank}"
        with ckpt.Checkpointer(folder / name / "root", node_local=disk, mirror=mirror) as checkpointer:
            checkpointer.save({"common": torch.arange(5), **state}, 1)


@pytest.mark.timeout(120)
def test_files_on_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A database needs one base: all files in the root, or a copy in a mirror, which can be indexed."""
    run_ranks(save_on_nodes, 2, tmp_path)
    for place in ("root", "mirror"):
        assert np.array_equal(_values(tmp_path / "common" / place / "step_00000001", "common"), np.arange(5))
    root, copy = (tmp_path / "nodes" / place / "step_00000001" for place in ("root", "mirror"))
    for step in (root, copy):
        summary = json.loads((step / "zarr.json").read_bytes())["attributes"]["ckpt"]
        assert summary["without_ocdbt"].startswith("pack files are on the disks of nodes")
    assert main(["index", str(root)]) == 2
    assert "index a copy of the step in a mirror" in capsys.readouterr().err
    assert main(["index", str(copy)]) == 0
    assert validate(str(copy)).whole
    for rank in range(2):
        assert (_values(copy, f"own/__rank_{rank:05d}") == rank).all()


def many(count: int) -> PackIndex:
    """Return the index of a step with a file that has arrays with two chunks of two bytes."""
    meta = ArrayMeta((3,), "uint8", (2,))
    arrays = tuple(StoredArray(n, ("layers", n, "weight"), meta, 0, 16 * n, (0,), (3,)) for n in range(count))
    places = np.array([0, 0]), np.array([0, 1]), np.array([0, 0])
    return PackIndex(arrays, (Region(*places),))


def test_many_arrays(tmp_path: Path) -> None:
    """Nodes of which there are many are compressed."""
    count = 100_000 if FULL else 3000
    index = many(count)
    files = database_files(Hierarchy.of(index))
    assert len(files[NODES]) < 40 * count
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for number in range(2):
        file = tmp_path / pack_file(0, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        chunks = np.zeros((count, 16), np.uint8)
        chunks[:, :4] = np.arange(count, dtype="<u4")[:, np.newaxis].view(np.uint8)
        file.write_bytes(chunks.tobytes())
    store = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    assert len(store.list().result()) == 3 * count + count + 2
    for n in (0, 1, 777, count - 1):
        for number in range(2):
            assert store[f"layers/{n}/weight/c.{number}"][:4] == n.to_bytes(4, "little")
        assert store[f"layers/{n}/weight/zarr.json"] == canonical_json(
            array_document(f"layers/{n}/weight", index.arrays[n])
        )


def test_nodes_that_cannot_be_compressed(tmp_path: Path) -> None:
    manifest, nodes = database(Hierarchy.of(many(3000)).entries(), compress=lambda body: None)
    (tmp_path / MANIFEST).write_bytes(manifest)
    (tmp_path / NODES).write_bytes(nodes)
    store = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    assert len(store.list().result()) == 3 * 3000 + 3000 + 2


def test_metadata_that_tensorstore_refuses(tmp_path: Path) -> None:
    """A name of a megabyte: there is no database, and a save succeeds."""
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"a" * (1 << 20): torch.ones(3)}, 1)
    step = tmp_path / "step_00000001"
    summary = json.loads((step / "zarr.json").read_bytes())["attributes"]["ckpt"]
    assert summary["without_ocdbt"].startswith("the metadata of an array has 10")
    assert main(["index", str(step)]) == 1
    assert validate(str(step)).whole


def test_a_million_chunks_take_no_loop() -> None:
    ranks = np.arange(1 << 20)
    region = Region(ranks % 4096, np.zeros_like(ranks), ranks // 4096 * 48)
    meta = ArrayMeta((4 << 10, 4 << 10), "uint8", (4, 4))
    index = PackIndex((StoredArray(0, ("w",), meta, 0, 0, (0, 0), meta.shape),), (region,))
    files, calls = count_calls(database_files, Hierarchy.of(index))
    assert calls < 100_000, "4096 names of files, and some hundred nodes"
    assert len(files[NODES]) < 4 << 20


_KEYS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    st.sampled_from(["c", "c.0", "zarr.json", "", ".", "..", "a/b", "a b", "%", "0", "ü" * 100]),
    st.integers(-3, 12),
)


@st.composite
def _made(draw: st.DrawFn) -> Layouts:
    made = Layouts()
    paths = draw(st.lists(st.lists(_KEYS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6, unique=True))
    for path in paths:
        if any(path[: len(other)] == other or other[: len(path)] == path for other in paths if other != path):
            continue
        grid = draw(st.lists(st.sampled_from([0, 1, 2, 11, 12]), max_size=2))
        chunk = [draw(st.integers(1, 3)) for _ in grid]
        shape = [n * size - (draw(st.integers(0, size - 1)) if n else 0) for n, size in zip(grid, chunk, strict=True)]
        ranks = draw(st.lists(st.integers(0, 3), min_size=math.prod(grid), max_size=math.prod(grid)))
        starts = [64 * number for number in range(len(ranks))]
        dtype = draw(st.sampled_from(["uint8", "complex32", "bfloat16"]))
        made.add(path, tuple(shape), tuple(chunk), ranks, dtype=dtype, starts=starts)
    return made


@given(_made(), st.sampled_from([100, 1 << 18]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_all_names_and_shapes(tmp_path_factory: pytest.TempPathFactory, made: Layouts, node_bytes: int) -> None:
    step = tmp_path_factory.mktemp("named")
    write_step(step, made.index, made.contents, 4)
    manifest, nodes = database(Hierarchy.of(made.index).entries(), node_bytes)
    (step / MANIFEST).write_bytes(manifest)
    (step / NODES).write_bytes(nodes)
    names = array_names(made.index)
    texts = array_texts(names)
    keys = {f"{name}/zarr.json" for name in names} | {"zarr.json"}
    keys |= {
        f"{name}/{array.meta.chunk_key(chunk)}" for name, array in names.items() for chunk in array.meta.chunk_indices()
    }
    groups = {"/".join(name.split("/")[:depth]) for name in names for depth in range(1, name.count("/") + 1)}
    base = f"file://{step}/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    listed = [key.decode() for key in store.list().result()]
    assert sorted(listed) == sorted(keys | {f"{group}/zarr.json" for group in groups})
    for (name, array), values in zip(names.items(), made.contents, strict=True):
        assert texts[name] == store[f"{name}/zarr.json"] == canonical_json(array_document(name, array))
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        assert ts.open(spec).result().read().result().tobytes() == values.tobytes()
