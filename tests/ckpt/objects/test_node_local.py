"""Pack files on the disks of nodes, the root and the mirror in an S3 bucket."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.events import MirrorDone
from ckpt.storage.roots import open_root
from tests.ckpt.crash.killers import wait_until
from tests.ckpt.mirroring.support import STALLED
from tests.support import run_ranks
from tests.support.object_server import Bucket

pytestmark = pytest.mark.timeout(120)

_VALUES = torch.arange(100_000.0)


def _job(rank: int, world_size: int, urls: tuple[str, str], disks: Path, saves: list[int], copies: bool) -> Any:
    """Restore and save; return the step and how many files came from the mirror.

    With `copies`, each save is in the mirror before the next one, which would not remove a step that is being copied.
    """
    root, copy = urls
    mirror = ckpt.Mirror(copy, bandwidth=None if copies else STALLED, close_timeout=timedelta(seconds=40 * copies))
    disk = disks / f"node{rank}"
    copied: list[int] = []
    with (
        ckpt.observe(lambda event: copied.append(event.step) if isinstance(event, MirrorDone) else None),
        ckpt.Checkpointer(
            root, node_local=disk, mirror=mirror, staging=ckpt.Staging(file_bytes=100_000), keep=ckpt.Latest(2)
        ) as checkpointer,
    ):
        state = {"own": ckpt.PerRank(torch.zeros(100_000)), "step": 0}
        found = checkpointer.restore(state)
        report = checkpointer.last_restore
        if found is not None:
            assert torch.equal(state["own"].value, _VALUES + found + rank)

        def is_copied(step: int) -> bool:
            checkpointer.maybe_finalize()
            return step in copied

        for step in saves:
            checkpointer.save({"own": ckpt.PerRank(_VALUES + step + rank), "step": step}, step)
            if copies and rank == 0:  # which alone is told
                wait_until(lambda step=step: is_copied(step), "the copy", 40)  # type: ignore[misc]
            torch.distributed.barrier()
        if saves:
            wait_until(lambda: len(checkpointer.all_steps()) <= 2, "the removal")
            torch.distributed.barrier()
        return None if report is None else (found, report.mirror_files)


def _run(bucket: Bucket, disks: Path, *saves: int, copies: bool = True) -> list[Any]:
    urls = f"{bucket.url}/steps", f"{bucket.url}/copies"
    results = run_ranks(_job, 2, urls, disks, list(saves), copies, timeout=90, env=bucket.env)
    return [result.value for result in results]


def test_saves_and_a_replaced_node(bucket: Bucket, tmp_path: Path) -> None:
    _run(bucket, tmp_path, 1, 2, 3)
    puts = [each.key for each in bucket.proxy.requests if each.method == "PUT"]
    assert not [key for key in puts if "/steps/" in key and "/packs/" in key]
    copied = [key for key in puts if "/copies/" in key and "/packs/" in key]
    assert copied
    assert len(copied) == len(set(copied)), "each file is sent once"
    assert open_root(f"{bucket.url}/steps").steps() == [2, 3]
    for rank in (0, 1):
        saves = sorted(path.name for path in (tmp_path / f"node{rank}").glob("step_*"))
        assert [int(name[5:13]) for name in saves] == [2, 3]
    with ckpt.open(f"{bucket.url}/copies", 3) as step:
        assert torch.equal(step["own@rank1"].torch(), _VALUES + 4), "a copy is like that of any other step"
    shutil.rmtree(tmp_path / "node0")
    (found, files), from_disk = _run(bucket, tmp_path, copies=False)
    assert (found, from_disk) == (3, (3, 0))
    assert files > 0
