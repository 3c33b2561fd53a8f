"""The state of a data loader as one value: tensors and arrays in it keep their bits, dtypes and shapes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.errors import CheckpointCorruptError, StateError
from ckpt.planning.data_loaders import is_data_loader, loadable, storable
from ckpt.values.codec import decode_value, encode_value
from ckpt.values.registry import ArrayValue

LEAVES = [
    torch.Generator().manual_seed(3).get_state(),
    torch.randn(2, 3).bfloat16(),
    torch.arange(6).reshape(2, 3).T,
    torch.tensor(True),
    torch.empty(0, 3, dtype=torch.complex64),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.nn.Parameter(torch.ones(2)),
    np.random.RandomState(3).get_state()[1],
    np.array(2.5, ">f8"),
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.zeros((0, 2), bool),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: f"{type(leaf).__name__}-{leaf.dtype}")
def test_arrays_keep_everything(leaf: Any) -> None:
    state = OrderedDict(b=[(leaf, 1)], a={3: None, "x": {1, 2}})
    found = loadable(decode_value(encode_value(storable(("loader",), state))))
    assert (type(found), list(found), found["a"]) == (OrderedDict, ["b", "a"], {3: None, "x": {1, 2}})
    again = found["b"][0][0]
    assert (again.dtype, tuple(again.shape)) == (leaf.dtype, tuple(leaf.shape))
    assert type(again) is (np.ndarray if isinstance(leaf, np.ndarray) else torch.Tensor)
    again += 0 if again.dtype not in (torch.bool, bool) else False  # it can be written to
    assert (again == leaf).all()


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (torch.empty(2, device="meta"), "state/0: this tensor is on the meta device"),
        (torch.ones(2).to_sparse(), "state/0: this tensor has the layout"),
        (np.array(["text"]), "state/0: numpy arrays of dtype <U4 cannot be stored"),
        (np.array([None]), "state/0: numpy arrays of dtype object cannot be stored"),
        (np.ma.array([1, 2], mask=[0, 1]), "state/0: numpy arrays with a mask cannot be stored"),
    ],
    ids=str,
)
def test_what_cannot_be_stored(leaf: Any, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        storable(("state",), [leaf])


def test_a_state_that_contains_itself() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(StateError, match="nested deeper than 100"):
        storable(("state",), state)


@pytest.mark.parametrize(
    "value",
    [
        ArrayValue("torch", "float32", (2,), b"1234"),
        ArrayValue("torch", "float32", (2,), b""),
        ArrayValue("torch", "float32", (1,), b"123"),
        ArrayValue("torch", "load", (1,), b"1234"),
        ArrayValue("numpy", "O", (1,), b"12345678"),
        ArrayValue("numpy", "<f4", (2,), b"1234"),
    ],
    ids=repr,
)
def test_invalid_arrays(value: ArrayValue) -> None:
    with pytest.raises((CheckpointCorruptError, StateError)):
        loadable({"x": value})


def test_classes_are_recognised_by_name_and_package() -> None:
    def a_class(module: str, *bases: type) -> type:
        return type("StatefulDataLoader", bases, {"__module__": module})

    theirs = a_class("torchdata.stateful_dataloader.stateful_dataloader")
    assert is_data_loader(theirs)
    assert is_data_loader(type("Derived", (theirs,), {"__module__": "elsewhere"}))
    assert not is_data_loader(a_class("elsewhere"))
    assert not is_data_loader(a_class("torchdata.stateful_dataloader_of_mine"))
    assert not is_data_loader(torch.nn.Linear)
