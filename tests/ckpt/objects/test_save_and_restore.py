"""Checkpoints in an S3 bucket: real ranks, real writer processes, a real server on loopback."""

import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.storage.stores import open_store
from ckpt.storage.stores.interface import StorageOptions
from tests.support import run_ranks
from tests.support.object_server import Bucket, S3Server, bucket_of
from tests.support.seeds import random_bytes
from tests.support.selection import full_only


def _state(step: int) -> dict[str, Any]:
    weights = {f"w{n}": torch.arange(30_000, dtype=torch.float32) * step + n for n in range(5)}
    return {"weights": weights, "small": torch.tensor([step, 1]), "step": step, "name": "a b"}


def _assert_equal(state: dict[str, Any], step: int) -> None:
    expected = _state(step)
    for name, tensor in expected["weights"].items():
        assert torch.equal(state["weights"][name], tensor), name
    assert state["small"].tolist() == [step, 1]
    assert (state["step"], state["name"]) == (step, "a b")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_one_rank(bucket: Bucket, compression: str | None, queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(
        bucket.url, queue=queue, staging=ckpt.Staging(file_bytes=200_000, compression=compression)
    ) as checkpointer:
        assert checkpointer.root == bucket.url
        assert checkpointer.restore(_state(0)) is None
        checkpointer.save(_state(1), 1, metrics={"loss": 0.5})
        checkpointer.save(_state(2), 2)
        assert checkpointer.all_steps() == [1, 2]
    state = _state(0)
    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        assert checkpointer.restore(state) == 2
        _assert_equal(state, 2)
        report = checkpointer.last_restore
        assert report is not None
        assert report.storage_bytes == sum(t.nbytes for t in _state(2)["weights"].values()) + 16
        assert checkpointer.restore(state, 1) == 1
    _assert_equal(state, 1)
    _assert_equal(ckpt.load(bucket.url, 2), 2)
    with ckpt.open(bucket.url, 1) as checkpoint:
        assert checkpoint.summary["metrics"] == {"loss": 0.5}
        expected = _state(1)["weights"]["w3"].numpy()
        assert np.array_equal(checkpoint["weights/w3"][100:29_000], expected[100:29_000])
        place = checkpoint.path
    with ckpt.open(place) as checkpoint:
        assert checkpoint.step == 1


def _sharded(rank: int, world_size: int, url: str, step: int | None) -> dict[str, Any]:
    """Save a sharded state, or restore one and return what this rank has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    full = {f"w{n}": torch.arange(64.0 * (200 + 40 * n)).reshape(-1, 64) for n in range(4)}
    scale = 1.0 if step is not None else 0.0
    state: dict[str, Any] = {name: distribute_tensor(t * scale, mesh, [Shard(0)]) for name, t in full.items()}
    state["own"] = ckpt.PerRank(torch.full((3,), float(rank)))
    with ckpt.Checkpointer(url, staging=ckpt.Staging(file_bytes=100_000)) as checkpointer:
        if step is not None:
            checkpointer.save(state, step)
            return {"steps": checkpointer.all_steps()}
        assert checkpointer.restore(state, strict=world_size == 2) == 7
        return {name: state[name].full_tensor().numpy() for name in full}


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(2, 2, marks=full_only), (2, 1), pytest.param(1, 2, marks=full_only)],  # in directories: all of them
)
def test_ranks_and_resharding(bucket: Bucket, before: int, after: int) -> None:
    for result in run_ranks(_sharded, before, bucket.url, 7, timeout=50, env=bucket.env):
        assert result.value["steps"] == [7]
    for result in run_ranks(_sharded, after, bucket.url, None, timeout=50, env=bucket.env):
        for n in range(4):
            assert np.array_equal(
                result.value[f"w{n}"], np.arange(64.0 * (200 + 40 * n), dtype=np.float32).reshape(-1, 64)
            )


def test_retention_deletes_the_objects(bucket: Bucket) -> None:
    with ckpt.Checkpointer(bucket.url, keep=ckpt.Latest(1) | ckpt.Best("loss")) as checkpointer:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
            checkpointer.save(_state(step), step, metrics={"loss": loss})
        assert checkpointer.all_steps() == [2, 4]
        checkpointer.pin(2)
        with pytest.raises(ckpt.StorageError, match="pinned"):
            checkpointer.delete(2)
        assert checkpointer.unpin(2)
        with ckpt.open(bucket.url, 2), pytest.raises(ckpt.StorageError, match="being read"):
            checkpointer.delete(2)
        checkpointer.delete(2)
        with pytest.raises(ckpt.CheckpointNotFoundError):
            checkpointer.delete(2)
        assert checkpointer.all_steps() == [4]
    saves = {key.split("/")[3] for key in _keys(bucket) if "/saves/" in key}
    assert [name.split("-")[0] for name in saves] == ["step_00000004"]
    records = {key.split("/")[-2].split("-")[0] for key in _keys(bucket) if "/records/" in key}
    assert records == {f"step_0000000{n}" for n in (1, 2, 3, 4)}, "no late process finds a save undecided"


def test_a_damaged_step_is_skipped(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        for step in (1, 2):
            checkpointer.save(_state(step), step)
    with ckpt.open(bucket.url, 2) as checkpoint:
        index = checkpoint.index
        place = index.packs.place(index.tensors["weights", "w0"].boxes[0], (0,))
        pack = f"team/run7{checkpoint.path.removeprefix(bucket.url)}/{place.file}"
    status, data = bucket.server.request("GET", f"/{bucket.name}/{pack}")
    assert status == 200, data
    bucket.server.request("PUT", f"/{bucket.name}/{pack}", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    state = _state(0)
    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        with pytest.raises(ckpt.CheckpointCorruptError, match="tensor small"):
            checkpointer.restore(state, 2)
        assert checkpointer.restore(state) == 1
        _assert_equal(state, 1)
        bucket.server.request("PUT", f"/{bucket.name}/{pack}", data[:100])
        with pytest.raises(ckpt.CheckpointCorruptError, match="ends at offset 100"):
            checkpointer.restore(state, 2)
        bucket.server.request("DELETE", f"/{bucket.name}/{pack}")
        with pytest.raises(ckpt.CheckpointCorruptError, match="is missing"):
            checkpointer.restore(state, 2)


def test_evaluation_without_permission_to_write(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        checkpointer.save(_state(1), 1)
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    bucket.proxy.rule = lambda request: None if request.method in ("GET", "HEAD") else (403, denied)
    state = _state(0)
    with ckpt.Checkpointer(bucket.url, read_only=True) as checkpointer:
        assert checkpointer.restore(state) == 1
    _assert_equal(state, 1)
    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        assert checkpointer.restore(state) == 1
        with pytest.raises(ckpt.CheckpointError, match="AccessDenied"):
            checkpointer.save(_state(2), 2)


def test_the_options_reach_the_writers_and_no_text(bucket: Bucket, tmp_path: Path) -> None:
    secret = "a-very-secret-key-0123456789"
    options = bucket.options | {"secret_access_key": secret}
    for name in bucket.env:
        del os.environ[name]
    with ckpt.Checkpointer(bucket.url, storage_options=options) as checkpointer:
        checkpointer.save(_state(1), 1)
        processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert secret not in processes
        task = checkpointer.save_request(_state(2), 2).async_fn.task
        assert secret not in repr(task)
        assert task.storage is not None
        checkpointer.save(_state(3), 3)
    assert ckpt.load(bucket.url, 1, storage_options=options)["step"] == 1
    for key in _keys(bucket):
        status, data = bucket.server.request("GET", f"/{bucket.name}/{key}")
        assert (status, secret.encode() in data) == (200, False)
    with pytest.raises(ckpt.StorageError) as raised:
        ckpt.load("s3://no-such-bucket-here/x", storage_options=options)
    assert secret not in str(raised.value)
    assert "bucket does not exist" in str(raised.value)


def test_http_needs_a_loopback_endpoint() -> None:
    options = {"endpoint_url": "http://10.1.2.3:9000", "region": "x"}
    with pytest.raises(ckpt.StorageError, match="not encrypted"):
        ckpt.Checkpointer("s3://bucket/run", storage_options=options)
    ckpt.Checkpointer("s3://bucket/run", storage_options=options | {"allow_http": True}).close()


def _keys(bucket: Bucket) -> list[str]:
    import re

    _, text = bucket.server.request("GET", f"/{bucket.name}?list-type=2&max-keys=1000")
    return re.findall("<Key>([^<]*)</Key>", text.decode())


def test_zarr_reads_where_the_chunks_lie(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(bucket.url, queue=queue) as checkpointer:
        checkpointer.save(_state(3), 3)
    import pickle

    import zarr

    for name in bucket.env:
        del os.environ[name]
    with ckpt.zarr_store(bucket.url, storage_options=bucket.options) as opened:
        store = pickle.loads(pickle.dumps(opened))
        array: Any = zarr.open_group(store, mode="r")["weights/w2"]
        assert np.array_equal(array[:], _state(3)["weights"]["w2"].numpy())
        store.close()


def test_after_a_fault_what_is_staged_is_published(bucket: Bucket) -> None:
    state = {"weights": _state(1)["weights"], "small": torch.tensor([1, 1])}
    with ckpt.Checkpointer(bucket.url) as checkpointer:
        checkpointer.save(state, 1)
        checkpointer.register(**state)
        state["small"].fill_(2)
        checkpointer.async_save(state, 2)
        state["small"].fill_(3)
        checkpointer.bridge.recover_from_fault(timedelta(seconds=20))
        assert checkpointer.all_steps() == [1, 2]
        assert (checkpointer.resume_step, state["small"].tolist()) == (2, [2, 2])


def test_a_put_copies_nothing(s3_server: S3Server) -> None:
    """What the process needs at most while 64 MiB are put from memory, counted by the kernel."""
    with bucket_of(s3_server) as made:
        options = made.options | {"endpoint_url": f"http://127.0.0.1:{s3_server.port}"}
        store = open_store(made.url, StorageOptions.of(options, 60.0))
        store.put("first", bytes(1 << 20))
        memory = memoryview(bytearray(random_bytes(64 << 20)))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _peak_bytes()
        store.put("large", memory)
        assert _peak_bytes() - before < 16 << 20
        assert store.read("large", 1000, 5000) == memory[1000:6000]


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_every_put_asks_for_encryption(bucket: Bucket, queue: ckpt.AsyncCallsQueue) -> None:
    options = {"server_side_encryption": "aws:kms", "sse_kms_key_id": "arn:aws:kms:us-east-1:111122223333:key/k"}
    with ckpt.Checkpointer(bucket.url, queue=queue, storage_options=options) as checkpointer:
        checkpointer.save(_state(1), 1)
    puts = [request.headers for request in bucket.proxy.requests if request.method == "PUT"]
    assert len(puts) > 6
    for headers in puts:
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == options["sse_kms_key_id"]


def test_steps_are_exported(bucket: Bucket, tmp_path: Path, queue: ckpt.AsyncCallsQueue) -> None:
    from safetensors.torch import load_file

    export = ckpt.ExportOptions(tmp_path / "out", every=2, format="safetensors")
    options = bucket.options
    for name in bucket.env:
        del os.environ[name]
    with ckpt.Checkpointer(bucket.url, queue=queue, export=export, storage_options=options) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"w": torch.full((30,), float(step))}, step)
    (file,) = (tmp_path / "out" / "step_00000002").glob("*.safetensors")
    assert load_file(file)["w"].tolist() == [2.0] * 30


def test_adapters_of_directories_refuse_urls() -> None:
    from ckpt.storage.root import CheckpointRoot

    with pytest.raises(ckpt.StorageError, match="only directories"):
        CheckpointRoot("s3://bucket/run")
