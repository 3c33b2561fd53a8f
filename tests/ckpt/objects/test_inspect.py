"""`inspect_ckpt` on a root in a bucket."""

import json
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.outcomes import Reason
from ckpt.storage.roots import open_root
from tests.support.object_server import Bucket
from tools.inspect_ckpt.__main__ import main


@pytest.fixture
def url(bucket: Bucket) -> str:
    with ckpt.Checkpointer(bucket.url) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"w": torch.arange(9000.0) * step, "n": step}, step)
        root = open_root(bucket.url)
        token = root.ownership.newest()
        for number in (3, 4):
            pending = root.pending_save(ckpt.storage.names.SaveId(number, token, "0" * 16))
            pending.begin(1, "plan")
        pending.abandon(Reason(0, "StorageError", "the test says so"))
        checkpointer.pin(1)
    return bucket.url


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_ls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "ls", url)
    rows = [(row["step"], row["state"], row["pinned"]) for row in document["saves"]]
    expected = [(1, "published", True), (2, "published", False), (3, "pending", False), (4, "abandoned", False)]
    assert (code, rows) == (0, expected)
    assert document["restart"]["step"] == 2
    assert document["saves"][1]["tensors"] == 1
    assert document["saves"][3]["note"] == "the test says so"
    assert main(["ls", url]) == 0
    assert "<- restart" in capsys.readouterr().out


def test_show_validate_and_stats(url: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "show", url)
    assert (code, document["step"], document["tensors"][0]["name"]) == (0, 2, "w")
    code, document = _json(capsys, "validate", url)
    assert (code, [(each["step"], each["whole"]) for each in document["steps"]]) == (0, [(1, True), (2, True)])
    assert document["steps"][0]["bytes_read"] > 36_000
    with ckpt.open(url, 2) as checkpoint:
        place = checkpoint.path
    pack = f"/{bucket.name}/team/run7{place.removeprefix(url)}/packs/000/rank_00000_000"
    status, data = bucket.server.request("GET", pack)
    assert status == 200
    bucket.server.request("PUT", pack, bytes([data[0] ^ 1]) + data[1:])
    code, document = _json(capsys, "validate", place)
    assert (code, document["steps"][0]["problems"][0]["tensor"]) == (1, "w")
    code, document = _json(capsys, "validate", url)
    assert (code, document["newest_whole"]) == (1, 1)


def test_what_is_not_there(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", bucket.url]) == 2
    assert main(["show", bucket.url]) == 3
    assert main(["ls", "s3://there-is-no-such-bucket/x"]) == 2
    assert "bucket does not exist" in capsys.readouterr().err
    assert main(["rm", bucket.url, "1"]) == 2
    assert "takes directories only" in capsys.readouterr().err
