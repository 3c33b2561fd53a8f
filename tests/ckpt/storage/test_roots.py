"""Which places are roots: never a step, and each with one spelling."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.storage.roots import absolute
from tests.ckpt.storage.small_saves import assert_whole, opened, save
from tests.support.saves import save_here
from tools.inspect_ckpt.__main__ import main as inspect_ckpt

_URL = "s3://bucket/run7"
_SAVE = "step_00000003-o1763840000123-0123456789abcdef"


@pytest.fixture
def outer(tmp_path: Path) -> Path:
    """A root with two steps, and a link to the newer one beside it."""
    with opened(tmp_path / "outer") as checkpointer:
        save(checkpointer, 2)
        save(checkpointer, 3)
    (tmp_path / "latest").symlink_to(tmp_path / "outer" / "step_00000003")
    return tmp_path / "outer"


_INSIDE: dict[str, Callable[[Path], str]] = {
    "a step": lambda root: f"{root}/step_00000003",
    "its URL": lambda root: f"file://{root}/step_00000003/",
    "inside": lambda root: f"{root}/step_00000003/inner",
    "deeper": lambda root: f"{root}/step_00000003/packs/000/inner",
    "a link": lambda root: f"{root.parent}/latest",
    "inside a link": lambda root: f"{root.parent}/latest/inner",
    "the next step": lambda root: f"{root}/step_00000004",
    "inside the next step": lambda root: f"{root}/step_00000004/inner",
}


@pytest.mark.parametrize("where", _INSIDE)
def test_a_step_is_no_root(outer: Path, where: str) -> None:
    path = _INSIDE[where](outer)
    arguments: list[dict[str, Any]] = [
        {"root": path},
        {"root": path, "read_only": True},
        {"root": outer, "mirror": ckpt.Mirror(path)},
        {"root": outer, "mirror": ckpt.Mirror(outer.parent / "mirror"), "node_local": path},
        {"root": outer, "export": ckpt.ExportOptions(path.removeprefix("file://"), every=1)},
    ]
    for each in arguments:
        with pytest.raises(ckpt.StorageError, match=rf"(is a step, not|is inside the step) .*{outer}"):
            ckpt.Checkpointer(**each)
    with pytest.raises(ckpt.StorageError, match="step_0000000"):
        ckpt.export(outer, path.removeprefix("file://") + "/export")
    assert inspect_ckpt(["clean", "--yes", path]) == 2
    assert assert_whole(outer) == [2, 3]
    assert not list(outer.glob("step_*/inner"))


@pytest.mark.parametrize("below", ["", "/inner", "/packs/inner"])
def test_a_step_in_a_bucket_is_no_root(below: str) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    with pytest.raises(ckpt.StorageError, match=rf"is a step, or inside of one.*give {_URL}$"):
        ckpt.Checkpointer(f"{_URL}/saves/{_SAVE}{below}")


@pytest.mark.parametrize("below", ["/step_00000002", "/step_00000003/inner", "/step_00000004"])
def test_the_name_of_a_step_in_a_store_is_no_root(tmp_path: Path, below: str) -> None:
    """It has no objects there, so a job would start from scratch, beside its steps."""
    root = f"directory://{tmp_path}/root"
    with ckpt.Checkpointer(root) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 2)
    for arguments in ({"root": root + below}, {"root": tmp_path / "another", "mirror": root + below}):
        with pytest.raises(ckpt.StorageError, match=rf"is a step, or inside of one.*; give {root}$"):
            ckpt.Checkpointer(**arguments)  # type: ignore[arg-type]
    assert inspect_ckpt(["ls", root + below]) == 2
    elsewhere = f"directory://{tmp_path}/checkpoints{below}"
    with ckpt.Checkpointer(elsewhere) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
    assert ckpt.load(elsewhere)["w"].tolist() == [1.0, 1.0, 1.0], "in no root it is a name as others"


@pytest.mark.parametrize("scheme", ["", "directory://"])
def test_a_step_is_read_by_the_name_of_its_root_and_its_own(
    tmp_path: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"{scheme}{tmp_path}/root"
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (2, 3):
            save_here(checkpointer, {"w": torch.full((3,), float(step))}, step)
    step_2 = f"{root}/step_00000002"
    assert ckpt.load(step_2)["w"].tolist() == [2.0, 2.0, 2.0]
    with ckpt.open(step_2) as checkpoint:
        assert checkpoint.step == 2
    for command in ("show", "validate"):
        assert inspect_ckpt([command, step_2]) == 0
        assert "step 2" in capsys.readouterr().out or command == "validate"
    with pytest.raises(ckpt.CheckpointNotFoundError, match="step"):
        ckpt.load(f"{root}/step_00000009")


def test_a_step_in_a_directory_is_no_root_of_a_store(outer: Path) -> None:
    """Objects of a store in it would damage it."""
    for below in ("step_00000003", "step_00000003/inner", "step_00000004"):
        with pytest.raises(ckpt.StorageError, match=rf"(is a step, not|is inside the step) .*{outer}"):
            ckpt.Checkpointer(f"directory://{outer}/{below}")
    assert assert_whole(outer) == [2, 3]


@pytest.mark.parametrize(
    "url", ["sftp://me:hun/t:%er2@host/run7", "sftp://me:hunter2@host:2222", "s3://id:hunter2@b/run7"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    for act in (lambda: ckpt.Checkpointer(url), lambda: ckpt.Checkpointer(tmp_path, mirror=url), lambda: absolute(url)):
        with pytest.raises(ckpt.StorageError, match=r"://(me|id):\*\*\*@(host|b).* storage_options") as raised:
            act()
        assert not any(part in str(raised.value) for part in ("hun", "er2"))


@pytest.mark.parametrize("server", ["host:0", "host:65536", "host:x", "me@", "@host", "a b@host"])
def test_a_server_that_cannot_be(server: str) -> None:
    with pytest.raises(ckpt.StorageError, match="the URL of a root is sftp://USER@HOST:PORT/PATH"):
        absolute(f"sftp://{server}/run7")
    assert absolute("sftp://me@host:65535/run7/") == "sftp://me@host:65535/run7"


def test_the_memory_of_a_process_is_no_root_of_a_job(tmp_path: Path) -> None:
    """Its writers are other processes: a save would seem to succeed, and be lost with them."""
    for arguments in ({"root": "memory:///run7"}, {"root": tmp_path, "mirror": "memory:///run7"}):
        with pytest.raises(ckpt.StorageError, match="memory of one process"):
            ckpt.Checkpointer(**arguments)  # type: ignore[arg-type]


def test_directories_that_look_a_little_like_steps_are_roots(tmp_path: Path) -> None:
    """Programs choose such names, and put files of the same names beside their checkpoints."""
    (tmp_path / "index.json").touch()
    (tmp_path / "parts").mkdir()
    for root in (tmp_path / "runs", tmp_path / "checkpoints" / "step_00000100"):
        with opened(root) as checkpointer:
            save(checkpointer, 1)
        assert assert_whole(root) == [1]


# -- the home directory ------------------------------------------------------------------------------------------------


def test_the_home_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    mirror, exports = ckpt.Mirror("~/mirror"), ckpt.ExportOptions("~/exports", every=1)
    with ckpt.Checkpointer("~/run", mirror=mirror, export=exports) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
        assert checkpointer.root == str(home / "run")
    with ckpt.Checkpointer("~/run2", mirror=ckpt.Mirror("~/mirror2"), node_local="~/node") as checkpointer:
        save_here(checkpointer, {"w": torch.ones(3)}, 1)
    assert ckpt.load("~/run")["w"].tolist() == [1.0, 1.0, 1.0]
    with ckpt.open("~/mirror") as checkpoint:
        assert checkpoint.step == 1
    ckpt.export("~/run", "~/exported")
    assert inspect_ckpt(["ls", "~/run"]) == 0
    assert inspect_ckpt(["validate", "~/run"]) == 0
    made = {"run", "run2", "mirror", "mirror2", "node", "exports", "exported"}
    assert {path.name for path in home.iterdir()} == made
    assert os.listdir(here) == []


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        f"{_URL}#1",
        f"{_URL}?x=1",
        "s3://bucket/run%201",
        "s3://bucket/a/../run7",
        "s3://bucket/./run7",
        "s3://bucket//run7",
        "s3://bucket/run\t7",
        "s3://bucket/run\\7",
        "s3://user@bucket/run7",
        "s3://bucket:443/run7",
        "gs://bucket/run7#1",
        "az://container/run7?x",
        "memory:///run7#2",
        "file:///data/run7#1",
        "file:///data/run7?x=1",
    ],
)
def test_urls_of_which_a_part_would_not_count_are_refused(url: str) -> None:
    for use in (
        ckpt.Checkpointer,
        ckpt.load,
        ckpt.open,
        lambda url: ckpt.Checkpointer("/data", mirror=ckpt.Mirror(url)),
    ):
        with pytest.raises(ckpt.StorageError, match="URL"):
            use(url)
    assert inspect_ckpt(["ls", url]) == 2


def test_two_urls_are_of_one_root_only_if_they_are_the_same() -> None:
    """What a URL names is what the library makes of it."""
    store = pytest.importorskip("obstore.store", reason="needs obstore")
    ends = [
        "a b",
        "a%20b",
        "a+b",
        "a/b",
        "a%2Fb",
        "a/./b",
        "a//b",
        "a/b/",
        "A/b",
        "~a",
        "@a",
        "a:1",
        "a#1",
        "a?1",
        "..",
    ]
    ends += [
        "\u00fc",
        "u\u0308",
        "%C3%BC",
        "a.b",
        "a",
        " a",
        "a ",
        "a\u00a0",
        "a\tb",
        "a|b",
        "a^b",
        "a*b",
        'a"b',
        "a<b",
    ]
    ends += ["[a]", "a&b=c", "a\\b"]
    paths: dict[str, list[str]] = {}
    for url in [f"{scheme}://bucket/{end}" for end in ends for scheme in ("s3", "s3a")]:
        try:
            paths.setdefault(absolute(url), []).append(url)
        except ckpt.StorageError:
            continue
    assert len(paths) > 10
    seen: dict[tuple[str, str], str] = {}
    for path in paths:
        opened_store = store.S3Store.from_url(path, config={"aws_region": "us-east-1"})
        named = str(opened_store.config.get("bucket")), str(opened_store.prefix)
        assert seen.setdefault(named, path) == path
