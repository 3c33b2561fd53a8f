"""Small states with every kind of chunk: plain and sharded, of one rank and of several, several in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ckpt import Checkpointer, PerRank, Staging
from tests.support.saves import save_here

NAMES = ("one", "zstd", "two")
STEPS = (3, 4)


def state(step: int, rank: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(40, 30, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "edge": torch.randn(37, 11, generator=generator).bfloat16(),
            "bias": torch.randn(5, generator=generator),
            "empty": torch.zeros(0, 4),
            "odd name\n": torch.randint(0, 100, (300,), generator=generator),
        },
        "half": torch.randn(9, 9, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(float(step)),
        "numbers": {"lr": 0.1 * step, "step": step, "betas": (0.9, 0.95), "name": "run"},
        "own": PerRank(torch.arange(70) + step + rank),
        "position": PerRank(rank + step),
    }


def _save(root: Path, rank: int, compression: str | None, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    staging = Staging(compression=compression, file_bytes=4096, inner_bytes=256)
    with Checkpointer(root, staging=staging) as checkpointer:
        for step in STEPS:
            save_here(checkpointer, state(step, rank) | more, step)


def save_all(rank: int, world_size: int, folder: Path) -> None:
    _save(folder / "one", rank, None)
    _save(folder / "zstd", rank, "zstd")


def save_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rows = torch.arange(90.0).reshape(9, 10)
    divided = distribute_tensor(rows, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    _save(folder / "two", rank, None, {"divided": divided})
