"""What saves and restores cost in a bucket: requests and bytes, counted by the proxy."""

import re
import urllib.parse
from collections import Counter
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt.storage.roots import open_root
from tests.ckpt.crash.killers import wait_until
from tests.support import run_ranks
from tests.support.object_server import Bucket, Request

_PACK = 2_000_000


def _sharded(world_size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    return {f"w{n}": distribute_tensor(torch.full((1000, 500), float(n)), mesh, [Shard(0)]) for n in range(6)}


def _save_five(rank: int, world_size: int, bucket_url: str) -> list[str]:
    """Save five times, each when the step before is deleted; the client names its rank. Return the steps left."""
    options = {"user_agent": f"rank-{rank}"}
    watched = open_root(bucket_url)
    with ckpt.Checkpointer(
        bucket_url, staging=ckpt.Staging(file_bytes=_PACK), keep=1, storage_options=options
    ) as checkpointer:
        state = _sharded(world_size)
        for step in range(1, 6):
            checkpointer.save(state, step)
            wait_until(lambda: len(watched.saves()) == 1 and watched.removed() == [], "the removal")
        return [str(step) for step in checkpointer.all_steps()]


def _kind(request: Request, step: int) -> str:
    """Return what a request is for, in the words of `_STEADY`."""
    path, _, query = request.path.partition("?")
    own = f"step_{step:08d}-" in path
    if "list-type" in query:
        prefix = urllib.parse.parse_qs(query)["prefix"][0]
        folder = prefix.removeprefix("/team/run7/").removeprefix("team/run7/").strip("/").split("/")
        return "LIST parts" if folder[-2:-1] == ["parts"] else f"LIST {folder[0]}"
    if "/records/" in path:
        return f"{request.method} record" if own else f"{request.method} another record"
    folders = path.split("/saves/")[-1].split("/")[1:]
    return f"{request.method} {folders[0]}" if own else request.method


def _is_of_a_lease(request: Request) -> bool:
    """Return whether a request is one of those that are made every ten seconds."""
    is_claim = request.method == "HEAD" and re.search(r"/owner/\d+\.json", request.path) is not None
    return is_claim or "/renewed" in request.path or "/leases/" in request.path


_LOOKS = {"LIST parts", "GET record"}  # in a wait: more of them if the other ranks take longer
_STEADY = [
    {
        "PUT intent.json": 1,
        "LIST owner": 4,  # the token: before the save begins and is published, before and while a step is removed
        "PUT packs": 3,
        "PUT index.json": 1,
        "PUT references.json": 1,
        "PUT manifest.ocdbt": 1,
        "PUT ocdbt.nodes": 1,
        "PUT parts": 1,
        "GET parts": 1,  # of the other rank
        "PUT state.json": 1,
        "PUT zarr.json": 1,
        "LIST records": 2,  # which step it continues, and before it is published
        "PUT record": 1,
        "HEAD intent.json": 1,
        "LIST readers": 1,
        "LIST pins": 2,  # before the step is marked as one to be removed, and after that
        "PUT another record": 2,  # of the step that is removed: before and after the look at the token
        "LIST saves": 1,  # its objects
        "POST": 1,  # which deletes them
    },
    {"PUT packs": 3, "PUT parts": 1},
]
"""What the ranks ask for in each save, beside looks; in the words of the docs, `docs/object_stores.md`."""


def test_requests_of_a_save(bucket: Bucket) -> None:
    """Of each rank: a put for each pack file, one for its part, and its looks; of rank 0 a constant number more."""
    results = run_ranks(_save_five, 2, bucket.url, timeout=50, env=bucket.env)
    assert [result.value for result in results] == [["5"], ["5"]]
    requests = [each for each in bucket.proxy.requests if not _is_of_a_lease(each)]
    for rank, expected in enumerate(_STEADY):
        mine = [each for each in requests if each.headers.get("user-agent") == f"rank-{rank}"]
        begins = {step: next(n for n, each in enumerate(mine) if f"step_{step:08d}-" in each.path) for step in (4, 5)}
        steady = mine[begins[4] : begins[5]]
        counts = Counter(_kind(each, 4) for each in steady)
        others = {kind: count for kind, count in counts.items() if kind not in _LOOKS}
        assert others == expected, [f"{each.method} {each.path}" for each in steady]
        assert sum(each.nbytes for each in steady if "/packs/" in each.path) < 1.01 * 6e6
        assert counts["LIST parts"] >= 1 if rank == 0 else counts["GET record"] >= 2
    assert not [each for each in bucket.proxy.requests if "uploads" in each.path], "no multipart uploads"


def _ranges(requests: list[Request]) -> list[tuple[str, int, int]]:
    found = []
    for each in requests:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", each.headers.get("range", ""))
        if match is not None and "/packs/" in each.path:
            found.append((each.path, int(match[1]), int(match[2]) + 1))
    return found


def test_a_read_fetches_what_it_needs(bucket: Bucket) -> None:
    state = {"large": torch.randn(4000, 1000), "small": {f"s{n}": torch.randn(50) for n in range(40)}}
    with ckpt.Checkpointer(bucket.url, staging=ckpt.Staging(file_bytes=8_000_000, inner_bytes=1 << 18)) as checkpointer:
        checkpointer.save(state, 1)
    with ckpt.open(bucket.url) as checkpoint:
        before = len(bucket.proxy.requests)
        rows = checkpoint["large"][1000:1010]
        assert np.array_equal(rows, state["large"][1000:1010].numpy())
        one, of_index = _ranges(bucket.proxy.requests[before:])
        assert one[2] - one[1] <= 2 * (1 << 18) + 8
        assert of_index[2] - of_index[1] < 1024, "the index of the shard, once"
        before = len(bucket.proxy.requests)
        assert np.array_equal(checkpoint["large"][1002:1005], rows[2:5])
        (again,) = _ranges(bucket.proxy.requests[before:])
        assert one[1] <= again[1] < again[2] <= one[2]
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
