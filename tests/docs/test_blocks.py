"""Every code block of README and of the pages under docs/ is executed as it is printed."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpt
import ckpt.restart
import inprocess
from ckpt.loading.consistency import read_index
from tests.ckpt.async_calls.functions import append
from tests.docs.blocks import REPOSITORY, Block, Runner, blocks_of, commands_of, matches
from tests.support import run_ranks
from tests.support.object_server import S3Server
from tests.support.orbax_checkpoints import is_orbax_installed, write_with_orbax
from tests.support.saves import save_here
from tests.support.selection import FULL

_FOLDERS = ("docs", "docs/operations")
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(str(p.relative_to(REPOSITORY)) for folder in _FOLDERS for p in REPOSITORY.glob(f"{folder}/*.md"))
# Benchmarks and hangs that take minutes: only with TESTS=full.
_LONG = ("tools.bench", "train_sections.py", "restart_spares.py")


def _upload(path: str) -> None:
    append(Path(path) / "uploaded", "yes")


def _save_four_steps(rank: int, world_size: int, root: str) -> None:
    """Write the checkpoints that README inspects."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 1024)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RngState()}
    with ckpt.Checkpointer(root) as checkpointer:
        for step in (3, 6, 9, 12):
            save_here(checkpointer, state, step)


def _for_readme(folder: Path) -> dict[str, Any]:
    return {"ckpt": ckpt, "upload": _upload}


def _for_guide(folder: Path) -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with ckpt.Checkpointer(folder / "run7") as checkpointer:
        for step in (10, 20, 30):
            save_here(checkpointer, state, step)
    with ckpt.Checkpointer(folder / "run7") as checkpointer:
        checkpointer.restore(state, step=20)
        save_here(checkpointer, state, 40)
    _foreign_files(folder, state)
    return {
        "ckpt": ckpt,
        "inprocess": inprocess,
        "timedelta": timedelta,
        "dataclasses": dataclasses,
        "CheckpointAbort": ckpt.restart.CheckpointAbort,
        "CheckpointFinalize": ckpt.restart.CheckpointFinalize,
        "model": model,
        "optimizer": state["optimizer"],
        "checkpointer": ckpt.Checkpointer(folder / "first"),
    }


def _foreign_files(folder: Path, state: dict[str, Any]) -> None:
    with ckpt.Checkpointer(folder / "runs" / "lm") as checkpointer:
        save_here(checkpointer, state, 100)
    tensors = state["model"].state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about saving with a single process
        dcp.save({"model": tensors}, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(tensors, folder / "model.pt")
    (folder / "base-model").mkdir()
    (folder / "base-model" / "config.json").write_text("{}")


def _for_migrating(folder: Path) -> dict[str, Any]:
    group = zarr.open_group(folder / "weights.zarr", mode="w")
    for name in ("embed", "layers/0/kernel"):
        group.create_array(name, data=np.arange(6, dtype=np.float32).reshape(2, 3))
    if is_orbax_installed():
        (folder / "orbax").mkdir()
        write_with_orbax(folder / "orbax")
    names = _for_guide(folder)
    model, optimizer = names["model"], names["optimizer"]
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    named = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    titan = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=flattened)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about saving with a single process
        dcp.save(named, checkpoint_id=folder / "job" / "step-1000", no_dist=True)
        dcp.save({**titan, "train_state": {"step": 1000}}, checkpoint_id=folder / "titan" / "step-1000", no_dist=True)
    return names


def _for_format(folder: Path) -> dict[str, Any]:
    with ckpt.Checkpointer(folder / "run7") as checkpointer:
        save_here(checkpointer, {"model": {"embed.weight": torch.ones(3000, 3)}, "small": torch.ones(2)}, 100)
    return {}


def _for_inspect(folder: Path) -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    return {"ckpt": ckpt, "model": model, "optimizer": optimizer, "train": train}


def _no_names(folder: Path) -> dict[str, Any]:
    return {}


NAMES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": _for_readme,
    "docs/guide.md": _for_guide,
    "docs/migrating.md": _for_migrating,
    "docs/format.md": _for_format,
    "docs/preemption.md": _no_names,
    "docs/object_stores.md": _no_names,
    "docs/megatron.md": _no_names,
    "docs/mirrors.md": _no_names,
    "docs/operations/inspect.md": _for_inspect,
    "docs/operations/metrics.md": _no_names,
    "docs/restart.md": _no_names,
    "docs/sections.md": _no_names,
    "docs/snapshots.md": _no_names,
}


@pytest.mark.timeout(600 if FULL else 240)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "docs/megatron.md" and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    if page in ("docs/object_stores.md", "docs/mirrors.md"):
        _serve_a_bucket(request, monkeypatch)
    runner = Runner(tmp_path, NAMES.get(page, _no_names)(tmp_path))
    for block in blocks_of(page):
        if "_orbax" in block.text and not is_orbax_installed():
            continue
        if FULL or not any(word in block.text for word in _LONG):
            _prepare(block, tmp_path)
            runner.run(block)
    for left in runner.names.values():
        if isinstance(left, ckpt.Checkpointer | ckpt.Checkpoint):
            left.close()
    if page == "README.md":
        assert (tmp_path / "trained" / "uploaded").read_text() == "yes"
    if page in NAMES:
        assert runner.executed
    runner.names.clear()
    gc.collect()  # a page may leave what it makes to the end of its process


def _serve_a_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server()
    request.addfinalizer(server.close)
    server.request("PUT", "/models")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "for-the-test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def _prepare(block: Block, folder: Path) -> None:
    """Replace the checkpoints that README inspects by those of another run, with one byte changed."""
    if block.page == "README.md" and "inspect_ckpt ls" in block.text:
        (folder / "run7").rename(folder / "trained")
        run_ranks(_save_four_steps, 2, str(folder / "run7"))
        step = folder / "run7" / "step_00000009"
        index = read_index(str(step))
        place = index.packs.place(index.tensors["model", "3.weight"].boxes[0], (0, 0))
        data = bytearray((step / place.file).read_bytes())
        data[place.offset + 1000] ^= 1
        (step / place.file).write_bytes(data)


def test_pages_are_found() -> None:
    assert {page for page in PAGES if any(block.language == "python" for block in blocks_of(page))} == set(NAMES)


def test_every_fence_names_a_language_or_is_a_drawing() -> None:
    for page in PAGES:
        lines = (REPOSITORY / page).read_text().splitlines()
        fences = [number for number, line in enumerate(lines) if line.startswith("```")]
        for begin in fences[::2]:
            if lines[begin] == "```":
                assert not lines[begin + 1].startswith(("$ ", "import ", "inspect_ckpt ")), f"{page}:{begin + 1}"


def test_commands_and_what_they_print() -> None:
    assert commands_of("$ a \\\n    b   # why\nx\ny\n$ c\n") == [("a \\\n    b", "x\ny\n"), ("c", "")]
    assert matches("took 3 s\n...\ndone, loss 0.5\n", "took 12.5 s\nmore\nmore\ndone, loss 0.1\n")
    assert matches("", "anything")
    assert not matches("whole (91 files)\n", "DAMAGED (91 files)\n")
    assert not matches("one\ntwo\n", "one\n")
