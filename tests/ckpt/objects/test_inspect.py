"""`inspect_ckpt` on a root in a store."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.ranks.failure import Failure
from ckpt.storage.outcomes import Abandoned
from ckpt.storage.roots import open_root
from tests.support.object_server import Bucket
from tests.support.selection import FULL
from tools.inspect_ckpt.__main__ import main


def _fill(url: str) -> str:
    """Make a root with two steps, without a writer process, which would have to end first, and two other saves."""
    with ckpt.Checkpointer(url) as checkpointer:
        for step in (1, 2):
            checkpointer.save_request({"w": torch.arange(9000.0) * step, "n": step}, step).execute_sync()
        root = open_root(url)
        token = root.ownership.newest()
        for number in (3, 4):
            pending = root.pending_save(ckpt.storage.names.SaveId(number, token, "0" * 16))
            pending.begin(1, "plan")
        pending.abandon(Failure(0, "StorageError", "the test says so"))
        checkpointer.pin(1)
    return url


@pytest.fixture
def bucket_url(bucket: Bucket) -> str:
    return _fill(bucket.url)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same root in a store in a directory, which has the same layout; with TESTS=full in a bucket."""
    return str(request.getfixturevalue("bucket_url")) if FULL else _fill(f"directory://{tmp_path}/root")


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_ls(bucket_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "ls", bucket_url)
    rows = [(row["step"], row["state"], row["pinned"]) for row in document["saves"]]
    expected = [(1, "published", True), (2, "published", False), (3, "pending", False), (4, "abandoned", False)]
    assert (code, rows) == (0, expected)
    assert document["restart"]["step"] == 2
    assert document["saves"][1]["tensors"] == 1
    assert document["saves"][3]["note"] == "rank 0: StorageError: the test says so"
    assert main(["ls", bucket_url]) == 0
    assert "<- restart" in capsys.readouterr().out


def test_show_validate_and_stats(bucket_url: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "show", bucket_url)
    assert (code, document["step"], document["tensors"][0]["name"]) == (0, 2, "w")
    code, document = _json(capsys, "validate", bucket_url)
    assert (code, [(each["step"], each["whole"]) for each in document["steps"]]) == (0, [(1, True), (2, True)])
    assert document["steps"][0]["bytes_read"] > 36_000
    with ckpt.open(bucket_url, 2) as checkpoint:
        place = checkpoint.path
    pack = f"/{bucket.name}/team/run7{place.removeprefix(bucket_url)}/packs/000/rank_00000_000"
    status, data = bucket.server.request("GET", pack)
    assert status == 200
    bucket.server.request("PUT", pack, bytes([data[0] ^ 1]) + data[1:])
    code, document = _json(capsys, "validate", place)
    assert (code, document["steps"][0]["problems"][0]["tensor"]) == (1, "w")
    code, document = _json(capsys, "validate", bucket_url)
    assert (code, document["newest_whole"]) == (1, 1)


def test_what_is_not_there(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", bucket.url]) == 2
    assert main(["show", bucket.url]) == 3
    assert main(["ls", "s3://there-is-no-such-bucket/x"]) == 2
    assert "bucket does not exist" in capsys.readouterr().err
    assert main(["watch", bucket.url, "--once"]) == 2
    assert "has no step and no save yet" in capsys.readouterr().err
    for command in ("timeline", "report", "clean"):
        assert main([command, bucket.url]) == 2
        assert "is not a checkpoint root" in capsys.readouterr().err


def test_pin_unpin_and_rm(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = open_root(url)
    assert main(["rm", url, "1", "--yes"]) == 2
    assert "step 1 of" in capsys.readouterr().err
    assert _json(capsys, "unpin", url, "1", "--yes") == (0, {"root": url, "unpinned": [1]})
    assert _json(capsys, "pin", url, "2") == (0, {"root": url, "pinned": [2]})
    code, document = _json(capsys, "rm", url, "1", "--yes")
    assert (code, document["removed"], root.steps()) == (0, ["1"], [2])
    assert document["freed_bytes"] > 36_000
    assert main(["unpin", url, "2", "--yes"]) == 0
    assert main(["rm", url, "2", "--yes"]) == 2
    assert "no whole step left" in capsys.readouterr().err
    assert main(["rm", url, "7", "--yes"]) == 2
    assert main(["rm", url, "2", "--yes", "--force"]) == 0
    assert root.steps() == []


def test_only_the_job_removes_while_it_runs(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    with ckpt.Checkpointer(bucket.url) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"n": step}, step)
        assert main(["rm", bucket.url, "1", "--yes"]) == 2
        assert "which is alive" in capsys.readouterr().err
        assert checkpointer.all_steps() == [1, 2]
    assert main(["pin", f"s3://{bucket.name}/empty", "1"]) == 2
    assert "is not a checkpoint root" in capsys.readouterr().err


def test_export(url: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    assert main(["export", url, str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(safetensors.load_file(file)["w"], torch.arange(9000.0) * 2)


def test_timeline(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "timeline", url)
    assert (code, [save["step"] for save in document["saves"]], document["problems"]) == (0, [1, 2], [])
    assert all(save["bytes"] >= 36_000 and save["commit_s"] is not None for save in document["saves"])


def test_report(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    code, document = _json(capsys, "report", url, "-o", str(page))
    assert (code, document["root"], document["steps"]) == (0, url, [1, 2])
    assert [(each["step"], each["state"], each["how"]) for each in document["health"]] == [
        (2, "whole", "all bytes"),
        (1, "whole", "all bytes"),
    ]
    text = page.read_text()
    assert url in text
    assert "the test says so" in text
    assert "1 tensor changed" in text


def test_watch(bucket_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = open_root(bucket_url)
    pending = root.pending_save(root.pending()[0])
    pending.pack_writer(0, threads=1, reuse=False)._store(0, memoryview(bytes(4096)), 4096)  # type: ignore[attr-defined]
    code, document = _json(capsys, "watch", bucket_url, "--once")
    assert (code, document["steps"], document["free_bytes"]) == (0, 2, None)
    assert [(line["step"], line["pinned"]) for line in document["newest"]] == [(2, False), (1, True)]
    assert all(line["bytes"] >= 36_000 for line in document["newest"])
    assert [(save["step"], save["parts"], save["ranks"], save["written"]) for save in document["pending"]] == [
        (3, 0, 1, 4096)
    ]
    assert [(gone["step"], "the test says so" in gone["why"]) for gone in document["abandoned"]] == [(4, True)]
    assert document["owner"]["state"] == "ended"
    assert document["owner"]["lease_age_s"] < 100
    assert main(["watch", bucket_url, "--once"]) == 0


def test_watching_writes_nothing(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    with ckpt.Checkpointer(bucket.url) as checkpointer:
        checkpointer.save({"n": 1}, 1)
        before = len(bucket.proxy.requests)
        code, document = _json(capsys, "watch", bucket.url, "--once")
        made = bucket.proxy.requests[before:]
        assert (code, document["owner"]["state"], document["owner"]["writers"]) == (0, "running", 1)
    tool = [each for each in made if each.method != "GET" and "/renewed" not in each.path]
    assert [each.method for each in tool if each.method != "HEAD"] == []


def test_clean(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = open_root(url)
    pending, abandoned = (root.pending_save(*saves) for saves in (root.pending(), root.abandoned()))
    abandoned.write_file("packs/000/rank_00000_000", memoryview(bytes(5000)))  # by a late writer
    code, document = _json(capsys, "clean", url, "--dry-run")
    kept = {item["name"]: item["remove"] for item in document["items"]}
    assert (code, kept, document["removed"]) == (0, {pending.save.name: False, abandoned.save.name: True}, [])
    code, document = _json(capsys, "clean", url, "--yes", "--stale-after", "0")
    assert (code, sorted(document["removed"])) == (0, sorted([pending.save.name, abandoned.save.name]))
    assert document["freed_bytes"] > 5000
    assert (root.steps(), root.pending(), root.removed()) == ([1, 2], [], [])
    assert isinstance(pending.outcome(), Abandoned)
    code, document = _json(capsys, "clean", url, "--yes", "--stale-after", "0")
    assert {item["remove"] for item in document["items"]} == {False}, "reasons stay for an hour"


def test_branches(url: str, capsys: pytest.CaptureFixture[str], queue: ckpt.AsyncCallsQueue) -> None:
    """What is superseded is listed, published again with the branch that it continues, and removed."""
    root = open_root(url)
    (lost,) = (root.save_of(step) for step in (2,))
    state = {"w": torch.zeros(9000), "n": 0}
    with ckpt.Checkpointer(url, queue=queue) as checkpointer:
        assert checkpointer.restore(state, 1) == 1
        checkpointer.save({"w": torch.ones(9000), "n": 7}, 3)
    assert (root.steps(), root.superseded()) == ([1, 3], [lost])
    code, document = _json(capsys, "ls", url, "--all")
    rows = {row["state"]: row["note"] for row in document["saves"]}
    assert rows["superseded"] == f"continues step 1, restore-branch {lost}"
    mine = root.save_of(3)
    expected = {"superseded": [3], "published": [2], "dry_run": True}
    assert _json(capsys, "restore-branch", url, "2", "--dry-run") == (0, {"root": url, **expected})
    assert root.steps() == [1, 3]
    assert _json(capsys, "restore-branch", url, "2") == (0, {"root": url, **expected, "dry_run": False})
    assert (root.steps(), root.superseded()) == ([1, 2], [mine])
    with ckpt.Checkpointer(url, queue=queue) as checkpointer:
        assert checkpointer.restore(state) == 2
        assert torch.equal(state["w"], torch.arange(9000.0) * 2)
    code, document = _json(capsys, "rm", url, str(mine), "--yes")
    assert (code, document["removed"]) == (0, [mine])
    assert document["freed_bytes"] > 36_000
    assert root.superseded() == []
    assert main(["restore-branch", url, "2"]) == 2
    assert "no superseded step" in capsys.readouterr().err


def test_convert(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.arange(9000.0), "n": 5}, tmp_path / "old.pt")
    code, document = _json(capsys, "convert", str(tmp_path / "old.pt"), bucket.url, "--step", "3", "--under", "model")
    assert (code, document["verified"], document["to"].startswith(f"{bucket.url}/saves/step_00000003")) == (
        0,
        True,
        True,
    )
    loaded = ckpt.load(bucket.url)
    assert torch.equal(loaded["model"]["w"], torch.arange(9000.0))
    assert main(["convert", str(tmp_path / "old.pt"), bucket.url, "--step", "3"]) == 2
    assert "already in" in capsys.readouterr().err
    assert main(["convert", bucket.url, str(tmp_path / "root")]) == 2
    assert "read from local files only" in capsys.readouterr().err


def test_a_step_is_no_root(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = open_root(url).source_of(2).path
    for command in ("ls", "timeline", "clean", "report"):
        assert main([command, place]) == 2
        assert f"give {url}" in capsys.readouterr().err
    assert main(["show", place]) == 0


def test_urls_of_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str], queue: ckpt.AsyncCallsQueue) -> None:
    with ckpt.Checkpointer(f"file://{tmp_path}/root", queue=queue) as checkpointer:
        checkpointer.save({"n": 1}, 1)
    code, document = _json(capsys, "ls", f"file://{tmp_path}/root")
    assert (code, document["root"]) == (0, f"{tmp_path}/root")
