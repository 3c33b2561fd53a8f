"""Steps that were written in the past stay readable, by every reader."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import ckpt
from ckpt.storage.names import directory
from tests.ckpt.interop import read_references
from tests.ckpt.interop.make_fixtures import FIXTURES, METRICS, STEP, VALUES, own, tensors
from tests.ckpt.interop.standalone_reader import Step
from tests.ckpt.interop.states import bytes_of

COMPRESSIONS = ("plain", "zstd")


@pytest.fixture(params=COMPRESSIONS)
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / request.param / STEP, tmp_path / STEP)


def _expected() -> dict[str, bytes]:
    expected = {directory(path): bytes_of(tensor) for path, tensor in tensors().items()}
    return expected | {f"own/__rank_{rank:05d}": bytes_of(own(rank)) for rank in range(4)}


def test_ckpt(step: Path) -> None:
    state: dict[Any, Any] = {"model": {}, "blocks": [None]}
    for (*parents, key), tensor in tensors().items():
        into = state[parents[0]] if parents else state
        into[key] = torch.zeros_like(tensor)
    state |= {"lr": 0.0, "betas": None}
    with ckpt.Checkpointer(step.parent, read_only=True) as checkpointer:
        assert checkpointer.restore(state, strict=False) == 7
    for (*parents, key), tensor in tensors().items():
        restored: Any = state[parents[0]][key] if parents else state[key]
        assert bytes_of(restored) == bytes_of(tensor), key
    assert {name: state[name] for name in VALUES} == VALUES


def test_ckpt_open(step: Path) -> None:
    with ckpt.open(step) as opened:
        assert opened.summary["metrics"] == METRICS
        assert {name: opened.values_by_name[name] for name in VALUES} == VALUES
        for path, tensor in tensors().items():
            assert opened["/".join(map(str, path))].read().tobytes() == bytes_of(tensor)
        assert opened["tied"].read().tobytes() == bytes_of(tensors()["model", "plain"])
        assert opened["own@rank3"].read().tobytes() == bytes_of(own(3))


def test_zarr_python(step: Path) -> None:
    with ckpt.zarr_store(step) as store:
        group: Any = zarr.open_group(store, mode="r")
        found = {name: array[...].tobytes() for name, array in group.members(max_depth=None) if hasattr(array, "dtype")}
    assert found == _expected()


def test_the_standalone_reader(tmp_path: Path) -> None:
    opened = Step(shutil.copytree(FIXTURES / "plain" / STEP, tmp_path / STEP))
    found = {path: data for (path, rank), (_, _, data) in opened.tensors().items() if rank is None}
    plain = tensors()["model", "plain"]
    assert found == {path: bytes_of(tensor) for path, tensor in tensors().items()} | {("tied",): bytes_of(plain)}
    assert opened.tensors()[("own",), 2] == ("int32", [3, 2], bytes_of(own(2)))
    assert {path[0]: value for (path, _), value in opened.values().items()} == VALUES
    assert opened.about["metrics"] == METRICS
    assert opened.state["containers"] == [[["blocks"], None, {"kind": "list"}]]


def test_references(tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / "plain" / STEP, tmp_path / STEP)
    command = [sys.executable, "-I", read_references.__file__, str(step), str(tmp_path / "found.npz")]
    subprocess.run(command, timeout=50, check=True)
    with np.load(tmp_path / "found.npz") as arrays:
        found = {name: arrays[name].tobytes() for name in arrays}
    boxes = [found.pop(f"model/irregular/__box_{number:05d}") for number in range(4)]
    assert found | {"model/irregular": b"".join(boxes)} == _expected()
