"""Small states with every kind of file: shards with and without inner chunks, packed tensors, several arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt import Checkpointer, PerRank

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


def _save(root: Path, rank: int, compression: str | None) -> None:
    sizes: dict[str, int] = {"file_bytes": 2048, "inner_bytes": 512}
    with Checkpointer(root, compression=compression, **sizes) as checkpointer:
        for step in STEPS:
            checkpointer.save(state(step, rank), step)


def save_all(rank: int, world_size: int, folder: Path) -> None:
    _save(folder / "one", rank, None)
    _save(folder / "zstd", rank, "zstd")


def save_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    _save(folder / "two", rank, None)
