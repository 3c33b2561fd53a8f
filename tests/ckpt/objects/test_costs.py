"""What saves and restores cost in a bucket: requests and bytes, counted by the proxy."""

import re
from collections import Counter
from typing import Any

import numpy as np
import torch

import ckpt
from tests.support import run_ranks
from tests.support.object_server import Bucket, Request

_PACK = 2_000_000


def _sharded(world_size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    return {f"w{n}": distribute_tensor(torch.full((1000, 500), float(n)), mesh, [Shard(0)]) for n in range(6)}


def _save_three(rank: int, world_size: int, bucket_url: str) -> list[str]:
    """Save three times; the client names its rank. Return the names of the saves."""
    options = {"user_agent": f"rank-{rank}"}
    with ckpt.Checkpointer(bucket_url, file_bytes=_PACK, keep_last=1, storage_options=options) as checkpointer:
        state = _sharded(world_size)
        for step in (1, 2, 3):
            checkpointer.save(state, step)
        return [str(step) for step in checkpointer.all_steps()]


def test_requests_of_a_save(bucket: Bucket) -> None:
    """Of each rank: a put for each pack file and one for its part; of rank 0 a constant number more for the job."""
    results = run_ranks(_save_three, 2, bucket.url, timeout=50, env=bucket.env)
    assert [result.value for result in results] == [["3"], ["3"]]
    for rank in (0, 1):
        mine = [each for each in bucket.proxy.requests if each.headers.get("user-agent") == f"rank-{rank}"]
        last = [each for each in mine if "step_00000003-" in each.path]
        puts = [each for each in last if each.method == "PUT"]
        packs = [each for each in puts if "/packs/" in each.path]
        assert len(packs) == 3, "6 MB of 12 MB, in files of 2 MB"
        assert sum(each.nbytes for each in packs) < 1.01 * 6e6
        assert len(puts) == len(packs) + (7 if rank == 0 else 1), [each.path for each in puts]
        gets = Counter(each.method for each in last)
        looks = len([each for each in last if each.method == "GET" and "/records/" in each.path])
        assert gets["GET"] + gets["HEAD"] - looks <= (7 if rank == 0 else 0), [each.path for each in last]
    assert not [each for each in bucket.proxy.requests if "uploads" in each.path], "no multipart uploads"


def _ranges(requests: list[Request]) -> list[tuple[str, int, int]]:
    found = []
    for each in requests:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", each.headers.get("range", ""))
        if match is not None:
            found.append((each.path, int(match[1]), int(match[2]) + 1))
    return found


def test_a_read_fetches_what_it_needs(bucket: Bucket) -> None:
    state = {"large": torch.randn(4000, 1000), "small": {f"s{n}": torch.randn(50) for n in range(40)}}
    with ckpt.Checkpointer(bucket.url, file_bytes=8_000_000, inner_bytes=1 << 18) as checkpointer:
        checkpointer.save(state, 1)
    with ckpt.open(bucket.url) as checkpoint:
        before = len(bucket.proxy.requests)
        rows = checkpoint["large"][1000:1010]
        assert np.array_equal(rows, state["large"][1000:1010].numpy())
        (one,) = _ranges(bucket.proxy.requests[before:])
        assert one[2] - one[1] <= 2 * (1 << 18) + 8
    restored = {"large": torch.zeros(4000, 1000), "small": {f"s{n}": torch.zeros(50) for n in range(40)}}
    with ckpt.Checkpointer(bucket.url) as checkpointer:
        before = len(bucket.proxy.requests)
        checkpointer.restore(restored)
        ranges = _ranges(bucket.proxy.requests[before:])
    assert torch.equal(restored["large"], state["large"])
    nbytes = sum(end - start for _, start, end in ranges)
    assert nbytes < 1.05 * 4 * (4000 * 1000 + 40 * 50)
    assert len(ranges) <= 4, "16 MB in files of 8 MB; what is near each other is fetched at once"
    assert len(bucket.proxy.requests) - before < len(ranges) + 25


def test_a_policy_that_looks_at_metrics_reads_each_step_once(bucket: Bucket) -> None:
    with ckpt.Checkpointer(bucket.url, keep=ckpt.Best("loss", 20)) as checkpointer:
        costs = []
        for step in range(1, 17):
            before = len(bucket.proxy.requests)
            checkpointer.save({"w": torch.ones(3)}, step, metrics={"loss": 1 / step})
            made = bucket.proxy.requests[before:]
            costs.append(sum(each.method == "GET" and "/readers" not in each.path for each in made))
        assert checkpointer.all_steps() == list(range(1, 17))
    assert max(costs[5:]) < 31, costs
