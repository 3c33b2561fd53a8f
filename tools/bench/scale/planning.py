"""How long the trainer plans a save of a job of many ranks; this process plays one of them.

python -m tools.bench.scale.planning [--tensors 3000] [--ranks 1024] [--repeats 3]

The tensors are DTensors over a mesh of all ranks, made in a process group that only pretends. So that no time of
another process is measured, every rank is taken to have sent what this one sent: that costs the others nothing more.
"""

import argparse
import json
import resource
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt.planning.grid import GridOptions
from ckpt.ranks import Ranks
from ckpt.saving.plan_cache import PlanCache

__all__ = ["main", "measure_planning"]

_ROWS_PER_RANK = 4
_COLUMNS = (16, 64, 256, 1024)


class _Echo(Ranks):
    """Everybody says the same."""

    def __call__(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size


def measure_planning(tensors: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the first save of a structure ("first") and of the second one ("cached"), and how long the same takes
    when every tensor is whole on every rank ("replicated"); bytes of memory that all of it needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sharded, replicated = _sharded(tensors, ranks), _replicated(tensors)
        taken: dict[str, list[float]] = {"first": [], "cached": [], "first_replicated": [], "cached_replicated": []}
        for _ in range(repeats):
            for ending, state in (("", sharded), ("_replicated", replicated)):
                planner = PlanCache(_Echo(), GridOptions(), None, None)
                taken["first" + ending].append(_prepare(planner, state))
                taken["cached" + ending].append(_prepare(planner, state))
        taken["memory"] = [1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)]
        return taken
    finally:
        dist.destroy_process_group()


def _prepare(planner: PlanCache, state: object) -> float:
    begin = time.perf_counter()
    planner.prepare(state)
    return time.perf_counter() - begin


def _sharded(tensors: int, ranks: int) -> dict[str, DTensor]:
    """Each rank has a few rows of each; a row is 64 B to 4 KB."""
    mesh = init_device_mesh("cpu", (ranks,))
    made = {}
    for number in range(tensors):
        columns = _COLUMNS[number % len(_COLUMNS)]
        local = torch.zeros(_ROWS_PER_RANK, columns)
        name = f"layers.{number // 8}.{number % 8}.weight"
        made[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((ranks * 4, columns)), stride=(columns, 1)
        )
    return made


def _replicated(tensors: int) -> dict[str, torch.Tensor]:
    """16 KiB to 1 MiB each, not touched."""
    return {
        f"layers.{number // 8}.{number % 8}.weight": torch.empty(256, 16 * _COLUMNS[number % len(_COLUMNS)] // 16)
        for number in range(tensors)
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    print(json.dumps(measure_planning(options.tensors, options.ranks, options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
