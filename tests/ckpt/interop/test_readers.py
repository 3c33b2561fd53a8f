"""Chunks are plain Zarr: three independent readers see the same bits, and detect every changed bit.

They share no code with this package or with each other, and get each chunk of a step as a file, as Zarr has it.

The readers are tensorstore (C++), zarr-python, and zarrs (Rust). Each runs in a process of its own, once for all tests.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ckpt.interop import foreign_readers, states
from tests.ckpt.interop.conftest import Saved

READERS = ("tensorstore", "zarr-python", "zarrs")

UNKNOWN_DTYPES = {
    "tensorstore": (),
    # It lacks the floats that numpy lacks, unless it has the data types of ckpt.storage.zarr_plugin.
    "zarr-python-plain": ("bfloat16", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "zarr-python": (),
    # Decodes all of them, but not into numpy arrays of ml_dtypes: here they are read as unsigned integers.
    "zarrs": (),
}
"""The dtypes that a reader cannot name. It says so when it opens an array of them. (docs/format.md has this, too.)"""

PLACES = (
    "nowhere",
    "element",
    "checksum",
    "inner element",
    "inner checksum",
    "index",
    "index checksum",
    "compressed element",
)


@dataclass(frozen=True)
class Read:
    """The arrays that a reader found in a step, by directory: numpy dtype, shape and bytes, or the error."""

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    errors: dict[str, str]


def _run(reader: str, folder: Path, steps: list[str]) -> list[Read]:
    output = folder / reader
    output.mkdir()
    command = [sys.executable, "-I", foreign_readers.__file__, reader, str(output), *steps]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr
    found = []
    for number in range(len(steps)):
        about = json.loads((output / f"{number}.json").read_bytes())
        with np.load(output / f"{number}.npz") as data:
            arrays = {name: (*_described(entry), data[name].tobytes()) for name, entry in about.items() if name in data}
        found.append(Read(arrays, {name: entry for name, entry in about.items() if name not in arrays}))
    return found


def _described(entry: list[Any]) -> tuple[str, tuple[int, ...]]:
    return entry[0], tuple(entry[1])


@pytest.fixture(scope="module")
def damaged(extracted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return for each of the PLACES a step with one bit flipped there, and the array with that bit."""
    return {place: _flipped(extracted, place, tmp_path_factory.mktemp("damaged")) for place in PLACES}


def _flipped(extracted: dict[str, Path], place: str, folder: Path) -> str:
    directory = "matrix/float32" if place.startswith("in") else "scalar/float32"
    step = extracted["zstd" if place.startswith("compressed") else "plain"]
    shutil.copy(step / "zarr.json", folder)
    shutil.copytree(step / directory, folder / directory)
    file = sorted((folder / directory).glob("c*"))[0]
    data = bytearray(file.read_bytes())
    codec = json.loads((step / directory / "zarr.json").read_bytes())["codecs"][0]
    assert (codec["name"] == "sharding_indexed") == (directory == "matrix/float32")
    inner_bytes = 4 * math.prod(codec["configuration"].get("chunk_shape", ()))
    offsets = {"nowhere": 0, "element": 1, "checksum": -2, "inner element": 5, "inner checksum": inner_bytes + 1}
    offsets |= {"index": -9, "index checksum": -2, "compressed element": len(data) // 2}
    data[offsets[place]] ^= 4 * (place != "nowhere")
    file.write_bytes(data)
    return f"{folder}::{directory}"


@pytest.fixture(scope="module")
def found(
    extracted: dict[str, Path], damaged: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Read]]:
    """Return what each reader found in each step; those with a flipped bit are named by its place."""
    names = [*extracted, *damaged]
    steps = [*map(str, extracted.values()), *damaged.values()]
    folder = tmp_path_factory.mktemp("found")
    plain = _run("zarr-python-plain", folder, steps[:1])
    return {
        **{reader: dict(zip(names, _run(reader, folder, steps), strict=True)) for reader in READERS},
        "zarr-python-plain": {"plain": plain[0]},
    }


@pytest.mark.parametrize("dtype", states.DTYPES)
@pytest.mark.parametrize("reader", [*READERS, "zarr-python-plain"])
def test_every_dtype_is_read_bit_for_bit(
    reader: str, dtype: str, found: dict[str, dict[str, Read]], extracted: dict[str, Path]
) -> None:
    """In shards, with chunks beyond the edge, without dimensions; with and without compression."""
    state = states.many_dtypes()
    for step in ("plain", "zstd") if reader in READERS else ("plain",):
        read, nodes = found[reader][step], _nodes(extracted[step])
        for kind in ("matrix", "cube", "row", "scalar"):
            name, tensor = f"{kind}/{dtype}", state[kind][dtype]
            if dtype in UNKNOWN_DTYPES[reader]:
                assert dtype in read.errors[name]
                continue
            actual_dtype, shape, data = read.arrays[name]
            assert data == states.bytes_of(tensor)
            stored = nodes[name]["data_type"]
            assert nodes[name]["attributes"].get("torch_dtype", stored) == dtype
            trailing = (tensor.itemsize,) if stored != dtype and tensor.itemsize > 1 else ()
            assert shape == (*tensor.shape, *trailing)
            as_bits = reader == "zarrs" and stored in foreign_readers.BIT_WIDTHS
            assert actual_dtype == (f"uint{8 * tensor.itemsize}" if as_bits else stored)


def _nodes(step: Path) -> dict[str, Any]:
    nodes: dict[str, Any] = json.loads((step / "zarr.json").read_bytes())["consolidated_metadata"]["metadata"]
    return nodes


@pytest.mark.parametrize("reader", READERS)
def test_nothing_else_goes_wrong(reader: str, found: dict[str, dict[str, Read]], extracted: dict[str, Path]) -> None:
    for step in extracted:
        assert not found[reader][step].errors


@pytest.mark.parametrize("reader", READERS)
def test_names_that_need_escapes(reader: str, found: dict[str, dict[str, Read]], extracted: dict[str, Path]) -> None:
    nodes = _nodes(extracted["plain"])
    left = dict(states.many_dtypes()["odd names"])
    for directory, (_, _, data) in found[reader]["plain"].arrays.items():
        group, *key = nodes[directory]["attributes"]["ckpt"]["name"]
        if group == "odd names":
            assert data == states.bytes_of(left.pop(key[0])), directory
    assert not left


@pytest.mark.parametrize("reader", READERS)
def test_tensors_divided_over_ranks(
    reader: str, found: dict[str, dict[str, Read]], saved: Saved, extracted: dict[str, Path]
) -> None:
    nodes = _nodes(extracted["layouts"])
    names = set()
    for directory, (_, shape, data) in found[reader]["layouts"].arrays.items():
        about = nodes[directory]["attributes"]["ckpt"]
        if "rank" not in about:
            names.add(tuple(about["name"]))
            assert (list(shape), data) == saved.layouts[tuple(about["name"])][1:], directory
    assert names == saved.layouts.keys() - {("own",), ("again",)}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_an_error(place: str, reader: str, found: dict[str, dict[str, Read]]) -> None:
    read = found[reader][place]
    if place == "nowhere":
        assert len(read.arrays) == 1
        return
    assert not read.arrays
    (error,) = read.errors.values()
    assert re.search("checksum|crc32c|digest|corruption|invalid blosc", error, re.IGNORECASE), error


def test_the_parts_say_what_is_there(saved: Saved) -> None:
    """Every pack file is in the manifest of its rank, with its size, and there are no other files."""
    step = saved.steps["plain"]
    listed = {}
    for rank in range(2):
        part = json.loads((step / "parts" / "000" / f"rank_{rank:05d}.json").read_bytes())
        listed |= {f"packs/000/rank_{rank:05d}_{number:03d}": nbytes for number, nbytes, _ in part["files"]}
    found = {str(path.relative_to(step)): path.stat().st_size for path in step.rglob("*") if path.is_file()}
    others = {f"parts/000/rank_{rank:05d}.json" for rank in range(2)}
    others |= {f"{name}.json" for name in ("zarr", "index", "state", "references", "intent")}
    others |= {"manifest.ocdbt", "ocdbt.nodes"}
    assert found.keys() - listed.keys() == others
    assert {name: found[name] for name in listed} == listed
    summary = json.loads((step / "zarr.json").read_bytes())["attributes"]["ckpt"]
    assert (summary["files"], summary["bytes"]) == (len(listed), sum(listed.values()))
