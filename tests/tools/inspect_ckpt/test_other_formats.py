"""A checkpoint of another format, given to a command that wants a step: what it is, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.tools.inspect_ckpt.commands import Commands

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


def dcp_directory(folder: Path) -> Path:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def torch_file(folder: Path) -> Path:
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    return folder / "model.pt"


def safetensors_file(folder: Path) -> Path:
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def hugging_face_directory(folder: Path) -> Path:
    (folder / "hf dir").mkdir()
    (folder / "hf dir" / "config.json").write_text("{}")
    return safetensors_file(folder / "hf dir").parent


OTHERS = {
    dcp_directory: "a directory of torch.distributed.checkpoint",
    torch_file: "a file of torch.save",
    safetensors_file: "a safetensors file",
    hugging_face_directory: "a directory of safetensors files",
}


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_what_it_is_and_what_to_write(run: Commands, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    assert "tensor" in run("show", path)
    for command in ("ls", "validate", "stats", "timeline", "clean"):
        line = run.refused(command, path, *(["*"] if command == "stats" else []))
        assert f"{path} is {OTHERS[make]}, not a checkpoint of ckpt" in line
        quoted = f"'{path}'" if " " in str(path) else str(path)
        assert line.endswith(f"inspect_ckpt convert {quoted} ROOT --step N\n")
    assert OTHERS[make] in run.refused("export", path, tmp_path / "out")
    run("convert", path, tmp_path / "root", "--step", "5")
    run("show", tmp_path / "root")
