"""How long the coordinator's writer needs to check the parts of very many ranks, and to publish what they make.

python -m tools.bench.scale.committing [--parts 4096] [--tensors 3000] [--repeats 3] [--folder DIR]

The parts are those of a job in which every rank has an equal share of the bytes, whole chunk files of some tensors each
("owned"), or, with --sharded, a piece of every tensor: then there are parts x tensors chunk files. Only the part
manifests are there, as their writers would have left them; the data are not looked at in the check anyway.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ckpt.saving.publish import publish
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.commit import PendingSave
from ckpt.storage.documents import encode_document
from ckpt.storage.names import SaveId
from ckpt.storage.root import CheckpointRoot

__all__ = ["main", "measure_commit", "write_parts"]

_PLAN = "0" * 32


def write_parts(root: Path, parts: int, tensors: int, sharded: bool) -> None:
    """Makes a save of which all parts are there. Their files are not synced: nobody measures that here."""
    checkpoints = CheckpointRoot(str(root))
    checkpoints.make()
    save = PendingSave(checkpoints, SaveId(1, checkpoints.ownership.claim(0), "0" * 16))
    save.begin(parts, _PLAN)
    Path(save.path, "model").mkdir()
    for rank in range(parts):
        path = os.path.join(save.path, "parts", f"rank_{rank:05d}.json")
        Path(path).write_bytes(encode_document(_part(save.save.name, rank, parts, tensors, sharded)))


def _pending(root: Path) -> PendingSave:
    checkpoints = CheckpointRoot(str(root))
    (save,) = checkpoints.pending()
    return PendingSave(checkpoints, save)


def _part(name: str, rank: int, parts: int, tensors: int, sharded: bool) -> dict[str, Any]:
    """What the writer of `rank` says it has written."""
    arrays, chunks = {}, {}
    for number in range(tensors):
        directory = f"model/layers.{number // 8}.{number % 8}.weight"
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


def measure_commit(parts: int, tensors: int, repeats: int, sharded: bool, folder: Path) -> dict[str, list[float]]:
    """Seconds from the last part to the published step; bytes of memory the process needed for it at most."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="suite-", dir=folder) as temporary:
        roots = [Path(temporary) / f"{number}" for number in range(repeats)]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its memory must not count here
            for root in roots:
                pool.submit(write_parts, root, parts, tensors, sharded).result()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for root in roots:
            begin = time.perf_counter()
            publish(_pending(root), lambda: None)
            seconds.append(time.perf_counter() - begin)
        memory = 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"seconds": seconds, "memory": [memory]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale.committing", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sharded", action="store_true", help="every rank has a chunk of every tensor")
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    print(json.dumps(measure_commit(options.parts, options.tensors, options.repeats, options.sharded, folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
