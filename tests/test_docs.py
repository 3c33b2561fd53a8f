"""The code blocks of README, the guide and the page of the format run as they are printed."""

import dataclasses
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import ckpt.restart
import inprocess
from tests.ckpt.async_calls.functions import append

REPOSITORY = Path(__file__).resolve().parents[1]


def _upload(path: str) -> None:
    append(Path(path) / "uploaded", "yes")


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """What the blocks take for given: a model, an optimizer, one published step with all that they look at."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    tensors = {f"{name}.weight": torch.ones(3000, 3) for name in ("embed", "norm")}
    state = {"model": {**tensors}, "small": torch.ones(2)}
    with ckpt.Checkpointer(tmp_path / "run7") as checkpointer:
        checkpointer.save(state, 100)
    given = {"ckpt": ckpt, "inprocess": inprocess, "timedelta": timedelta, "dataclasses": dataclasses}
    given |= {"CheckpointAbort": ckpt.restart.CheckpointAbort, "CheckpointFinalize": ckpt.restart.CheckpointFinalize}
    return given | {"model": model, "optimizer": optimizer, "state": state, "upload": _upload, "steps": 3}


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/format.md"])
def test_blocks_run(page: str, names: dict[str, Any], tmp_path: Path) -> None:
    first = ckpt.Checkpointer(tmp_path / "first")
    names |= {"train_step": lambda *_: None, "checkpointer": first}
    root = tmp_path / ("run7" if page == "docs/format.md" else "own")
    root.mkdir(exist_ok=True)
    blocks = _blocks(page)
    for number, block in enumerate(blocks):
        code = block.replace("/data/run7", str(root))
        exec(compile(code, f"{page}, block {number}", "exec"), names)
    assert len(blocks) == {"README.md": 3, "docs/guide.md": 3, "docs/format.md": 1}[page]
    if page == "README.md":
        assert (root / "uploaded").read_text() == "yes"
    for checkpointer in {first, names["checkpointer"]}:
        checkpointer.close()


def test_blocks_of_other_pages_compile() -> None:
    for page in ("docs/restart.md", "docs/sections.md"):
        for block in _blocks(page):
            compile(block, page, "exec")
