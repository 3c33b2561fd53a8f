"""A state saved on any number of ranks, in any layout, is restored bit for bit on any other number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer, PerRank, Staging
from tests.support import layouts, run_ranks
from tests.support.saves import save_here
from tests.support.selection import full_only

SAVED_ON = (1, 2, 4)
_SIZES = {
    "small files": Staging(file_bytes=2048, inner_bytes=512),
    "one file": Staging(),
    "zstd": Staging(compression="zstd"),
}


def _per_rank(rank: int) -> dict[str, Any]:
    return {
        "position": PerRank(100 + rank),
        "ragged": PerRank(torch.arange(5 + 3 * rank) + 1000 * rank),
        "nested": PerRank({"words": [f"rank {rank}", None], "seed": torch.tensor([rank, 7])}),
    }


def _save(rank: int, world_size: int, roots: dict[str, Path]) -> None:
    state = layouts.build(world_size)
    for name, root in roots.items():
        with Checkpointer(root, staging=_SIZES[name]) as checkpointer:
            save_here(checkpointer, {"layouts": state, **_per_rank(rank)}, 3)


def _restore(rank: int, world_size: int, roots: dict[tuple[int, str], Path]) -> list[str]:
    expected = layouts.build(world_size)
    state = layouts.build(world_size)
    wrong = []
    for (saved_on, how), root in roots.items():
        layouts.clear(state)
        own = _per_rank(rank + 50)
        kept = _per_rank(rank if rank < saved_on else rank + 50)
        if rank < saved_on:
            own["ragged"] = PerRank(torch.zeros_like(kept["ragged"].value))
        with Checkpointer(root) as checkpointer:
            assert checkpointer.restore({"layouts": state, **own}) == 3
        wrong += [f"from {saved_on}, {how}: {name}" for name in layouts.differences(state, expected)]
        for name in kept:
            if str(own[name].value) != str(kept[name].value):
                wrong.append(f"from {saved_on}, {how}: {name} is {own[name].value}")
    return wrong


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    folder = tmp_path_factory.mktemp("saved")
    roots = {(ranks, how): folder / f"{how}-{ranks}".replace(" ", "-") for ranks in SAVED_ON for how in _SIZES}
    for world_size in SAVED_ON:
        run_ranks(_save, world_size, {how: roots[world_size, how] for how in _SIZES})
    return roots


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=full_only), 3, pytest.param(4, marks=full_only)])
def test_every_layout_comes_back(roots: dict[tuple[int, str], Path], world_size: int) -> None:
    for result in run_ranks(_restore, world_size, roots):
        assert result.value == []
