"""`ckpt.open`: tensors by name, in a process that cannot import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import Checkpointer, CheckpointNotFoundError, PerRank
from tests.support import layouts, run_ranks
from tests.support.saves import save_here

_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
import numpy as np
import ckpt

root = sys.argv[1]
opened = ckpt.open(root)
assert opened.step == 2 and ckpt.open(root, 1).step == 1 and ckpt.open(root + "/step_00000001").step == 1
big = opened["model/big"]
assert (big.dtype, big.shape) == ("float32", (200, 30))
expected = np.arange(6000, dtype=np.float32).reshape(200, 30) + 2
assert np.array_equal(big.read(), expected) and np.array_equal(big[:], expected)
for key in [np.s_[5], np.s_[5, 7], np.s_[10:150, 3:4], np.s_[..., -1], np.s_[-3:], np.s_[7:7], np.s_[:, 4:]]:
    assert np.array_equal(big[key], expected[key]), key
    assert big[key].shape == expected[key].shape, key
assert opened["model/tied"].shape == (200, 30) and np.array_equal(opened["model/tied"][3], expected[3])
assert opened["model/bfloat16"].read().dtype.name == "bfloat16"
assert opened["model/bfloat16"].read().astype(np.float32).tolist() == [1.5, -2.0]
assert opened["model/half_complex"].read().shape == (2, 4)
assert opened["number"].read().shape == () and opened["number"].read() == 7
assert opened["number"][()] == 7
assert opened["empty"].read().shape == (0, 3)
assert opened["own@rank0"].read().tolist() == [0, 1, 2]
assert opened.values_by_name["lr"] == 0.25 and opened.values_by_name["seed@rank0"] == 11
assert sorted(opened) == list(opened) and "model/big" in opened and len(opened) == 7
for bad in (np.s_[::2], np.s_[200], np.s_[1, 2, 3]):
    try:
        big[bad]
    except IndexError:
        continue
    raise AssertionError(bad)
try:
    opened["nothing"]
except KeyError:
    pass
else:
    raise AssertionError
assert sys.modules["torch"] is None
"""


def _state(step: int) -> dict[str, Any]:
    big = torch.arange(6000.0).reshape(200, 30) + step
    return {
        "model": {
            "big": big,
            "tied": big,
            "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "half_complex": torch.zeros(2, dtype=torch.uint8).view(torch.uint8).repeat(4).view(torch.complex32),
        },
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "own": PerRank(torch.arange(3)),
        "lr": 0.25,
        "seed": PerRank(11),
    }


def test_a_process_without_torch_reads_tensors_by_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, staging=ckpt.Staging(inner_bytes=1024, file_bytes=4096)) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, _state(step), step)
    command = [sys.executable, "-W", "error", "-c", _WITHOUT_TORCH, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr


def _save_layouts(rank: int, world_size: int, root: Path) -> None:
    with Checkpointer(root, staging=ckpt.Staging(file_bytes=2048, inner_bytes=512)) as checkpointer:
        save_here(checkpointer, layouts.build(world_size), 1)


def test_shards_of_all_ranks_are_one_array(tmp_path: Path) -> None:
    run_ranks(_save_layouts, 3, tmp_path)
    opened = ckpt.open(tmp_path)
    names = [name for name in opened if name.startswith("sharded/")]
    assert len(names) > 40
    for name in names:
        expected = layouts.full_tensor(name.removeprefix("sharded/"), opened[name].shape)
        assert np.array_equal(opened[name].read(), expected.numpy()), name
        if 0 not in expected.shape:
            middle = tuple(slice(size // 2, size) for size in expected.shape)
            assert np.array_equal(opened[name][middle], expected[middle].numpy()), name


@pytest.mark.parametrize("what", ["root", "file", "nothing"])
def test_what_is_no_checkpoint(tmp_path: Path, what: str) -> None:
    path = tmp_path / "path"
    if what == "root":
        path.mkdir()
    elif what == "file":
        path.write_text("no checkpoint")
    with pytest.raises(ckpt.StorageError if what == "file" else CheckpointNotFoundError, match=str(path)):
        ckpt.open(path)


def test_keys_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"t": torch.ones(3, 4)}, 1)
    keys: list[Any] = [[0, 1], np.array([0, 1]), None, True, "a", np.s_[::2], np.s_[..., [0]]]
    with ckpt.open(tmp_path / "root") as opened:
        for key in keys:
            with pytest.raises(IndexError, match="only"):
                opened["t"][key]
