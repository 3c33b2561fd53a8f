"""`convert` keeps every bit of other formats, and torch loads the DCP directories that it writes."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections import OrderedDict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckpt import Checkpointer, Staging
from ckpt import open as open_checkpoint
from ckpt.paths import display
from ckpt.validation import validate
from ckpt.values.containers import rebuild
from tests.support import layouts, run_ranks
from tests.support.saves import save_here
from tests.support.selection import full_only
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.commands import Commands, peak_growth
from tools.inspect_ckpt.__main__ import main

MEMORY_BOUND = 224 << 20

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")  # DCP warns that it runs in one process


def restored(root: Path, state: dict[str, Any], step: int = 0) -> dict[str, Any]:
    """Restore the only step, which must be whole, into `state`; return it."""
    report = validate(str(root / f"step_{step:08d}"))
    assert report.whole, report.problems
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state) == step
    return state


def cleared(state: Any) -> Any:
    """Return a state of the same structure with other content."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: cleared(item) for key, item in state.items()}
    return None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        one, other = one.detach().resolve_conj(), other.detach().resolve_conj()
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "layers.0.weight": torch.randn(300, 70, generator=generator),
        "layers.0.half": torch.randn(33, 3, 5, generator=generator).bfloat16(),
        "layers.1.f8": torch.randn(9, 9, generator=generator).to(torch.float8_e4m3fn),
        "ids": torch.arange(7000),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 4),
        "odd\nname": torch.ones(2),
    }


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 70)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 7, "note": "a run", "nothing": None, "betas": [0.9, 0.95]}


# -- safetensors -------------------------------------------------------------------------------------------------------


def test_safetensors_file(run: Commands, tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    assert "all bits are equal" in run("convert", tmp_path / "model.safetensors", tmp_path / "root")
    assert same(restored(tmp_path / "root", cleared(some_tensors())), some_tensors())


def sharded(folder: Path) -> Path:
    """Create a directory as transformers writes it."""
    folder.mkdir()
    weight_map = {}
    tensors = list(some_tensors().items())
    for number, part in enumerate((tensors[:3], tensors[3:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(dict(part), folder / file, {"format": "pt"})
        weight_map |= {name: file for name, _ in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def test_hugging_face_directory(run: Commands, tmp_path: Path) -> None:
    run("convert", sharded(tmp_path / "hf"), tmp_path / "root", "--under", "a/model", "--step", "12")
    state = {"a": {"model": cleared(some_tensors())}}
    assert same(restored(tmp_path / "root", state, 12)["a"]["model"], some_tensors())


def test_links_out_of_the_directory_are_followed_only_on_request(run: Commands, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf")
    (tmp_path / "blobs").mkdir()
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(tmp_path / "blobs" / "1234")
    shard.symlink_to("../blobs/1234")
    assert "--follow-links" in run.refused("convert", folder, tmp_path / "root")
    run("convert", folder, tmp_path / "root", "--follow-links")
    shard.unlink()
    (folder / "inside").mkdir()
    (tmp_path / "blobs" / "1234").rename(folder / "inside" / "1234")
    shard.symlink_to("inside/1234")
    run("convert", folder, tmp_path / "root", "--step", "1")


def test_export_and_back(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    run("export", saved["two"], tmp_path / "out", "--prefix", "model", "--max-shard-size", "4kB")
    run("convert", tmp_path / "out", tmp_path / "root", "--under", "model")
    one, other = open_checkpoint(saved["two"]), open_checkpoint(tmp_path / "root")
    names = [name for name in one if name.startswith("model/")]
    assert list(other) == names
    assert all(one[name].read().tobytes() == other[name].read().tobytes() for name in names)


# -- torch.save --------------------------------------------------------------------------------------------------------


def odd_state() -> dict[str, Any]:
    weight = torch.randn(200, 120, generator=torch.Generator().manual_seed(2))
    return {
        "model": OrderedDict(weight=weight, tied=weight, turned=weight.t(), part=weight[3:50, 7:11]),
        "parameter": nn.Parameter(torch.randn(5)),
        "complex": torch.randn(6, dtype=torch.complex64).conj(),
        "wide": torch.zeros(1).expand(40, 3),
        "numbers": [1, 2.5, "three", None, (True, b"x"), torch.float16],
        "list": [torch.ones(2), {"step": 3}],
        7: torch.arange(3),
    }


@pytest.mark.parametrize("old", [False, True])
def test_torch_file(run: Commands, tmp_path: Path, old: bool) -> None:
    state = odd_state()
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    run("convert", tmp_path / "a.pt", tmp_path / "root")
    assert ("old format" in run.out) == old
    opened = open_checkpoint(tmp_path / "root")
    assert opened.values_by_name == {"numbers": state["numbers"], "list/1/step": 3}
    tensors = {f"model/{key}": tensor for key, tensor in state["model"].items()}
    tensors |= {name: state[name] for name in ("parameter", "complex", "wide")}
    tensors |= {"list/0": state["list"][0], "7": state[7]}
    assert set(opened) == set(tensors)
    for name, tensor in tensors.items():
        assert same(torch.from_numpy(opened[name].read()), tensor), name
    assert run.json("show", tmp_path / "root")["tensors"]
    with Checkpointer(tmp_path / "root") as checkpointer:
        fresh = odd_state()
        fresh["model"]["weight"].zero_()
        for name in ("turned", "part"):  # memory of their own: views of one memory are not restored together
            fresh["model"][name] = fresh["model"][name].clone()
        fresh["wide"] = torch.ones(40, 3)
        assert checkpointer.restore(fresh) == 0
    for name in ("weight", "turned", "part"):
        assert same(fresh["model"][name], state["model"][name]), name


@pytest.mark.parametrize("state", [torch.ones(3), 5, "text"])
def test_torch_files_that_are_not_a_state(run: Commands, tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert "only a dict or list" in run.refused("convert", tmp_path / "a.pt", tmp_path / "root")


def test_what_a_step_cannot_hold(run: Commands, tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    torch.save({"a": torch.ones(3), "words": {"x", "y"}, "sparse": sparse, 2.5: "key"}, tmp_path / "a.pt")
    line = run.refused("convert", tmp_path / "a.pt", tmp_path / "root")
    assert "sparse" in line
    assert "the key 2.5" in line
    assert "--skip-unsafe" in line
    assert not (tmp_path / "root").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "root", "--skip-unsafe")
    assert "left out" in run.out
    step = open_checkpoint(tmp_path / "root")
    assert list(step) == ["a"]
    assert step.values_by_name == {"words": {"x", "y"}}


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: item.state_dict() if hasattr(item, "state_dict") else item for key, item in state.items()}


def test_values_that_dcp_cannot_hold_without_code_are_left_out(run: Commands, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(
            checkpointer, {"t": torch.ones(3), "n": [1, (2.5,)], "args": Namespace(lr=1), "when": [date(2024, 1, 1)]}, 1
        )
    text = run("export", tmp_path / "root", tmp_path / "dcp", "--to", "dcp")
    assert "all bits are equal" in text
    assert "does not load them: args (Namespace), when (list)" in text


def test_dcp_of_a_training_run(run: Commands, tmp_path: Path) -> None:
    state = trained()
    dcp.save(dicts(state), checkpoint_id=tmp_path / "dcp")
    assert "all bits are equal" in run("convert", tmp_path / "dcp", tmp_path / "root")
    fresh = trained()
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.zero_()
    fresh |= {"step": 0, "note": "", "betas": []}
    fresh["optimizer"].param_groups[0]["lr"] = 1.0
    restored(tmp_path / "root", fresh)
    assert same(fresh["model"].state_dict(), state["model"].state_dict())
    assert str(fresh["optimizer"].state_dict()) == str(state["optimizer"].state_dict())
    assert {key: fresh[key] for key in ("step", "note", "nothing", "betas")} == {
        key: state[key] for key in ("step", "note", "nothing", "betas")
    }


def test_dcp_keys_that_read_like_numbers(run: Commands, tmp_path: Path) -> None:
    dcp.save({"a": {"0": torch.ones(1), "1": torch.ones(2)}, "b": {"0": 1, "x": 2}}, checkpoint_id=tmp_path / "dcp")
    run("convert", tmp_path / "dcp", tmp_path / "numbers")
    run("convert", tmp_path / "dcp", tmp_path / "strings", "--string-keys")
    restored(tmp_path / "numbers", {"a": {0: torch.zeros(1), 1: torch.zeros(2)}, "b": {"0": 0, "x": 0}})
    restored(tmp_path / "strings", {"a": {"0": torch.zeros(1), "1": torch.zeros(2)}, "b": {"0": 0, "x": 0}})


def test_dcp_chunks_that_only_torch_reads(run: Commands, tmp_path: Path) -> None:
    tensor = torch.randn(8, 6)
    dcp.save({"turned": tensor.t(), "conj": torch.randn(3, dtype=torch.complex64).conj()}, checkpoint_id=tmp_path / "d")
    run("convert", tmp_path / "d", tmp_path / "root")
    assert same(torch.from_numpy(open_checkpoint(tmp_path / "root")["turned"].read()), tensor.t())


def dcp_layouts(world_size: int) -> dict[str, Any]:
    """The layouts that DCP itself restores."""
    state = layouts.build(world_size)
    state["sharded"] = {name: t for name, t in state["sharded"].items() if not name.startswith("rows_twice")}
    return dicts(state)


def both_ways_on_ranks(rank: int, world_size: int, folder: Path) -> list[str]:
    dcp.save(dcp_layouts(world_size), checkpoint_id=folder / "dcp")
    with Checkpointer(folder / "root", staging=Staging(file_bytes=2048, inner_bytes=512)) as checkpointer:
        save_here(checkpointer, dcp_layouts(world_size), 3)
    if rank == 0:
        assert main(["convert", str(folder / "dcp"), str(folder / "new-root")]) == 0
        assert main(["export", str(folder / "root"), str(folder / "new-dcp"), "--to", "dcp"]) == 0
    torch.distributed.barrier()
    expected = dcp_layouts(world_size)
    state = dcp_layouts(world_size)
    layouts.clear(state)
    with Checkpointer(folder / "new-root") as checkpointer:
        checkpointer.restore(state)
    wrong = layouts.differences(state, expected)
    layouts.clear(state)
    dcp.load(state, checkpoint_id=folder / "new-dcp")
    return wrong + layouts.differences(state, expected)


def test_both_ways_with_fsdp_and_tensor_parallelism(tmp_path: Path) -> None:
    results = run_ranks(both_ways_on_ranks, 2, tmp_path)
    assert [result.value for result in results] == [[], []]
    assert validate(str(tmp_path / "new-root/step_00000000")).whole


def test_torch_loads_what_was_converted(run: Commands, tmp_path: Path) -> None:
    state = trained()
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, state, 4)
    run("export", tmp_path / "root", tmp_path / "dcp", "--to", "dcp")
    fresh = dicts(trained())
    fresh["model"] = cleared(fresh["model"])
    fresh["optimizer"]["param_groups"][0]["lr"] = 1.0
    fresh |= {"step": 0, "note": "", "betas": []}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp")
    wanted = dicts(state)
    assert same(fresh.pop("model"), dict(wanted.pop("model")))
    assert str(fresh) == str(wanted)
    reader = dcp.FileSystemReader(tmp_path / "dcp")
    assert reader.read_metadata().state_dict_metadata["model.0.weight"].size == torch.Size([90, 70])
    run("convert", tmp_path / "dcp", tmp_path / "again", "--step", "4")
    run("diff", tmp_path / "root", tmp_path / "again")


def test_ranks_dtypes_and_ties_to_dcp(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    run("export", saved["two"], tmp_path / "dcp", "--to", "dcp")
    assert "belongs to single ranks" in run.out
    assert "model/tied" in run.out
    wanted = states.state(4)
    state = {
        "model": cleared(wanted["model"]),
        "half": torch.zeros(9, 9).to(torch.float8_e4m3fn),
        "scalar": torch.ones(()),
    }
    state |= {"numbers": dict.fromkeys(wanted["numbers"]), "own@rank1": torch.zeros(70, dtype=torch.int64)}
    state["position@rank0"] = None
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert same(
        {key: state[key] for key in ("model", "half", "scalar", "numbers")},
        {key: wanted[key] for key in ("model", "half", "scalar", "numbers")},
    )
    assert torch.equal(state["own@rank1"], states.state(4, 1)["own"].value)
    assert state["position@rank0"] == 4


# -- containers --------------------------------------------------------------------------------------------------------


def rebuilt(root: Path, step: int = 0) -> Any:
    """Make the state again, with nothing but what the step has."""
    opened = open_checkpoint(root, step)
    index = opened.index
    leaves: dict[Any, Any] = {path: torch.from_numpy(opened[display(path)].read()) for path in index.tensors}
    leaves |= {path: leaves[target] for path, target in index.aliases.items()}
    return rebuild(leaves | index.values, index.containers)


def test_a_torch_file_keeps_its_nesting(run: Commands, tmp_path: Path) -> None:
    state = {
        "model": OrderedDict(a=torch.ones(2), b=torch.zeros(3)),
        "list": [torch.ones(2), {"step": 3, "inner": (torch.zeros(1), [torch.ones(1), None])}],
        "tuple": (torch.arange(3), "text"),
        "values": [1, (2, "x")],
        "empty": {},
    }
    torch.save(state, tmp_path / "a.pt")
    assert "all bits are equal" in run("convert", tmp_path / "a.pt", tmp_path / "root")
    assert nested_same(rebuilt(tmp_path / "root"), state)
    run("convert", tmp_path / "a.pt", tmp_path / "root", "--step", "1", "--under", "a/b")
    assert nested_same(rebuilt(tmp_path / "root", 1), {"a": {"b": state}})
    torch.save([state, torch.ones(1)], tmp_path / "b.pt")
    run("convert", tmp_path / "b.pt", tmp_path / "root", "--step", "2")
    assert nested_same(rebuilt(tmp_path / "root", 2), [state, torch.ones(1)])
    run("export", tmp_path / "root", tmp_path / "c.pt", "--to", "torch")
    assert nested_same(torch.load(tmp_path / "c.pt", weights_only=True), [state, torch.ones(1)])


def test_a_dcp_directory_keeps_its_lists(run: Commands, tmp_path: Path) -> None:
    state = {"list": [torch.ones(2), {"step": 3, "inner": [torch.zeros(1), {"x": 5}]}], "betas": [1, 2]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    run("convert", tmp_path / "dcp", tmp_path / "root")
    assert nested_same(rebuilt(tmp_path / "root"), state)


def nested_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(nested_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nested_same(one[key], other[key]) for key in one)
    return same(one, other)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_difference_is_found(run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.inspect_ckpt import convert

    write_step = convert.write_step

    def change_source(state: Any, *arguments: Any) -> str:
        path = write_step(state, *arguments)
        source = tmp_path / "a.safetensors"
        source.write_bytes(source.read_bytes()[:-1] + b"\xff")
        return path

    save_file({"a": torch.ones(5)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(convert, "write_step", change_source)
    run("convert", tmp_path / "a.safetensors", tmp_path / "root", code=1)
    assert "NOT equal" in run.out
    assert "a differs" in run.out
    save_file({"a": torch.ones(5)}, tmp_path / "a.safetensors")
    assert run.json("convert", tmp_path / "a.safetensors", tmp_path / "b", "--no-verify")["verified"] is None


def test_a_failed_conversion_publishes_nothing(run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.formats import step_writer

    tensors = {"a": torch.zeros(15 << 20), "b": torch.zeros(15 << 20)}  # two files
    torch.save(tensors, tmp_path / "whole.pt")
    save_file(tensors, tmp_path / "a.safetensors")
    fill, calls = step_writer._Files.fill, []

    def truncate_later(*arguments: Any) -> memoryview:
        if calls:
            with open(tmp_path / "a.safetensors", "r+b") as stream:
                stream.truncate(1000)
        calls.append(arguments)
        return fill(*arguments)

    monkeypatch.setattr(step_writer._Files, "fill", truncate_later)
    assert "truncated" in run.refused("convert", tmp_path / "a.safetensors", tmp_path / "root", code=1)
    assert len(calls) == 2
    assert list((tmp_path / "root" / ".pending").iterdir()) == []
    assert run.json("ls", tmp_path / "root")
    assert not list((tmp_path / "root").glob("step_*"))
    monkeypatch.setattr(step_writer._Files, "fill", fill)
    run("convert", tmp_path / "whole.pt", tmp_path / "root")
    run("validate", tmp_path / "root")


def test_a_job_saves_to_the_same_root_later(run: Commands, tmp_path: Path) -> None:
    save_file({"a": torch.ones(5)}, tmp_path / "a.safetensors")
    run("convert", tmp_path / "a.safetensors", tmp_path / "root")
    with Checkpointer(tmp_path / "root") as checkpointer:
        state = {"a": torch.zeros(5)}
        assert checkpointer.restore(state) == 0
        save_here(checkpointer, state, 1)
    run("diff", tmp_path / "root/step_00000000", tmp_path / "root/step_00000001")


def test_the_target(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "hf" / "model.safetensors"
    source.parent.mkdir()
    save_file({"a": torch.ones(5)}, source)
    root = Path(shutil.copytree(saved["one"], tmp_path / "root"))
    assert "--step" in run.refused("convert", source, root, "--step", "4")
    run("convert", source, root, "--step", "5")
    assert "is a step" in run.refused("convert", source, root / "step_00000004", "--step", "6")
    assert "is a file" in run.refused("convert", source, source)
    assert "no such directory" in run.refused("convert", source, tmp_path / "no" / "where")
    assert "not a checkpoint" in run.refused("convert", source, sharded(tmp_path / "other"))
    assert "is inside" in run.refused("convert", source.parent, source.parent / "root")
    assert "two\\nlines" in run.refused("convert", source, tmp_path / "two\nlines" / "x")
    run.refused("convert", source, "nu\0ll")
    run.refused("convert", source, tmp_path / "new", "--step", "-1")
    run.refused("convert", source, tmp_path / "new", "--under", "a//b")
    assert "already a checkpoint of ckpt" in run.refused("convert", root, tmp_path / "new")
    assert "inspect_ckpt convert" in run.refused("export", source, tmp_path / "new", "--to", "dcp")
    assert "is not empty" in run.refused("export", root, source.parent, "--to", "dcp")
    assert not (tmp_path / "new").exists()


@pytest.mark.timeout(180)  # it moves much data, and a disk may be slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """The process never holds all of a tensor of 400 MB."""
    header = b'{"w":{"dtype":"F32","shape":[10000,10000],"data_offsets":[0,400000000]}}'
    with open(tmp_path / "a.safetensors", "wb") as stream:  # of holes, which cost no disk
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 400_000_000)
    grown, has_torch = peak_growth(("convert", tmp_path / "a.safetensors", tmp_path / "one"))
    assert grown < MEMORY_BOUND
    assert not has_torch
    shutil.rmtree(tmp_path)


@full_only
@pytest.mark.timeout(180)
def test_memory_does_not_grow_with_the_tensors_where_torch_is_needed(tmp_path: Path) -> None:
    """Not all of one of 280 MB."""
    state = {"w": torch.arange(70_000_000, dtype=torch.float32).view(7000, 10000)}
    torch.save(state, tmp_path / "a.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    commands: list[tuple[str | Path, ...]] = [
        ("convert", tmp_path / "a.pt", tmp_path / "two", "--step", "1"),
        ("convert", tmp_path / "dcp", tmp_path / "two", "--step", "2"),
        ("export", tmp_path / "two", tmp_path / "back", "--to", "dcp"),
        ("export", tmp_path / "two", tmp_path / "back.pt", "--to", "torch"),
    ]
    with_torch = ("ckpt.formats.dcp_writer", "ckpt.formats.torch_file", "ckpt.formats.torch_writer")
    grown, _ = peak_growth(*commands, imports=with_torch)
    assert grown < MEMORY_BOUND
    shutil.rmtree(tmp_path)
