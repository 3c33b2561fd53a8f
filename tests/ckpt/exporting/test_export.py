"""`ckpt.export`: other programs read what it writes, and nothing is left of an export that fails or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from argparse import Namespace
from collections import OrderedDict, deque
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt
from ckpt import Checkpointer, PerRank
from ckpt.exporting import selection
from tests.support.saves import save_here
from tests.support.template import quick_python

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")  # DCP warns that it runs in one process


class Point(NamedTuple):
    x: Any
    y: Any


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Linear(90, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 70)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 7, "note": "a run", "betas": [0.9, (0.95,)]}


def nested() -> dict[str, Any]:
    weight = torch.randn(40, 30)
    return {
        "ordered": OrderedDict(b=weight, a=torch.arange(5)),
        "tied": weight,
        "list": [torch.ones(2), ({"step": 3, "t": torch.zeros(3)}, "text", None), 5],
        "tuple": (torch.ones(1), {}),
        7: {"half": torch.ones(3, dtype=torch.bfloat16), "f8": torch.ones(4).to(torch.float8_e4m3fn)},
        "u16": torch.arange(9).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 4),
        "words": {"x", "y"},
    }


def save(root: Path, state: Any, step: int = 0) -> Path:
    with Checkpointer(root, staging=ckpt.Staging(file_bytes=4096, inner_bytes=256)) as checkpointer:
        save_here(checkpointer, state, step)
    return root


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# -- files of torch.save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [100, 1 << 24])
def test_torch_loads_the_nested_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(selection, "_BLOCK_BYTES", block_bytes)
    state = nested()
    save(tmp_path / "root", state)
    exported = ckpt.export(tmp_path / "root", tmp_path / "a.pt", "torch", verify=True)
    assert (exported.files, exported.left_out, exported.notes) == (["a.pt"], [], [])
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mapped)
        assert same(loaded, state)
        assert loaded["tied"].data_ptr() == loaded["ordered"]["b"].data_ptr()
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "root"]


def test_an_optimizer_loads_its_state_from_a_torch_file(tmp_path: Path) -> None:
    state = trained()
    save(tmp_path / "root", state)
    ckpt.export(tmp_path / "root", tmp_path / "a.pt", "torch")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    fresh = trained()
    fresh["model"].load_state_dict(loaded["model"])
    fresh["optimizer"].load_state_dict(loaded["optimizer"])
    assert same(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert (loaded["step"], loaded["note"], loaded["betas"]) == (7, "a run", [0.9, (0.95,)])
    ckpt.export(tmp_path / "root", tmp_path / "model.pt", "torch", prefix="model")
    fresh["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def test_what_torch_does_not_load_without_code(tmp_path: Path) -> None:
    state = {
        "point": Point(torch.ones(2), 3),
        "queue": deque([torch.ones(1)], 5),
        "args": Namespace(t=torch.zeros(1), when=date(2024, 1, 1)),
        "path": Path("/data"),
        "own": PerRank([torch.ones(4), 8]),
        "mixed": [PerRank(1), torch.ones(3)],
    }
    save(tmp_path / "root", state)
    exported = ckpt.export(tmp_path / "root", tmp_path / "a.pt", "torch", verify=True)
    assert exported.left_out == ["args/when", "path"]
    assert len(exported.notes) == 3
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(loaded["point"], (torch.ones(2), 3))
    assert same(loaded["queue"], [torch.ones(1)])
    assert same(loaded["args"], {"t": torch.zeros(1)})
    assert same(loaded["mixed"], [None, torch.ones(3)])
    assert same(loaded["own.0@rank0"], torch.ones(4))
    assert (loaded["own.1@rank0"], loaded["mixed.0@rank0"]) == (8, 1)


def test_a_part_of_a_list(tmp_path: Path) -> None:
    save(tmp_path / "root", [torch.zeros(1), torch.ones(1), torch.ones(2), PerRank(torch.ones(3))])
    ckpt.export(tmp_path / "root", tmp_path / "a.pt", "torch", filter=["1", "2"])
    assert same(torch.load(tmp_path / "a.pt", weights_only=True), [None, torch.ones(1), torch.ones(2)])
    ckpt.export(tmp_path / "root", tmp_path / "b.pt", "torch", exclude="2")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert same(loaded, {0: torch.zeros(1), 1: torch.ones(1), "3@rank0": torch.ones(3)})


def test_dtype_in_a_torch_file(tmp_path: Path) -> None:
    state = {"w": torch.tensor([1.0, 1e30]), "n": torch.arange(3)}
    save(tmp_path / "root", state)
    exported = ckpt.export(tmp_path / "root", tmp_path / "a.pt", "torch", dtype=torch.float16, verify=True)
    assert exported.became_inf == {"w": 1}
    assert same(torch.load(tmp_path / "a.pt", weights_only=True), {"w": state["w"].half(), "n": torch.arange(3)})


# -- transformers ------------------------------------------------------------------------------------------------------


def tiny_llama(tie: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        tie_word_embeddings=tie,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tie", [True, False])
def test_transformers_opens_the_directory(tmp_path: Path, tie: bool) -> None:
    model = tiny_llama(tie)
    import transformers

    save(tmp_path / "root", {"model": model, "step": 3})
    exported = ckpt.export(
        tmp_path / "root", tmp_path / "hf", "hf", config=model.config, max_shard_size="40kB", verify=True
    )
    assert exported.tied == (["model/lm_head.weight"] if tie else [])
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (not tie)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        base = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
        assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


class _Saves:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text('{"from": "save_pretrained"}')
        Path(folder, "tokenizer.json").write_text("{}")
        Path(folder, "weights.bin").write_text("not copied")


class _HasDict:
    def to_dict(self) -> dict[str, Any]:
        return {"from": "to_dict"}


def test_where_a_configuration_comes_from(tmp_path: Path) -> None:
    save(tmp_path / "root", {"model": {"w": torch.ones(3)}})
    (tmp_path / "base").mkdir()
    for name in ("config.json", "merges.txt", "model.safetensors.index.json", "model.safetensors"):
        (tmp_path / "base" / name).write_text('{"from": "directory"}')
    sources = {
        "dict": ({"from": "dict"}, {"config.json"}),
        "to_dict": (_HasDict(), {"config.json"}),
        "save_pretrained": (_Saves(), {"config.json", "tokenizer.json"}),
        "directory": (tmp_path / "base", {"config.json", "merges.txt"}),
    }
    for name, (config, files) in sources.items():
        exported = ckpt.export(tmp_path / "root", tmp_path / name, "hf", config=config)
        assert set(exported.files) == set(os.listdir(tmp_path / name)) == {*files, "model.safetensors"}
        assert json.loads((tmp_path / name / "config.json").read_text()) == {"from": name}
        assert same(load_file(tmp_path / name / "model.safetensors"), {"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (5, TypeError),
        (torch.nn.Linear(1, 1), TypeError),
        ({"a": object()}, ckpt.ConversionError),
        ("/nowhere/at/all", ckpt.StorageError),
    ],
)
def test_an_invalid_configuration(tmp_path: Path, config: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="config"):
        ckpt.export(tmp_path, tmp_path / "hf", "hf", config=config)


# -- other formats -----------------------------------------------------------------------------------------------------


def test_torch_distributed_loads_the_directory(tmp_path: Path) -> None:
    state = trained()
    save(tmp_path / "root", state)
    ckpt.export(tmp_path / "root", tmp_path / "dcp", "dcp", verify=True)
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].state_dict().items()}}
    loaded |= {"step": 0, "note": ""}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert same(loaded["model"], dict(state["model"].state_dict()))
    assert (loaded["step"], loaded["note"]) == (7, "a run")
    ckpt.export(tmp_path / "root", tmp_path / "bf16", "dcp", prefix="model", dtype="bf16", verify=True)
    half = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in loaded["model"].items()}
    dcp.load(half, checkpoint_id=tmp_path / "bf16")
    assert same(half, {name: tensor.bfloat16() for name, tensor in loaded["model"].items()})


@pytest.mark.parametrize("prefix", ["model/module", "model.module", "model/module/", "model.module.0"])
def test_a_prefix_may_end_within_a_key(tmp_path: Path, prefix: str) -> None:
    save(tmp_path / "root", {"model": {"module.0.w": torch.ones(3)}, "module": {"w": torch.ones(1)}})
    ckpt.export(tmp_path / "root", tmp_path / "out", prefix=prefix)
    name = "w" if prefix.endswith("0") else "0.w"
    assert same(load_file(tmp_path / "out" / "model.safetensors"), {name: torch.ones(3)})


def test_a_step_of_a_root_and_progress(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "root", {"w": torch.full((1000,), float(step))}, step)
    seen: list[tuple[int, int]] = []
    exported = ckpt.export(
        tmp_path / "root", tmp_path / "a", step=1, verify=True, progress=lambda done, total: seen.append((done, total))
    )
    assert (exported.step, exported.bytes, seen[-1]) == (1, 4000, (8000, 8000))
    assert load_file(tmp_path / "a" / "model.safetensors")["w"][0] == 1
    assert ckpt.export(tmp_path / "root" / "step_00000002", tmp_path / "b").step == 2
    with pytest.raises(ckpt.CheckpointNotFoundError, match="no published step 3"):
        ckpt.export(tmp_path / "root", tmp_path / "c", step=3)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"format": "gguf"}, ValueError, "safetensors, hf, torch, dcp"),
        ({"dtype": "int4"}, ValueError, "bf16"),
        ({"max_shard_size": "much"}, ValueError, "5GB"),
        ({"config": {}}, ValueError, "hf"),
        ({"filter": "modle/*"}, ckpt.ConversionError, "nothing matches"),
        ({"prefix": "nothing"}, ckpt.ConversionError, "no name begins with"),
        ({"format": "hf"}, ckpt.ConversionError, "'model'"),
        ({"exclude": "*"}, ckpt.ConversionError, "no tensor"),
    ],
)
def test_invalid_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    save(tmp_path / "root", {"weights": {"w": torch.ones(3)}})
    with pytest.raises(error, match=says):
        ckpt.export(tmp_path / "root", tmp_path / "out", **arguments)
    assert os.listdir(tmp_path) == ["root"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_what_is_there_is_not_touched(tmp_path: Path, form: Any) -> None:
    save(tmp_path / "root", {"w": torch.ones(3)})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for target in ("full", "full/mine", "root/step_00000000/x", "no/where"):
        with pytest.raises(ckpt.StorageError):
            ckpt.export(tmp_path / "root", tmp_path / target, form)
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["full", "root"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_a_damaged_step_leaves_nothing(tmp_path: Path, form: Any) -> None:
    save(tmp_path / "root", {"v": torch.ones(9), "w": torch.arange(5000.0)})
    (file,) = (tmp_path / "root" / "step_00000000" / "packs" / "000").glob("rank_00000_000")
    content = np.fromfile(file, np.uint8)
    content[-3000] ^= 1
    content.tofile(file)
    with pytest.raises(ckpt.CheckpointCorruptError, match=r"tensor [vw]"):
        ckpt.export(tmp_path / "root", tmp_path / "out", form)
    assert os.listdir(tmp_path) == ["root"]


def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "root", {"w": torch.arange(5000.0)})
    from ckpt.exporting import writers as module

    written = module.write_safetensors

    def damage(target: str, *arguments: Any) -> list[str]:
        files = written(target, *arguments)
        path = Path(target, files[0])
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        return files

    monkeypatch.setattr(module, "write_safetensors", damage)
    with pytest.raises(ckpt.CheckpointCorruptError, match="w differs in the box"):
        ckpt.export(tmp_path / "root", tmp_path / "out", verify=True)


# -- kills -------------------------------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
import ckpt
from ckpt.formats import foreign_files
root, target, form, where = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def progress(done, total):
    if where == "data" and done * 2 >= total:
        die()
if where != "data":
    setattr(foreign_files, where, die)
ckpt.export(root, target, form, progress=progress)
"""


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("where", ["data", "sync_files"])
def test_kill_9(tmp_path: Path, form: str, where: str) -> None:
    save(tmp_path / "root", {f"w{number}": torch.full((1000,), number) for number in range(4)})
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "new"
    command = [quick_python(), "-c", _KILLED, str(tmp_path / "root"), str(target), form, where]
    assert subprocess.run(command, timeout=50).returncode == -signal.SIGKILL
    assert not target.exists()
    assert all(name.startswith(".export-") for name in os.listdir(tmp_path / "out"))
    ckpt.export(tmp_path / "root", target, form, verify=True)  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "out") == ["new"], "what the killed process left is gone"
    other = tmp_path / "empty"
    other.mkdir()
    if form != "torch":
        command[4] = str(other)
        assert subprocess.run(command, timeout=50).returncode == -signal.SIGKILL
        ckpt.export(tmp_path / "root", other, form, verify=True)  # type: ignore[arg-type]
        assert not [name for name in os.listdir(other) if name.startswith(".export-")]
