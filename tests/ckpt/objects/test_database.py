"""A step in a bucket, and a copy of one in a mirror there, are databases of tensorstore."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.storage.names import MANIFEST, NODES
from ckpt.storage.roots import open_root
from tests.ckpt.interop import read_database
from tests.support.object_server import REGION, Bucket
from tools.inspect_ckpt.__main__ import main

_STATE = {"model": {"w": torch.arange(9000.0).reshape(90, 100), "half": torch.arange(7, dtype=torch.bfloat16)}}


def _read(bucket: Bucket, folder: Path, place: str) -> dict[str, bytes]:
    """Return the bytes of each array that plain tensorstore finds in a step."""
    prefix = place.removeprefix(f"s3://{bucket.name}/")
    base = {"driver": "s3", "bucket": bucket.name, "path": f"{prefix}/", "endpoint": bucket.proxy.url}
    base |= {"aws_region": REGION}
    command = [sys.executable, "-I", read_database.__file__, str(folder), json.dumps(base)]
    environment = os.environ | bucket.env
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stderr
    with np.load(folder / "0.npz") as data:
        return {name: data[name].tobytes() for name in data}


def _expected() -> dict[str, bytes]:
    return {f"model/{name}": tensor.view(torch.uint8).numpy().tobytes() for name, tensor in _STATE["model"].items()}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_step_in_a_bucket(any_bucket: Bucket, tmp_path: Path, compression: str | None) -> None:
    with ckpt.Checkpointer(any_bucket.url, staging=ckpt.Staging(compression=compression)) as checkpointer:
        checkpointer.save(_STATE, 1)
    assert _read(any_bucket, tmp_path, open_root(any_bucket.url).source_of(1).path) == _expected()
    assert main(["validate", any_bucket.url]) == 0


def test_a_copy_in_a_mirror(bucket: Bucket, tmp_path: Path) -> None:
    mirror = ckpt.Mirror(bucket.url, close_timeout=timedelta(seconds=40))
    with ckpt.Checkpointer(tmp_path / "root", mirror=mirror) as checkpointer:
        checkpointer.save(_STATE, 1)
    assert _read(bucket, tmp_path, open_root(bucket.url).source_of(1).path) == _expected()


def test_a_database_that_is_made_later(bucket: Bucket, tmp_path: Path) -> None:
    with ckpt.Checkpointer(bucket.url, staging=ckpt.Staging(database_chunks=0)) as checkpointer:
        checkpointer.save(_STATE, 1)
    source = open_root(bucket.url).source_of(1)
    assert not {MANIFEST, NODES} & source.scan()[0].keys()
    assert main(["index", bucket.url]) == 0
    assert main(["validate", bucket.url]) == 0
    assert _read(bucket, tmp_path, source.path) == _expected()
