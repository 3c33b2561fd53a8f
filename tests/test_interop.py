"""A published step is plain Zarr: other readers, sharing no code with this package, see the same values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt import Checkpointer, PerRank
from tests.support import run_ranks

_TENSORSTORE = """
import json, sys
import numpy as np, tensorstore as ts
step, expected = sys.argv[1:]
for directory, values in np.load(expected).items():
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{step}/{directory}"}}
    store = ts.open(spec, open=True, read=True).result()
    data = np.asarray(store.read().result())
    if data.dtype.name == "bfloat16":
        data = data.view(np.uint16)
    assert data.dtype == values.dtype and data.shape == values.shape, (directory, data.dtype, data.shape)
    assert data.tobytes() == values.tobytes(), directory
assert not any(name == "ckpt" or name.startswith("ckpt.") for name in sys.modules)
"""

_ZARR = """
import json, sys, warnings
import numpy as np, zarr
step, expected = sys.argv[1:]
group = zarr.open_group(step, mode="r")
assert group.metadata.consolidated_metadata is not None
assert group.attrs["ckpt"]["step"] == 5 and group.attrs["ckpt"]["world_size"] == 2
expected = dict(np.load(expected))
members = dict(group.members(max_depth=None))
arrays = {name for name, member in members.items() if isinstance(member, zarr.Array)}
assert arrays == {*expected, "packed", "own/__rank_00000", "own/__rank_00001"}, arrays ^ set(expected)
for directory, values in expected.items():
    data = group[directory][...]
    assert data.dtype == values.dtype and data.shape == values.shape, (directory, data.dtype, data.shape)
    assert data.tobytes() == values.tobytes(), directory
"""


def _tensors(bfloat16: bool) -> dict[str, torch.Tensor]:
    """By directory in the step. zarr-python knows bfloat16 only where this package is installed."""
    generator = torch.Generator().manual_seed(4)

    def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)

    dtypes = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "c8": torch.complex64}
    dtypes |= {"u1": torch.uint8, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64}
    dtypes |= {"u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64} | (
        {"bf16": torch.bfloat16} if bfloat16 else {}
    )
    found = {f"model/{name}": bits(dtype, 37, 50) for name, dtype in dtypes.items()}
    found["model/bool"] = torch.rand(37, 50, generator=generator) > 0.5
    found["model/float8"] = bits(torch.float8_e4m3fn, 37, 50)
    found["model/layers/0/a%20b"] = bits(torch.float32, 3, 5, 41)
    found["model/row"] = bits(torch.float32, 1, 4001)
    return found


def _state(rank: int, bfloat16: bool) -> dict[str, object]:
    tensors = _tensors(bfloat16)
    model: dict[str, object] = {name.removeprefix("model/"): t for name, t in tensors.items() if name.count("/") == 1}
    model["layers"] = [{"a b": tensors["model/layers/0/a%20b"]}]
    return {"model": model, "small": torch.arange(3), "own": PerRank(torch.full((800,), rank)), "lr": 0.5}


def _save(rank: int, world_size: int, root: Path, compression: str | None) -> None:
    sizes = {"pack_below_bytes": 1024, "inner_bytes": 700, "file_bytes": 2500}
    with Checkpointer(root, compression=compression, **sizes) as checkpointer:
        checkpointer.save(_state(rank, bfloat16=False), 5)
        checkpointer.save(_state(rank, bfloat16=True), 6)


@pytest.fixture(scope="module", params=[None, "zstd"])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("interop")
    run_ranks(_save, 2, root, request.param)
    return root / "step_00000005"


@pytest.mark.parametrize(
    ("reader", "bfloat16"),
    [(_TENSORSTORE, False), (_TENSORSTORE, True), (_ZARR, False)],
    ids=["tensorstore", "tensorstore-bfloat16", "zarr-python"],
)
def test_a_third_party_reads_the_same_values(step: Path, tmp_path: Path, reader: str, bfloat16: bool) -> None:
    step = step.with_name("step_00000006") if bfloat16 else step
    expected = {}
    for directory, tensor in _tensors(bfloat16).items():
        raw = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
        expected[directory] = (tensor.view(raw) if raw else tensor).numpy()
    np.savez(tmp_path / "expected.npz", **expected)
    command = [sys.executable, "-c", reader, str(step), str(tmp_path / "expected.npz")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr


def test_the_listing_says_what_is_there(step: Path) -> None:
    """Every chunk file is in the manifest of one rank, with its size, and there are no other files."""
    listed = {}
    for rank in range(2):
        part = json.loads((step / "parts" / f"rank_{rank:05d}.json").read_bytes())
        for directory, chunks in part["chunks"].items():
            listed |= {f"{directory}/{key}": size for key, size, _ in chunks}
    found = {
        str(path.relative_to(step)): path.stat().st_size
        for path in step.rglob("*")
        if path.is_file() and path.name != "zarr.json" and path.parent.name != "parts"
    }
    assert found.keys() - listed.keys() == {"state.json", "intent.json"}
    assert {name: found.get(name) for name in listed} == listed
