"""references.json: fsspec and zarr-python read a step without this package, whatever its layout and size."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.compression import Compression
from ckpt.storage.documents import encode_document
from ckpt.storage.pack_index import PackIndex, Region, StoredArray
from ckpt.storage.zarr_names import array_names, references
from tests.ckpt.interop import read_references
from tests.ckpt.interop.by_hand import WORLD_SIZE, layouts, write_step
from tests.ckpt.interop.standalone_reader import Step
from tests.support.calls import count_calls


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = layouts()
    path = tmp_path_factory.mktemp("references") / "step_00000001"
    write_step(path, made.index, made.contents, WORLD_SIZE)
    return path


def _read(step: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", read_references.__file__, str(step), str(output), *options]
    return subprocess.run(command, cwd=output.parent, capture_output=True, text=True, timeout=50, check=False)


def test_every_layout_is_read(step: Path, tmp_path: Path) -> None:
    result = _read(step, tmp_path / "found.npz")
    assert result.returncode == 0, result.stderr
    made = layouts()
    names = dict(zip(array_names(made.index), made.contents, strict=True))
    with np.load(tmp_path / "found.npz") as found:
        assert set(found) == set(names)
        wrong = [name for name, values in names.items() if found[name].tobytes() != values.tobytes()]
    assert not wrong


def test_the_standalone_reader_reads_them_too(step: Path) -> None:
    found = Step(step).tensors()
    made = layouts()
    whole = [(array, values) for array, values in zip(made.arrays, made.contents, strict=True) if array.is_whole]
    assert len(found) == len(whole) + 1
    for array, values in whole:
        assert found[array.path, array.rank] == (array.meta.dtype, list(array.meta.shape), values.tobytes())
    boxes = [values for array, values in zip(made.arrays, made.contents, strict=True) if not array.is_whole]
    assert found[("boxes",), None] == ("uint8", [10, 3], np.concatenate(boxes).tobytes())


def test_a_reader_that_ignores_gen_finds_nothing(step: Path, tmp_path: Path) -> None:
    result = _read(step, tmp_path / "found.npz", "simple")
    if result.returncode == 0:  # some versions of fsspec evaluate it all the same
        assert _read(step, tmp_path / "right.npz").returncode == 0
        with np.load(tmp_path / "found.npz") as found, np.load(tmp_path / "right.npz") as right:
            assert set(found) == set(right)
            assert all(np.array_equal(found[name], right[name]) for name in right)
        return
    assert "GroupNotFoundError" in result.stderr


def test_a_flipped_bit_is_an_error(step: Path, tmp_path: Path) -> None:
    pack = step / "packs/000/rank_00002_000"
    data = pack.read_bytes()
    try:
        pack.write_bytes(data[:5] + bytes([data[5] ^ 8]) + data[6:])
        result = _read(step, tmp_path / "found.npz")
    finally:
        pack.write_bytes(data)
    assert result.returncode != 0
    assert "checksum" in result.stderr


def test_compressed_arrays_are_left_out() -> None:
    meta = ArrayMeta((4,), "int8", (2,), compression=Compression())
    array = StoredArray(0, ("a", "b"), meta, 0, 0, (0,), (4,))
    refs = _expanded(PackIndex((array,), (_region([0, 1], [0, 0], [0, 0]),)))
    assert refs == {"step/zarr.json": ["./zarr.json"]}


def test_regular_regions_are_one_formula_for_each_array() -> None:
    """Also those of meshes whose dimensions are in another order than those of the tensor."""
    made = layouts()
    listed = [key for key, ref in json.loads(references(made.index))["refs"].items() if isinstance(ref, list)]
    few = ("irregular/", "replicated/", "scalar/", "own/", "boxes/", "two%20chunks%20each/c.6.0")
    assert not [key for key in listed if not key.removeprefix("step/").startswith(few)]


@st.composite
def _indices(draw: st.DrawFn) -> PackIndex:
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    inner = tuple(draw(st.integers(1, 2)) for _ in grid)
    chunk = tuple(size * draw(st.integers(1, 3)) for size in inner)
    shape = tuple(n * size - draw(st.integers(0, size - 1)) for n, size in zip(grid, chunk, strict=True))
    meta = ArrayMeta(shape, draw(st.sampled_from(["uint8", "bits16"])), chunk, draw(st.sampled_from([inner, None])))
    copies = math.prod(grid)
    columns = [
        draw(
            st.one_of(
                st.lists(st.integers(0, 3), min_size=copies, max_size=copies).map(
                    lambda values: [300 * v for v in values]
                ),
                st.tuples(*(st.integers(0, 400) for _ in grid)).map(lambda by: _linear(grid, by)),
            )
        )
        for _ in range(3)
    ]
    array = StoredArray(0, ("a",), meta, 0, 16 * draw(st.integers(0, 3)), (0,) * len(shape), shape)
    return PackIndex((array,), (_region(*columns),))


def _linear(grid: tuple[int, ...], by: tuple[int, ...]) -> list[int]:
    return [sum(i * step for i, step in zip(position, by, strict=True)) for position in np.ndindex(*grid)]


@given(_indices())
def test_references_are_where_the_index_says(index: PackIndex) -> None:
    expected: dict[str, Any] = {"step/zarr.json": ["./zarr.json"]}
    for name, array in array_names(index).items():
        for position in array.meta.chunk_indices():
            file, offset, nbytes = index.place(array, position)
            expected[f"step/{name}/{array.meta.chunk_key(position)}"] = [f"./{file}", offset, nbytes]
    assert _expanded(index) == expected


def _region(ranks: list[int], files: list[int], starts: list[int]) -> Region:
    return Region(*(np.array(column, np.int64) for column in (ranks, files, starts)))


def _expanded(index: PackIndex) -> dict[str, Any]:
    """Return all references but the metadata, as the specification says."""
    manifest = json.loads(references(index))
    assert (manifest["version"], manifest["templates"]) == (1, {"step": "."})
    found = {key: [ref[0].replace("{{step}}", "."), *ref[1:]] for key, ref in manifest["refs"].items() if ref[0] != "{"}
    environment = jinja2.sandbox.SandboxedEnvironment()
    for entry in manifest["gen"]:
        names = [name for name in ("key", "url", "offset", "length") if name in entry]
        templates = [environment.from_string(entry[name]) for name in names]
        dimensions = {name: range(loop["stop"]) for name, loop in entry["dimensions"].items()}
        for values in product(*dimensions.values()):
            variables = dict(zip(dimensions, values, strict=True))
            key, url, *numbers = (template.render(step=".", **variables) for template in templates)
            assert key not in found
            found[key] = [url, *map(int, numbers)]
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_thousands_of_ranks(transposed: bool) -> None:
    """4,096 ranks with 2,160 tensors, in 16 files each: the manifest grows with neither ranks nor files."""
    ranks = [i + 64 * j for i in range(64) for j in range(64)] if transposed else list(range(4096))
    shape, chunk, inner = ((256, 512), (4, 8), (1, 8)) if transposed else ((16384, 512), (4, 512), (1, 512))
    regions = tuple(_region(ranks, [file] * 4096, [0] * 4096) for file in range(16))
    meta = ArrayMeta(shape, "float32", chunk, inner)
    size = -(-meta.encoded_bytes((0, 0)) // 16) * 16
    arrays = tuple(
        StoredArray(
            n, ("model", f"layers.{n // 12}.attention.weight_{n % 12}"), meta, n % 16, n // 16 * size, (0, 0), shape
        )
        for n in range(2160)
    )
    index = PackIndex(arrays, regions)
    data, calls = count_calls(references, index)
    assert calls < 500 * len(arrays)
    assert len(data) + len(encode_document(index.to_document())) < 3 << 20
    manifest = json.loads(data)
    assert len(manifest["gen"]) == 2161
    assert all(isinstance(ref, str) for ref in manifest["refs"].values())
