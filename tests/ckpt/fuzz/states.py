"""Small steps to mutate: both layouts, also compressed, of one rank and of two, with every kind of file and member."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt import Checkpointer, PerRank, Staging
from tests.ckpt.interop import states
from tests.support.saves import save_here

LAYOUTS: dict[str, dict[str, Any]] = {
    "small files": {"file_bytes": 2048},
    "one file": {},
    "zstd": {"compression": "zstd", "file_bytes": 2048},
}


def state(rank: int, world_size: int) -> dict[str, Any]:
    """Return a state with shared leaves, equal on every rank, and some leaves of this rank."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 30, generator=generator)
    mesh = init_device_mesh("cpu", (world_size,))
    uneven = torch.randn(7, 40, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "edge": torch.randn(37, 11, generator=generator).bfloat16(),
            "bias": torch.randn(5, generator=generator),
            "empty": torch.zeros(0, 4),
            "uneven": distribute_tensor(uneven, mesh, [Shard(0)]),
        },
        "half": torch.randn(9, 9, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.zeros(3, dtype=torch.complex32),
        "scalar": torch.tensor(4.0),
        "numbers": {"lr": 0.1, "step": 3, "betas": (0.9, 0.95), "name": "run", "big": 1 << 80, "nan": float("nan")},
        "more": {"bytes": b"abc", "dtype": torch.bfloat16, "numpy": np.float32(1.5), "order": OrderedDict(a=1, b=[2])},
        "keys": {1: "a", 2: {"b": 3j}},
        "own": PerRank(torch.arange(70) + rank),
        "position": PerRank(rank),
    }


def every_type() -> dict[str, Any]:
    """Return a small state of one process with every type of value and container, and tensors of each layout."""
    weight = torch.arange(600.0).view(40, 15)
    return {
        "weight": weight,
        "tied": weight,
        "zeros": torch.zeros(600),
        "empty": torch.zeros(0, 4),
        "own": PerRank(torch.arange(7)),
        "blocks": [torch.ones(3), torch.ones(2)],
        "recent": deque([torch.ones(1)], 4),
        "ordered": OrderedDict(b=torch.ones(1), a=1),
        "values": states.values() | {"ordered": OrderedDict(a=1, b=[2]), "empty": []},
        "types": {name: value for name, (value, _) in states.of_types().items()},
        "loader": {"seen": [torch.arange(4), np.arange(3)]},
        "position": PerRank(7),
    }


def save_all(rank: int, world_size: int, folder: Path) -> None:
    for name, options in LAYOUTS.items():
        with Checkpointer(folder / name, staging=Staging(inner_bytes=512, **options)) as checkpointer:
            save_here(checkpointer, state(rank, world_size), 4)
