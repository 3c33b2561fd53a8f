"""docs/format.md is sufficient: a reader written from it alone reads every bit of real checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ckpt.interop import states
from tests.ckpt.interop.conftest import Saved
from tests.ckpt.interop.standalone_reader import Step


def test_tensors_divided_over_ranks(saved: Saved) -> None:
    found = Step(saved.steps["layouts"]).tensors()
    own = {rank: torch.full((rank + 5, 3), float(rank)) for rank in range(4)}
    for rank, tensor in own.items():
        assert found.pop((("own",), rank)) == ("float32", [rank + 5, 3], states.bytes_of(tensor))
    expected = {path: tensor for path, tensor in saved.layouts.items() if path != ("own",)}
    assert {path for path, _ in found} == expected.keys()
    wrong = [path for (path, rank), tensor in found.items() if rank is not None or tensor != expected[path]]
    assert not wrong


@pytest.mark.parametrize("name", ["plain", "large"])
def test_every_dtype(saved: Saved, name: str) -> None:
    found = Step(saved.steps[name]).tensors()
    for rank in range(2):
        assert found.pop((("own",), rank)) == ("int64", [800], states.bytes_of(torch.full((800,), rank)))
    expected = dict(_leaves(states.many_dtypes()))
    assert found.keys() == {(path, None) for path in expected}
    for (path, _), (dtype, shape, data) in found.items():
        tensor = expected[path]
        assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)), path
        assert data == states.bytes_of(tensor), path


def test_values(saved: Saved) -> None:
    found = Step(saved.steps["layouts"]).values()
    expected = dict(_leaves({"values": states.values(), "numbers": [1, 2.5, "three", None]}))
    found = {path: value for (path, rank), value in found.items() if rank is None}
    assert found.pop(("file",)).read() == b"c", "it is where it was"
    expected |= {("values", name): instead for name, (_, instead) in states.of_types().items()}
    assert math.isnan(found.pop(("values", "nan"))), "nan is not equal to itself"
    del expected["values", "nan"]
    expected["values", "dtype"] = "bfloat16"
    assert found == expected
    assert all(type(value) is type(expected[path]) for path, value in found.items())


def test_a_flipped_bit_is_found(saved: Saved, tmp_path: Path) -> None:
    step = shutil.copytree(saved.steps["layouts"], tmp_path / "step_00000012")
    for name in ("zarr.json", "state.json", "index.json", "parts/000/rank_00003.json", "packs/000/rank_00002_000"):
        file, data = step / name, (step / name).read_bytes()
        at = 1 if name.startswith("packs") else 120
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises((AssertionError, ValueError)):
            Step(step).tensors()
        file.write_bytes(data)


def _leaves(state: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the leaves with an entry of their own in a checkpoint; a list without tensors is one leaf."""
    if isinstance(state, dict):
        for key, item in state.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, state
