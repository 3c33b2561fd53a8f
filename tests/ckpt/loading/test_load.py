"""`ckpt.load`: a state of a step without a template, whole or lazy."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointNotFoundError,
    PerRank,
    StateMismatchError,
    StorageError,
)
from tests.support import layouts, run_ranks
from tests.support.saves import save_here

Pair = namedtuple("Pair", ["first", "second"])


def _state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    half = torch.arange(6, dtype=torch.bfloat16)
    return {
        "model": model,
        "optimizer": optimizer,
        "list": [torch.ones(2), {"a": 1, "b": ()}, [], "x"],
        "tuple": (torch.zeros(3), 5),
        "ordered": OrderedDict(z=torch.ones(1), a=None),
        "namespace": Namespace(t=torch.full((2,), 3.0), n=4),
        "half": half,
        "tied": half,
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "numbers": {3: torch.ones(()), 5: 1e300, "nan": float("nan")},
        "empty": torch.empty(0, 3),
        "array": np.arange(4, dtype=np.int16),
        "own": PerRank({"seed": torch.tensor([7]), "words": ["a"]}),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, _state(), 1)
        save_here(checkpointer, {"model": torch.nn.Linear(1, 1)}, 2)
    return tmp_path / "root"


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected)
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor, found
        same = found.dtype == expected.dtype and found.shape == expected.shape
        return same and torch.equal(found.view(torch.uint8), expected.detach().view(torch.uint8)) if same else False
    if isinstance(expected, Namespace):
        return type(found) is Namespace and _equal(vars(found), vars(expected))
    if isinstance(expected, dict):
        return (
            type(found) is type(expected)
            and found.keys() == expected.keys()
            and all(_equal(found[key], item) for key, item in expected.items())
        )
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(_equal, found, expected))
    return type(found) is type(expected) and (found == expected or found != found)


def test_the_whole_state_comes_back_nested_as_it_was_saved(root: Path) -> None:
    torch.manual_seed(0)
    expected = _state()
    expected["model"] = dict(expected["model"].state_dict())
    expected["optimizer"] = expected["optimizer"].state_dict()
    own = expected.pop("own").value
    loaded = ckpt.load(root, 1)
    assert "own" not in loaded
    loaded["model"] = dict(loaded["model"])
    for name in ("array", "empty"):  # a view as bytes of no elements, or of one dimension, is the same
        assert _equal(loaded.pop(name), expected.pop(name))
    scalars = loaded["numbers"].pop(3), expected["numbers"].pop(3)
    assert torch.equal(*scalars)
    steps = [(one["state"][n].pop("step"), n) for one in (loaded["optimizer"], expected["optimizer"]) for n in range(3)]
    assert all(step.item() == 1.0 for step, _ in steps)
    assert loaded.keys() == expected.keys()
    wrong = [name for name in expected if not _equal(loaded[name], expected[name])]
    assert not wrong, {name: (loaded[name], expected[name]) for name in wrong}
    assert loaded["half"] is loaded["tied"]
    assert _equal(ckpt.load(root, 1, rank=0)["own"], own)


def test_the_newest_step_a_prefix_and_the_directory_of_a_step(root: Path) -> None:
    assert set(ckpt.load(root)) == {"model"}
    model = torch.nn.Linear(1, 1)
    model.load_state_dict(ckpt.load(root, prefix="model"))
    step = root / "step_00000001"
    assert set(ckpt.load(root.as_uri())) == {"model"}
    assert ckpt.load(step.as_uri(), prefix="half").dtype == torch.bfloat16
    with pytest.raises(StorageError, match="a root is a local path, or"):
        ckpt.load("ftp://host/root")
    assert ckpt.load(step, prefix="optimizer/state/0").keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert ckpt.load(step, prefix="half").dtype == torch.bfloat16
    assert ckpt.load(step, prefix="list/1/a") == 1
    with pytest.raises(StateMismatchError, match="nothing at 'modle'; its items are array, empty"):
        ckpt.load(step, prefix="modle")
    with pytest.raises(CheckpointNotFoundError):
        ckpt.load(root, 3)
    with pytest.raises(ValueError, match="rank 4 is not one of the 1 ranks"):
        ckpt.load(root, rank=4)


def test_a_prefix_that_names_two_places_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, 1)
    with pytest.raises(ckpt.StateMismatchError, match="several places"):
        ckpt.load(tmp_path / "root", prefix="a/b")


def test_another_dtype_and_device(root: Path) -> None:
    loaded = ckpt.load(root, 1, dtype=torch.float64, device="cpu")
    assert loaded["half"].dtype == loaded["model"]["0.weight"].dtype == torch.float64
    assert loaded["half"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["float8"].dtype == torch.float8_e4m3fn
    assert loaded["array"].dtype == torch.int16
    with pytest.raises(ValueError, match="meta device"):
        ckpt.load(root, 1, device="meta")


def test_lazy_tensors_are_read_when_they_are_used_and_keep_the_step(root: Path) -> None:
    lazy = ckpt.load(root, 1, lazy=True)
    assert lazy["list"][1:] == [{"a": 1, "b": ()}, [], "x"]
    half = lazy["half"]
    assert half is lazy["tied"]
    assert (len(half), half.dtype, half.shape) == (6, "bfloat16", (6,))
    assert torch.equal(half.torch(), torch.arange(6, dtype=torch.bfloat16))
    assert half.torch(dtype=torch.float32).dtype == torch.float32
    assert torch.equal(torch.as_tensor(half), half.torch())
    assert torch.equal(torch.from_dlpack(half), half.torch())
    assert torch.as_tensor(lazy["float8"]).dtype == torch.float8_e4m3fn
    assert np.asarray(half).astype(int).tolist() == [0, 1, 2, 3, 4, 5]
    assert [int(item) for item in half] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match="no dimensions"):
        len(lazy["numbers"][3])
    with pytest.raises(ValueError, match="a lazy tensor is read as it was saved"):
        ckpt.load(root, 1, lazy=True, dtype=torch.float16)
    del lazy
    with Checkpointer(root, keep=1) as checkpointer:
        with pytest.raises(ckpt.StorageError, match="being read"):
            checkpointer.delete(1)
        del half
        checkpointer.delete(1)


def test_damaged_bytes_are_found(root: Path) -> None:
    (pack,) = (root / "step_00000001").rglob("rank_00000_000")
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CheckpointCorruptError):
        ckpt.load(root, 1)


def _save(rank: int, world_size: int, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"layouts": layouts.build(world_size), "rank": PerRank([rank, torch.tensor(rank)])}, 5)


def test_what_several_ranks_saved_is_loaded_whole(tmp_path: Path) -> None:
    run_ranks(_save, 4, tmp_path / "root")
    loaded = ckpt.load(tmp_path / "root", rank=2)
    assert loaded["rank"] == [2, torch.tensor(2)]
    opened = ckpt.open(tmp_path / "root")
    names = [name for name in opened if name.startswith("layouts/")]
    assert len(names) > 10
    for name in names:
        node = loaded
        for key in name.split("/"):
            node = node[key] if key in node else node[int(key)]
        assert torch.equal(node, opened[name].torch()), name


def test_topmost_keys_are_left_out_and_not_read(root: Path) -> None:
    with ckpt.open(root, 1) as opened:
        keys = {name.split("/")[0] for name in (*opened, *opened.values_by_name)}
    loaded = ckpt.load(root, 1, exclude=["model", "numbers"])
    assert not loaded.keys() & {"model", "numbers"}
    assert {"optimizer", "list", "tied"} < loaded.keys() < keys | {"ordered", "namespace", "own"}
    assert "half" not in ckpt.load(root, 1, exclude="half")
    assert ckpt.load(root, 1, exclude="half")["tied"].equal(torch.arange(6, dtype=torch.bfloat16))
    for file in (root / "step_00000002").rglob("rank_*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    assert ckpt.load(root, 2, exclude="model") == {}
    with pytest.raises(CheckpointCorruptError):
        ckpt.load(root, 2)


def test_a_step_that_is_open_is_loaded_and_stays_open(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"w": torch.arange(3.0), "n": 5}, 1)
    with ckpt.open(tmp_path) as checkpoint:
        assert ckpt.load(checkpoint, exclude="w") == {"n": 5}
        assert torch.equal(ckpt.load(checkpoint)["w"], checkpoint["w"].torch())
