"""A save of very many ranks, on one machine: planning, the commit, and the index that a restore opens.

Planning: this process plays one of the ranks. The tensors are DTensors over a mesh of all ranks, in a process group
that only pretends. Every rank is taken to have sent what this one sent, so no time of another process is measured.

Commit: the coordinator's writer checks the parts of all ranks, and publishes the step. Every rank has a piece of every
tensor. Only the index and the part manifests exist, as their writers would have left them; the check does not read the
data.

Agreement: ranks with different names (stages of a pipeline, replicas of these on their own meshes, experts) tell each
other what they have, before a plan and in a restore; see `agreement`.

Database: the coordinator's writer makes the two files with which tensorstore reads a step, once for all saves of a
plan, while it writes its pack.

Open: one rank reads the index of this step, checks it, and finds where its piece of every tensor lies.
"""

import argparse
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt.loading.consistency import read_index
from ckpt.planning.boxes import Placement, Sharding
from ckpt.planning.chunk_grid import GridOptions
from ckpt.planning.description import StateDescription, TensorSpec
from ckpt.planning.save_plan import SavePlan, make_save_plan
from ckpt.ranks.collectives import Ranks
from ckpt.saving.for_readers import IN_PART, database_files, files_of_plan
from ckpt.saving.host_memory import HostLimit
from ckpt.saving.plan_cache import CachedPlan, PlanCache
from ckpt.saving.publish import publish
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.commit import PendingSave
from ckpt.storage.documents import encode_document
from ckpt.storage.names import DATABASE_CHUNKS, INDEX, SaveId, part_name
from ckpt.storage.pack_index import ALIGNMENT, PackIndex, Region, StoredArray
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.zarr_entries import Hierarchy
from tools.bench.agreement import STATES, measure_agreement
from tools.bench.harness import (
    Row,
    add_disk_option,
    at_least,
    kilobytes,
    megabytes,
    milliseconds,
    print_report,
    temporary_folder,
    write_json,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

Figures = dict[str, list[float]]
"""Seconds of each repeat by what was done, and bytes of "memory" that the process needed for it at most."""

# What was measured, which figure of it, its title, and the most it should be: seconds, or bytes.
TARGETS = (
    ("planning", "first", "planning, first, sharded", 1.0),
    ("planning", "cached", "planning, cached, sharded", 0.01),
    ("planning", "first_replicated", "planning, first, replicated", 1.0),
    ("planning", "cached_replicated", "planning, cached, replicated", 0.01),
    ("commit", "seconds", "commit, from the last part to the step", 5.0),
    ("commit", "memory", "commit: memory", 500e6),
    ("commit", "index", "index: size", 4e6),
    ("commit", "part", "largest part manifest: size", 100e3),
    ("open", "seconds", "open the index, find a rank's pieces", 0.3),
    ("open", "memory", "open the index: memory", 100e6),
    ("database", "1000", "database, 1,000 chunks", 0.1),
    ("database", "1000_bytes", "database, 1,000 chunks: size", 100e3),
    ("database", "100000", "database, 100,000 chunks", 0.5),
    ("database", "100000_bytes", "database, 100,000 chunks: size", 1e6),
    ("database", "1000000", "database, 1,000,000 chunks", 5.0),
    ("database", "1000000_bytes", "database, 1,000,000 chunks: size", 10e6),
    ("pipeline", "exchange", "plan, pipeline stages: CPU of a rank", 2.0),
    ("pipeline", "exchange_bytes", "plan, pipeline stages: moved size", 1e6),
    ("pipeline", "restore", "restore, pipeline stages: CPU of a rank", 0.5),
    ("pipeline", "restore_bytes", "restore, pipeline stages: moved size", 1e6),
    ("replicas", "exchange", "plan, replicas of stages: CPU of a rank", 2.0),
    ("replicas", "exchange_bytes", "plan, replicas of stages: moved size", 1e6),
    ("replicas", "restore", "restore, replicas of stages: CPU of a rank", 0.5),
    ("replicas", "restore_bytes", "restore, replicas of stages: moved size", 1e6),
    ("experts", "exchange", "plan, experts: CPU of a rank", 2.0),
    ("experts", "exchange_bytes", "plan, experts: moved size", 1e6),
    ("experts", "restore", "restore, experts: CPU of a rank", 0.5),
    ("experts", "restore_bytes", "restore, experts: moved size", 1e6),
)
BYTES = frozenset({"memory", "index", "part"} | {key for _, key, *_ in TARGETS if key.endswith("_bytes")})
"""The figures that are bytes; the others are seconds."""

_ROWS_PER_RANK = 4
_DATABASES = {"1000": (100, 10), "100000": (1000, 100), "1000000": (1000, 1000)}  # tensors, and chunks of each
_COLUMNS = (16, 64, 256, 1024)


def measure_planning(tensors: int, ranks: int, repeats: int) -> Figures:
    """Plan in a process of its own, so that its memory can be told.

    "first" is the first save of a structure, "cached" the second one; "..._replicated" is the same when every tensor is
    whole on every rank.
    """
    return _in_own_process(_plan, tensors, ranks, repeats)


def measure_commit(parts: int, tensors: int, repeats: int, folder: Path) -> dict[str, Figures]:
    """Commit, then open, each in a process of its own.

    "commit" has "seconds" from the last part to the published step, and the bytes of the "index" and of a "part";
    "open" has the "seconds" until a rank knows where its pieces are.
    """
    with temporary_folder(folder) as temporary:
        roots = [temporary / f"{number}" for number in range(repeats)]
        for root in roots:  # not in the process that is measured: its memory must not count
            _in_own_process(_write_parts, root, parts, tensors)
        found = {"commit": _in_own_process(_publish, roots), "open": _in_own_process(_open, roots)}
        return found


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


class _NoSlots:
    """No staging memory, as nothing is staged."""

    def meet(self) -> None:
        """Meet no rank."""

    def fit(self, plan: CachedPlan) -> None:
        """Fit nothing."""

    def cancel_fit(self) -> None:
        """Leave nothing."""


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
                planner = PlanCache(_Echo(), GridOptions(), HostLimit(2), None)
                taken["first" + ending].append(_prepare(planner, state))
                taken["cached" + ending].append(_prepare(planner, state))
        return {**taken, "memory": [_most_memory() - before]}
    finally:
        dist.destroy_process_group()


def _prepare(planner: PlanCache, state: object) -> float:
    begin = time.perf_counter()
    planner.prepare(state, slots=_NoSlots())
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


def _write_parts(root: Path, parts: int, tensors: int) -> None:
    """Write a save that has all of its parts. The files are not synced: that is not measured here."""
    sharding = Sharding((parts,), tuple(range(parts)), (Placement(0),))
    specs: dict[tuple[str | int, ...], TensorSpec] = {
        (_name(number),): TensorSpec(
            "float32", 4, (parts * _ROWS_PER_RANK, _COLUMNS[number % len(_COLUMNS)]), sharding=sharding
        )
        for number in range(tensors)
    }
    plan = make_save_plan([StateDescription(specs)] * parts, GridOptions())
    simulate_save(root, plan)


def simulate_save(root: Path, plan: SavePlan) -> PendingSave:
    """Leave what the writers of all ranks do before the commit, but for the packs; return the save."""
    checkpoints = CheckpointRoot(str(root))
    checkpoints.make()
    pending = PendingSave(checkpoints, SaveId(1, checkpoints.ownership.claim(0), "0" * 16))
    pending.begin(plan.world_size, plan.digest)
    files: dict[int, list[list[int]]] = {}
    for (rank, number), nbytes in plan.index.files().items():
        files.setdefault(rank, []).append([number, nbytes, (rank * 2654435761 + number) % 2**32])
    Path(pending.path, INDEX).write_bytes(plan.index_bytes)
    for_readers = files_of_plan(plan.index_bytes, plan.world_size, DATABASE_CHUNKS)
    for name, data in for_readers.files.items():
        Path(pending.path, name).write_bytes(data)
    for rank in range(plan.world_size):
        part: dict[str, Any] = {"save": pending.save.name, "rank": rank, "plan": plan.digest}
        part |= {"world_size": plan.world_size, "files": sorted(files.get(rank, []))}
        part |= {"values": [], "aliases": [], "containers": [], "times": {}}
        if rank == 0:
            part[IN_PART] = for_readers.in_part
        path = Path(pending.path, part_name(rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_document(part))
    return pending


def _publish(roots: list[Path]) -> Figures:
    found: Figures = {"seconds": [], "index": [], "part": []}
    before = _most_memory()
    for root in roots:
        checkpoints = CheckpointRoot(str(root))
        (save,) = checkpoints.pending()
        begin = time.perf_counter()
        publish(PendingSave(checkpoints, save), lambda: None)
        found["seconds"].append(time.perf_counter() - begin)
        step = Path(checkpoints.step_path(save.step))
        found["index"].append((step / INDEX).stat().st_size)
        found["part"].append(max(path.stat().st_size for path in (step / "parts").rglob("rank_*.json")))
    return {**found, "memory": [_most_memory() - before]}


def _open(roots: list[Path]) -> Figures:
    seconds, before = [], _most_memory()
    for root in roots:
        checkpoints = CheckpointRoot(str(root))
        path = checkpoints.step_path(1)
        begin = time.perf_counter()
        index = read_index(path)
        rank = index.world_size // 2
        for tensor in index.tensors.values():
            (array,) = tensor.boxes
            index.packs.place(array, (rank * _ROWS_PER_RANK // array.meta.chunk_shape[0], 0))
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "memory": [_most_memory() - before]}


# -- database ----------------------------------------------------------------------------------------------------------


def _database(repeats: int) -> Figures:
    found: Figures = {}
    for name, (tensors, chunks) in _DATABASES.items():
        index = _many_chunks(tensors, chunks)
        for _ in range(repeats):
            begin = time.perf_counter()
            files = database_files(Hierarchy.of(index))
            found.setdefault(name, []).append(time.perf_counter() - begin)
            found.setdefault(f"{name}_bytes", []).append(sum(map(len, files.values())))
    return found


def _many_chunks(tensors: int, chunks: int) -> PackIndex:
    """Return the index of tensors of which each of `chunks` ranks has some rows, in four files of its pack."""
    ranks = np.arange(chunks)
    regions = tuple(Region(ranks, np.full(chunks, number), np.zeros(chunks, np.int64)) for number in range(4))
    meta = ArrayMeta((_ROWS_PER_RANK * chunks, 512), "float32", (_ROWS_PER_RANK, 512))
    step = -(-meta.largest_encoded_bytes // ALIGNMENT) * ALIGNMENT
    arrays = (StoredArray(n, (_name(n),), meta, n % 4, n // 4 * step, (0, 0), meta.shape) for n in range(tensors))
    return PackIndex(tuple(arrays), regions)


# -- report ------------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--tensors", type=at_least(1), default=2160, help="of the state (default: 2160)")
    parser.add_argument("--ranks", type=at_least(1), default=4096, help="that plan (default: 4096)")
    parser.add_argument("--parts", type=at_least(1), default=4096, help="that are committed (default: 4096)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="of each (default: 3)")
    parser.add_argument("--names", type=at_least(1), default=30_000, help="of ranks that differ (default: 30000)")
    parser.add_argument("--different", type=at_least(2), default=1024, help="ranks that differ (default: 1024)")
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, and print a table."""
    found = {}
    print(f"planning: {options.tensors} tensors, {options.ranks} ranks", file=sys.stderr)
    found["planning"] = measure_planning(options.tensors, options.ranks, options.repeats)
    print(f"commit, open: {options.tensors} tensors, {options.parts} parts", file=sys.stderr)
    found |= measure_commit(options.parts, options.tensors, options.repeats, options.folder.resolve())
    print("database", file=sys.stderr)
    found["database"] = _in_own_process(_database, options.repeats)
    for state in STATES:
        print(f"{state}: {options.names} names, {options.different} ranks", file=sys.stderr)
        found[state] = _in_own_process(measure_agreement, state, options.names, options.different, options.repeats)
    rows = [_row(title, found[what][key], target) for what, key, title, target in TARGETS if what in found]
    title = f"{options.tensors} tensors; {options.ranks} ranks plan, {options.parts} parts are committed"
    print_report(title, rows)
    write_json(options.json, {"rows": rows, "scale": found})


def _row(title: str, values: list[float], target: float) -> Row:
    show = megabytes if title.endswith("memory") else kilobytes if title.endswith("size") else milliseconds
    return Row(title, values, [target] * len(values), 1.0, show)
