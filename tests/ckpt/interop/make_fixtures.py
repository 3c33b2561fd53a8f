"""Steps that are checked in, so that what was written stays readable.

    python -m tests.ckpt.interop.make_fixtures

writes those of the present format anew. Those of a released format are never changed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ckpt import Checkpointer, PerRank, Staging
from tests.support import run_ranks

FIXTURES = Path(__file__).parent / "fixtures" / "format_2"
STEP = "step_00000007"
VALUES = {"lr": 0.5, "betas": (0.9, 0.999)}
METRICS = {"loss": 0.25}
_RANKS = 4


def tensors() -> dict[tuple[str | int, ...], torch.Tensor]:
    """Return the tensors that ranks share, by key path."""
    return {
        ("model", "plain"): torch.arange(5, dtype=torch.int64) - 2,
        ("model", "even"): torch.arange(48, dtype=torch.float32).reshape(8, 6) / 7,
        ("model", "half"): torch.arange(1024, dtype=torch.bfloat16).reshape(64, 16) / 3,
        ("model", "irregular"): torch.arange(99, dtype=torch.int32).reshape(33, 3),
        ("model", "raw"): torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn),
        ("blocks", 0): torch.arange(3, dtype=torch.float16),
        ("scalar",): torch.tensor(2.5, dtype=torch.float64),
    }


def own(rank: int) -> torch.Tensor:
    """Return the tensor that a rank has for itself."""
    return torch.full((rank + 1, 2), rank, dtype=torch.int32)


def main() -> None:
    """Write all fixtures."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_save, _RANKS, Path(folder))
        for name in ("plain", "zstd"):
            shutil.rmtree(FIXTURES / name, ignore_errors=True)
            shutil.copytree(Path(folder) / name / STEP, FIXTURES / name / STEP)


def _save(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    flat = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("x", "y"))
    state: dict[Any, Any] = {"model": {}, "blocks": [None], "own": PerRank(own(rank)), **VALUES}
    for (*parents, key), tensor in tensors().items():
        into = state[parents[0]] if parents else state
        into[key] = tensor
    model = state["model"]
    for key in ("even", "half"):
        model[key] = distribute_tensor(model[key], flat, [Shard(0)])
    model["irregular"] = distribute_tensor(model["irregular"], grid, [Shard(0), Shard(0)])
    state["tied"] = model["plain"]
    for name, compression in {"plain": None, "zstd": "zstd"}.items():
        staging = Staging(compression=compression, inner_bytes=64, file_bytes=1024)
        with Checkpointer(folder / name, staging=staging) as checkpointer:
            checkpointer.save(state, 7, metrics=METRICS)


if __name__ == "__main__":
    main()
