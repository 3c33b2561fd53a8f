"""Files are recognized by their first bytes, whatever they are named, and what is no checkpoint is named."""

from __future__ import annotations

import argparse
import gzip
import io
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpt import load, load_foreign
from tests.tools.inspect_ckpt.commands import Commands

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

_SUFFIXES = (".safetensors", ".pt", ".bin", ".ckpt", ".zip", "")
_STATE = {"w": torch.arange(6.0).view(2, 3)}
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def _written(save: Callable[..., None], array: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, array)
    return stream.getvalue()


_READ: dict[str, Callable[[Path], Any]] = {
    "torch": lambda path: torch.save(_STATE, path),
    "torch before 1.6": lambda path: torch.save(_STATE, path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: save_file(_STATE, path),
}
_REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "git-lfs": (lambda path: path.write_bytes(_POINTER), "is a git-lfs pointer, not the file itself"),
    "HTML": (lambda path: path.write_bytes(b"<!DOCTYPE html><html>404</html>"), "is an HTML page"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"abc")), "is compressed with gzip"),
    "numpy": (lambda path: path.write_bytes(_written(np.save, np.ones(3))), "is a numpy file"),
    "TorchScript": (
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path),
        "is a TorchScript archive",
    ),
    "zip": (
        lambda path: path.write_bytes(_written(np.savez, np.ones(3))),
        "is a zip archive, but torch.save",
    ),
}


@pytest.mark.parametrize("suffix", _SUFFIXES)
@pytest.mark.parametrize("kind", _READ)
def test_what_can_be_read(run: Commands, tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    _READ[kind](path)
    run("convert", path, tmp_path / "root")
    assert torch.equal(load(tmp_path / "root")["w"], _STATE["w"])
    assert torch.equal(load_foreign(path)["w"], _STATE["w"])
    assert "[2, 3]" in run("show", path)
    for command in ("ls", "validate"):
        assert f"convert {path} ROOT" in run.refused(command, path)


@pytest.mark.parametrize("suffix", _SUFFIXES)
@pytest.mark.parametrize("kind", _REFUSED)
def test_what_cannot_be_read(run: Commands, tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    write, what = _REFUSED[kind]
    write(path)
    assert f"{path} {what}" in run.refused("convert", path, tmp_path / "root")
    assert not (tmp_path / "root").exists()
    for command in ("show", "ls", "validate"):
        run.refused(command, path)


def test_a_pipe_is_not_waited_for(run: Commands, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree" / "zarr.json")
    run.refused("convert", tmp_path / "tree", tmp_path / "root")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_in_a_directory(run: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / name).write_bytes(_POINTER)
    assert f"hf/{name} is a git-lfs pointer" in run.refused("convert", tmp_path / "hf", tmp_path / "root")


def test_a_torch_file_among_safetensors(run: Commands, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    torch.save(_STATE, tmp_path / "hf" / "model.safetensors")
    line = run.refused("convert", tmp_path / "hf", tmp_path / "root")
    assert "model.safetensors is a file of torch.save; give it by itself" in line
    run("convert", tmp_path / "hf" / "model.safetensors", tmp_path / "root")


def test_metadata_of_dcp_that_are_a_pointer(run: Commands, tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(_POINTER)
    assert ".metadata is a git-lfs pointer" in run.refused("convert", tmp_path / "dcp", tmp_path / "root")


class Options(dict[str, Any]):
    """A dict of a class of its own, as some frameworks have for hyperparameters."""


class Names(list[str]):
    """A list of a class of its own."""


@pytest.mark.parametrize(
    "hyperparameters",
    [argparse.Namespace(lr=0.1), Options(lr=0.1), {"path": Path("/a"), "lr": 0.1}, [Names(["a", "b"]), timedelta(3)]],
    ids=["namespace", "dict", "path", "list"],
)
def test_objects_that_torch_does_not_load(run: Commands, tmp_path: Path, hyperparameters: Any) -> None:
    """The state_dict and hyper_parameters of a Lightning checkpoint."""
    path = tmp_path / "epoch=3.ckpt"
    torch.save({"state_dict": _STATE, "hyper_parameters": hyperparameters, "epoch": 3}, path)
    line = run.refused("convert", path, tmp_path / "root")
    assert "hyper_parameters" in line
    assert "--skip-unsafe leaves such leaves out" in line
    assert "left out" in run("convert", path, tmp_path / "root", "--skip-unsafe")
    loaded = load(tmp_path / "root")
    assert torch.equal(loaded["state_dict"]["w"], _STATE["w"])
    assert loaded["epoch"] == 3
    left = loaded.get("hyper_parameters")
    assert left in (None, {"lr": 0.1}, [None, None])


def test_small_files_of_huge_states(run: Commands, tmp_path: Path) -> None:
    deep: Any = [1]
    for _ in range(200):
        deep = [deep]
    torch.save({"deep": deep}, tmp_path / "a.pt")
    assert "nested deeper than 100" in run.refused("convert", tmp_path / "a.pt", tmp_path / "root")
    wide: Any = [1]
    for _ in range(40):
        wide = [wide, wide]
    torch.save({"wide": wide}, tmp_path / "a.pt")
    assert "the same lists" in run.refused("convert", tmp_path / "a.pt", tmp_path / "root")
