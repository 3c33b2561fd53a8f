"""What docs/scale.md says of files, index and parts: real ranks in every layout, and thousands of simulated ones."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.planning.boxes import Placement, Sharding
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.save_plan import make_save_plan
from ckpt.saving.publish import publish
from tests.support import run_ranks
from tests.support.layouts import build
from tests.support.selection import full_only
from tools.bench.scale import simulate_save

_FILE_BYTES = 64 << 20
_OTHERS = 10  # files of a step that are not those of one rank, at most

_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(arguments[0]))


sys.addaudithook(_note_opened)


def _save(rank: int, world_size: int, root: str) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(build(world_size), 1)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=full_only), 4])
def test_files_of_a_save_in_every_layout(tmp_path: Path, world_size: int) -> None:
    """Hundreds of tensors: plain, of DDP, FSDP2, tensor parallelism and two dimensions."""
    run_ranks(_save, world_size, str(tmp_path))
    files = [file for file in (tmp_path / "step_00000001").rglob("*") if file.is_file()]
    of_ranks = Counter(int(file.name[5:10]) for file in files if file.name.startswith("rank_"))
    assert set(of_ranks) == set(range(world_size))
    assert max(of_ranks.values()) <= 2
    assert len(files) - sum(of_ranks.values()) <= _OTHERS


def _model(layers: int, width: int, sharding: Sharding) -> StateDescription:
    """The weights of a transformer with two moments each: nine tensors in a layer."""
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    shapes |= dict.fromkeys(("norm1", "norm2", "bias1", "bias2", "scale"), (width,))
    return StateDescription(
        {
            (kind, layer, name): TensorSpec("float32", 4, shape, sharding)
            for kind in ("weight", "exp_avg", "exp_avg_sq", "master")
            for layer in range(layers)
            for name, shape in shapes.items()
        }
    )


def _flat(ranks: int) -> Sharding:
    return Sharding((ranks,), tuple(range(ranks)), (Placement(0),))


def _strided(ranks: int) -> Sharding:
    """FSDP2 over tensor parallelism on the same dimension, of which torch says that the first shard is strided."""
    return Sharding((ranks // 8, 8), tuple(range(ranks)), (Placement(0, 8), Placement(0)))


def _hybrid(ranks: int) -> Sharding:
    return Sharding((4, ranks // 4), tuple(range(ranks)), (Placement(), Placement(0)))


@pytest.mark.parametrize("ranks", [64, pytest.param(4096, marks=full_only)])
@pytest.mark.parametrize("sharding", [_flat, _strided, _hybrid], ids=["FSDP", "FSDP+TP", "HSDP"])
def test_files_and_index_of_simulated_ranks(ranks: int, sharding: object) -> None:
    assert callable(sharding)
    plan = make_save_plan([_model(60, 8192, sharding(ranks))] * ranks, GridOptions())
    assert len(plan.index.arrays) == 2160
    assert len(plan.index_bytes) < 4e6
    sizes = plan.index.files()
    files = Counter(rank for rank, _ in sizes)
    nbytes: Counter[int] = Counter()
    for (rank, _), size in sizes.items():
        nbytes[rank] += size
    assert len(files) == ranks
    assert all(count <= 1 + nbytes[rank] / _FILE_BYTES for rank, count in files.items())
    total = 4 * sum(math.prod(array.meta.shape) for array in plan.index.arrays)
    assert total <= sum(nbytes.values()) <= 1.02 * total
    assert max(nbytes.values()) <= 1.06 * total / ranks


def test_the_coordinator_reads_each_part_once(tmp_path: Path) -> None:
    global _opened
    pending = simulate_save(tmp_path, make_save_plan([_model(10, 4096, _flat(1024))] * 1024, GridOptions()))
    _opened = []
    publish(pending, lambda: None)
    opened, _opened = _opened, None
    parts = Counter(Path(path).name for path in opened if path.endswith(".json") and "rank_" in path)
    assert len(parts) == 1024
    assert set(parts.values()) == {1}
    directories = Counter(path.parent for path in (tmp_path / "step_00000001" / "parts").rglob("rank_*"))
    assert max(directories.values()) <= 512
    assert max(path.stat().st_size for path in (tmp_path / "step_00000001" / "parts").rglob("rank_*")) < 100e3
