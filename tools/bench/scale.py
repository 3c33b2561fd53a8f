"""Planning, and the check before a commit, of a save of very many ranks, on one machine.

Planning: this process plays one of the ranks. The tensors are DTensors over a mesh of all ranks, in a process group
that only pretends. Every rank is taken to have sent what this one sent, so no time of another process is measured.

Commit: the coordinator's writer checks the parts of all ranks, and publishes the step. Every rank has an equal share of
the bytes, whole chunk files of some tensors each, or, sharded, a piece of every tensor: then there are parts x tensors
chunk files. Only the part manifests exist, as their writers would have left them; the check does not read the data.
"""

import argparse
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt.planning.grid import GridOptions
from ckpt.ranks import Ranks
from ckpt.saving.planner import Planner
from ckpt.saving.publish import publish
from ckpt.storage.commit import CheckpointRoot, PendingSave, SaveId
from ckpt.storage.documents import seal
from ckpt.storage.metadata import ArrayMeta
from tools.bench.harness import (
    Row,
    add_disk_option,
    at_least,
    megabytes,
    milliseconds,
    print_report,
    temporary_folder,
    write_json,
)

__all__ = ["TARGETS", "Figures", "add_options", "measure_commit", "measure_planning", "run"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

Figures = dict[str, list[float]]
"""Seconds of each repeat by what was done, and bytes of "memory" that the process needed for it at most."""

# What was measured, which figure of it, its title, and the most it should be: seconds, or bytes of memory.
TARGETS = (
    ("planning", "first", "planning, first, sharded", 1.0),
    ("planning", "cached", "planning, cached, sharded", 0.02),
    ("planning", "first_replicated", "planning, first, replicated", 1.0),
    ("planning", "cached_replicated", "planning, cached, replicated", 0.02),
    ("commit", "seconds", "commit check, whole chunks", 2.0),
    ("commit", "memory", "commit check, whole chunks: memory", 500e6),
    ("commit_sharded", "seconds", "commit check, a piece of all on each", 2.0),
    ("commit_sharded", "memory", "commit check, a piece of all on each: memory", 500e6),
)
_ROWS_PER_RANK = 4
_COLUMNS = (16, 64, 256, 1024)
_PLAN = "0" * 32


def measure_planning(tensors: int, ranks: int, repeats: int) -> Figures:
    """Plan in a process of its own, so that its memory can be told.

    "first" is the first save of a structure, "cached" the second one; "..._replicated" is the same when every tensor is
    whole on every rank.
    """
    return _in_own_process(_plan, tensors, ranks, repeats)


def measure_commit(parts: int, tensors: int, repeats: int, sharded: bool, folder: Path) -> Figures:
    """Check and publish in a process of its own: "seconds" from the last part to the published step."""
    with temporary_folder(folder) as temporary:
        roots = [temporary / f"{number}" for number in range(repeats)]
        for root in roots:  # not in the process that is measured: its memory must not count
            _in_own_process(_write_parts, root, parts, tensors, sharded)
        return _in_own_process(_publish, roots)


def _in_own_process(function: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs) -> _R:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **options).result()


def _most_memory() -> float:
    """Return the most bytes that this process had so far."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- planning ----------------------------------------------------------------------------------------------------------


class _Echo(Ranks):
    """Every rank sends the same."""

    def __call__(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size


def _plan(tensors: int, ranks: int, repeats: int) -> Figures:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    try:
        before = _most_memory()
        states = {"": _sharded(tensors, ranks), "_replicated": _replicated(tensors)}
        taken: Figures = {"first": [], "cached": [], "first_replicated": [], "cached_replicated": []}
        for _ in range(repeats):
            for ending, state in states.items():
                planner = Planner(_Echo(), GridOptions(), None, None)
                taken["first" + ending].append(_prepare(planner, state))
                taken["cached" + ending].append(_prepare(planner, state))
        return {**taken, "memory": [_most_memory() - before]}
    finally:
        dist.destroy_process_group()


def _prepare(planner: Planner, state: object) -> float:
    begin = time.perf_counter()
    planner.prepare(state)
    return time.perf_counter() - begin


def _sharded(tensors: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return tensors of which each rank has a few rows; a row is 64 B to 4 KB."""
    mesh = init_device_mesh("cpu", (ranks,))
    made: dict[str, torch.Tensor] = {}
    for number in range(tensors):
        columns = _COLUMNS[number % len(_COLUMNS)]
        shape, stride = torch.Size((ranks * _ROWS_PER_RANK, columns)), (columns, 1)
        local = torch.zeros(_ROWS_PER_RANK, columns)
        made[_name(number)] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return made


def _replicated(tensors: int) -> dict[str, torch.Tensor]:
    """Return tensors of 16 KiB to 1 MiB each, whose memory is not touched."""
    return {_name(number): torch.empty(256, _COLUMNS[number % len(_COLUMNS)]) for number in range(tensors)}


def _name(number: int) -> str:
    return f"layers.{number // 8}.{number % 8}.weight"


# -- commit ------------------------------------------------------------------------------------------------------------


def _write_parts(root: Path, parts: int, tensors: int, sharded: bool) -> None:
    """Write a save that has all of its parts. The files are not synced: that is not measured here."""
    checkpoints = CheckpointRoot(str(root))
    checkpoints.make()
    save = PendingSave(checkpoints, SaveId(1, checkpoints.ownership.claim(0), "0" * 16))
    save.begin(parts, _PLAN)
    Path(save.path, "model").mkdir()
    for rank in range(parts):
        path = os.path.join(save.path, "parts", f"rank_{rank:05d}.json")
        Path(path).write_bytes(seal(_part(save.save.name, rank, parts, tensors, sharded)))


def _part(name: str, rank: int, parts: int, tensors: int, sharded: bool) -> dict[str, Any]:
    """Return the manifest of what the writer of `rank` has written."""
    arrays, chunks = {}, {}
    for number in range(tensors):
        directory = f"model/{_name(number)}"
        pieces = parts if sharded else max(1, -(-parts // tensors))
        first = 0 if sharded else number * pieces % parts
        if (rank - first) % parts >= pieces:
            continue
        index = (rank - first) % parts
        chunks[directory] = [[f"c.{index}.0", 4 * 64 * 64 + 4, (rank * 2654435761 + number) % 2**32]]
        if index == 0:
            meta = ArrayMeta((64 * pieces, 64), "float32", (64, 64), attributes={"ckpt": {"name": [directory]}})
            arrays[directory] = meta.array_document()
    return {
        "save": name,
        "rank": rank,
        "world_size": parts,
        "plan": _PLAN,
        "arrays": arrays,
        "chunks": chunks,
        "values": [],
        "packed": [],
        "aliases": [],
        "times": {},
    }


def _publish(roots: list[Path]) -> Figures:
    seconds, before = [], _most_memory()
    for root in roots:
        checkpoints = CheckpointRoot(str(root))
        (save,) = checkpoints.pending()
        begin = time.perf_counter()
        publish(PendingSave(checkpoints, save), lambda: None)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "memory": [_most_memory() - before]}


# -- report ------------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--tensors", type=at_least(1), default=3000, help="of the state (default: 3000)")
    parser.add_argument("--ranks", type=at_least(1), default=1024, help="that plan (default: 1024)")
    parser.add_argument("--parts", type=at_least(1), default=4096, help="that are committed (default: 4096)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="of each (default: 3)")
    parser.add_argument("--sharded", action="store_true", help="also commit with a chunk of every tensor on every rank")
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, and print a table."""
    found = {}
    print(f"planning: {options.tensors} tensors, {options.ranks} ranks", file=sys.stderr)
    found["planning"] = measure_planning(options.tensors, options.ranks, options.repeats)
    for name, sharded in {"commit": False, "commit_sharded": True}.items():
        if not sharded or options.sharded:
            print(f"{name}: {options.tensors} tensors, {options.parts} parts", file=sys.stderr)
            folder = options.folder.resolve()
            found[name] = measure_commit(options.parts, options.tensors, options.repeats, sharded, folder)
    rows = [_row(title, found[what][key], target) for what, key, title, target in TARGETS if what in found]
    title = f"{options.tensors} tensors; {options.ranks} ranks plan, {options.parts} parts are committed"
    print_report(title, rows)
    write_json(options.json, {"rows": rows, "scale": found})


def _row(title: str, values: list[float], target: float) -> Row:
    show = megabytes if title.endswith("memory") else milliseconds
    return Row(title, values, [target] * len(values), 1.0, show)
