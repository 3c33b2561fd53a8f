"""Each name that does not fit names its own remedy, and an object of which nothing fits is an error always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer, PerRank, StateMismatchError
from tests.ckpt.loading.towers import Tower
from tests.support.saves import save_here


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = Tower(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model.head(model.encoder(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, {"model": model, "optimizer": optimizer, "epoch": 3}, 7)
    return tmp_path / "root"


def restored(root: Path, state: Any, **options: Any) -> None:
    with Checkpointer(root, read_only=True) as checkpointer:
        assert checkpointer.restore(state, **options) == 7


def _into(**changes: Any) -> dict[str, Any]:
    model = Tower(0.0, **changes)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1.0), "epoch": 0}


MISFITS: dict[str, tuple[Any, str, dict[str, Any] | None]] = {
    "dtype": (lambda: _into(dtype=torch.bfloat16), "dtype: restore(..., cast=True) converts", {"cast": True}),
    "shape": (lambda: _into(out=5), "shape: restore(..., resize=True) restores", {"resize": True}),
    "integers": (
        lambda: {"model": {"encoder.weight": torch.zeros(4, 4, dtype=torch.int32)}},
        "dtype: only floating-point tensors are converted: give the state the dtype of the checkpoint",
        None,
    ),
    "dimensions": (
        lambda: {"model": {"encoder.weight": torch.zeros(4, 4, 1)}},
        "shape: these shapes have nothing in common: make the state in those of the checkpoint",
        None,
    ),
    "expanded": (
        lambda: {"model": {"encoder.weight": torch.zeros(1, 4).expand(4, 4)}},
        "read-only: put tensors that can be written to",
        None,
    ),
    "rank": (
        lambda: {**_into(), "epoch": PerRank(1)},
        "form: put into the state what was saved (wrapped by PerRank",
        None,
    ),
    "wrapper": (
        lambda: {**(state := _into()), "model": nn.DataParallel(state["model"])},
        "names of the state have 'module.' in addition: a wrapper holds the module: put `wrapped.module`",
        None,
    ),
    "another": (
        lambda: {**_into(), "average": Tower(0.0)},
        "missing: the checkpoint has none of the names in average; without it: restore(..., only=['model', ",
        {"only": ["model", "optimizer", "epoch"]},
    ),
}


@pytest.mark.parametrize("kind", list(MISFITS))
def test_each_mismatch_names_its_own_remedy(root: Path, kind: str) -> None:
    make, advice, remedy = MISFITS[kind]
    state = make()
    with pytest.raises(StateMismatchError) as caught:
        restored(root, state)
    assert f"\n{advice}" in str(caught.value)
    assert "strict=False" not in str(caught.value).replace("unexpected: restore(..., strict=False)", "")
    if remedy is not None:
        restored(root, state, **remedy)
        assert state["model"].encoder.weight.eq(1).all()


def test_names_that_one_side_lacks_may_be_left_out_where_the_rest_fits(root: Path) -> None:
    for make, kind in ((nn.Identity, "unexpected"), (lambda: nn.ParameterList([torch.zeros(2)]), "missing")):
        state = _into()
        if kind == "missing":
            state["model"].more = make()
        else:
            state["model"].head = make()
        state = {"model": state["model"]}
        with pytest.raises(StateMismatchError, match=rf"\n{kind}: restore\(..., strict=False\)"):
            restored(root, state, only=["model"])
        restored(root, state, only=["model"], strict=False)
        assert state["model"].encoder.weight.eq(1).all()


@pytest.mark.parametrize("kind", ["dtype", "integers", "wrapper", "another"])
def test_a_module_of_which_nothing_fits_is_an_error_always(root: Path, kind: str) -> None:
    state = MISFITS[kind][0]()
    before = str([item.state_dict() if hasattr(item, "state_dict") else item for item in state.values()])
    lost = "average" if kind == "another" else "model"
    with pytest.raises(
        StateMismatchError, match=f"{MISFITS[kind][1][:12]}.*\n(Nothing of {lost}|No tensor of .*) fits"
    ):
        restored(root, state, strict=False)
    assert str([item.state_dict() if hasattr(item, "state_dict") else item for item in state.values()]) == before


def test_an_optimizer_of_which_nothing_fits_is_an_error_always(root: Path) -> None:
    state = _into()
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), momentum=0.9)
    with pytest.raises(StateMismatchError, match=r"of another kind[^\n]*\nNothing of optimizer fits"):
        restored(root, state, strict=False)
    assert not any(parameter.any() for parameter in state["model"].parameters())
