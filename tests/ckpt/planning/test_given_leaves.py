"""A state that is given leaf by leaf: it is saved, restored and read like any other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from tests.support import run_ranks


def _whole() -> torch.Tensor:
    return torch.arange(48.0).reshape(8, 6)


def _save(rank: int, world_size: int, root: Path) -> None:
    whole, leaves = _whole(), ckpt.Leaves()
    # Rank 0 has two boxes of different widths, rank 1 the rest.
    boxes = [((0, 0), whole[:3, :4]), ((3, 0), whole[3:])] if rank == 0 else [((0, 4), whole[:3, 4:])]
    leaves.add_tensor(("model", "w"), whole.shape, boxes)
    leaves.add_tensor(("parts", rank), (2,), [((0,), torch.full((2,), float(rank)))], lists=(1,))
    leaves.add_value(("groups", rank), {"lr": 0.5 + rank}, lists=(1,))
    if rank == 0:
        leaves.add_value(("epoch",), 7)
    with ckpt.Checkpointer(root, timeout=60) as checkpointer:
        checkpointer.save(leaves.state(ckpt.Ranks()), 1)
        bad = ckpt.Leaves()
        problem = None
        if rank == 1:
            with pytest.raises(ckpt.StateError, match=r"model/o: a builtins.object cannot be stored") as caught:
                bad.add_value(("model", "o"), object())
            problem = str(caught.value)
        with pytest.raises(ckpt.StateError, match=r"rank 1 cannot store its part, nothing was written: model/o"):
            bad.state(ckpt.Ranks(), problem)


def test_boxes_and_values_of_several_ranks_are_one_step(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path)
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(8, 6)},
        "parts": [torch.zeros(2), torch.zeros(2)],
        "groups": [],
        "epoch": 0,
    }
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert state["model"]["w"].equal(_whole())
    assert [part.tolist() for part in state["parts"]] == [[0.0, 0.0], [1.0, 1.0]]
    assert (state["groups"], state["epoch"]) == ([{"lr": 0.5}, {"lr": 1.5}], 7)


def test_a_tensor_without_a_box_or_that_cannot_be_stored() -> None:
    leaves = ckpt.Leaves()
    with pytest.raises(ckpt.StateError, match="model/w: no box"):
        leaves.add_tensor(("model", "w"), (2,), [])
    with pytest.raises(ckpt.StateError, match=r"model/w: .*meta"):
        leaves.add_tensor(("model", "w"), (2,), [((0,), torch.empty(2, device="meta"))])


@pytest.fixture
def step(tmp_path: Path) -> Path:
    state = {
        "a": {"w": _whole(), 3: torch.ones(2)},
        "list": [torch.zeros(1)],
        "own": ckpt.PerRank(1.5),
        "tuple": (1, 2),
    }
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({**state, "tied": state["a"]["w"], "flag": True}, 4)  # type: ignore[call-overload,index]
    return tmp_path


def test_the_leaves_of_an_open_step(step: Path) -> None:
    with ckpt.open(step) as opened:
        assert isinstance(opened, ckpt.Checkpoint)
        leaves = {(keys, rank): leaf for keys, rank, leaf in opened.leaves()}
        values = {key: leaf for key, leaf in leaves.items() if not isinstance(leaf, ckpt.LazyTensor)}
        assert values == {(("own",), 0): 1.5, (("tuple",), None): (1, 2), (("flag",), None): True}
        tensors = sorted((str(keys) for keys, _ in leaves.keys() - values.keys()))
        assert tensors == sorted(map(str, [("a", "w"), ("a", 3), ("list", 0), ("tied",)]))
        assert leaves[("tied",), None].read().tolist() == _whole().tolist()
        assert [opened.is_sequence(keys) for keys in (("list",), ("a",), ("nothing",))] == [True, False, False]


def test_boxes_are_read_into_tensors_of_any_kind(step: Path) -> None:
    with ckpt.open(step) as opened:
        w = opened["a/w"]
        plain, wide, strided = torch.zeros(2, 3), torch.zeros(8, 6, dtype=torch.float64), torch.zeros(6, 8).T
        parameter = torch.nn.Parameter(torch.zeros(8, 6))
        opened.read_into([(w, (1, 2), plain), (w, (0, 0), wide), (w, (0, 0), strided), (w, (0, 0), parameter)])
        assert plain.equal(_whole()[1:3, 2:5])
        assert wide.equal(_whole().double())
        assert strided.equal(_whole())
        assert parameter.equal(_whole())
        for offset, shape in (((7, 0), (2, 6)), ((-1, 0), (1, 1)), ((0,), (8,))):
            with pytest.raises(ValueError, match="a/w has"):
                opened.read_into([(w, offset, torch.zeros(shape))])


def test_a_damaged_box_is_named(step: Path) -> None:
    pack = step / "step_00000004" / "packs" / "000" / "rank_00000_000"
    with ckpt.open(step) as opened:
        data = bytearray(pack.read_bytes())
        at = bytes(data).index(_whole().numpy().tobytes())
        data[at] ^= 1
        pack.write_bytes(data)
        with pytest.raises(ckpt.CheckpointCorruptError, match="a/w"):
            opened.read_into([(opened["a/w"], (0, 0), torch.zeros(8, 6))])


def test_an_array_with_a_mask_is_refused(tmp_path: Path) -> None:
    """Its elements alone would be stored, and the mask lost."""
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with ckpt.Checkpointer(tmp_path) as checkpointer:
        for state in ({"part": masked}, {"part": [{"a": masked}]}):
            with pytest.raises(ckpt.StateError, match=r"part.*: numpy arrays with a mask cannot be stored.* its mask"):
                checkpointer.save(state, 1)
        with pytest.raises(ckpt.StateError, match=r"part: numpy arrays with a mask"):
            ckpt.Leaves().add_value(("part",), masked)
        checkpointer.save({"part": [masked.data, masked.mask]}, 1)
    assert ckpt.load(tmp_path)["part"][1].tolist() == [False, True]
