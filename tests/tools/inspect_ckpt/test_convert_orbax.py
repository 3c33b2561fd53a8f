"""`convert` makes steps of what Orbax writes, bit by bit, without Orbax and without jax."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import load
from tests.support.orbax_checkpoints import expected_state, write_with_orbax
from tests.tools.inspect_ckpt.commands import Commands

pytestmark = pytest.mark.timeout(180)  # the first test waits for a process that imports jax


@pytest.fixture(scope="session")
def orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of Orbax. Tests must not change them."""
    return write_with_orbax(tmp_path_factory.mktemp("orbax"))


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, the same types and the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("ocdbt", "state"),
        ("files", "state"),
        ("zarr3", "state"),
        ("zarr3 files", "state"),
        ("standard", "tree"),
        ("v1", "v1"),
        ("composite/5/params", "params"),
        ("key", "key"),  # a random key becomes its data
    ],
)
def test_every_layout(run: Commands, tmp_path: Path, orbax: Path, name: str, holds: str) -> None:
    assert "all bits are equal" in run("convert", orbax / name, tmp_path / "root", "--step", "7")
    run("validate", tmp_path / "root")
    assert same(load(tmp_path / "root"), expected_state(orbax, holds))
    assert "jax" not in sys.modules
