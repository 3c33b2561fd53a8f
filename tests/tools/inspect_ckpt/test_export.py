"""The safetensors package reads what `export` writes, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt import Checkpointer, Staging
from ckpt.exporting import selection
from ckpt.formats.safetensors import DTYPES
from tests.support.saves import save_here
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.commands import Commands, peak_growth

MEMORY_BOUND = 224 << 20


def save(root: Path, state: dict[str, object], **staging: int) -> Path:
    with Checkpointer(root, staging=Staging(**staging)) as checkpointer:
        save_here(checkpointer, state, 0)
    return root


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a directory as the index names them; assert that index and files agree."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        assert [file.name for file in directory.iterdir()] == ["model.safetensors"]
        return load_file(directory / "model.safetensors")
    document = json.loads(index.read_text())
    files = sorted(set(document["weight_map"].values()))
    assert {file.name for file in directory.iterdir()} == {*files, index.name}
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    tensors = {}
    for file in files:
        inside = load_file(directory / file)
        assert set(inside) == {name for name, where in document["weight_map"].items() if where == file}
        tensors |= inside
    assert document["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return tensors


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def expected(step: int) -> dict[str, torch.Tensor]:
    state = states.state(step)
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    return tensors | {name: state[name] for name in ("half", "scalar")}


@pytest.mark.parametrize("name", states.NAMES)
@pytest.mark.parametrize("sharded", [True, False])
def test_the_package_reads_every_bit(
    run: Commands, saved: dict[str, Path], tmp_path: Path, name: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_BLOCK_BYTES", 700)
    limit = ("--max-shard-size", "5kB") if sharded else ()
    exclude = ("--exclude", "own*", *(("--exclude", "divided") if name == "two" else ()))
    run("export", saved[name], "--to", "safetensors", tmp_path / "out", *exclude, *limit)
    tensors = loaded(tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == (4 if sharded else 1)
    wanted = expected(4)
    assert set(tensors) == set(wanted)
    assert [key for key in wanted if not same_bits(tensors[key], wanted[key])] == []
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "the data are aligned"
    assert "left out 5 values that safetensors cannot hold" in run.out or name == "two"
    assert "model/tied" in run.out


def test_every_dtype_that_safetensors_have(run: Commands, tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (6, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    state = {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        state[dtype] = raw[..., : kind.itemsize].contiguous().view(kind).squeeze(-1)
        state[f"{dtype} none"] = torch.empty((3, 0), dtype=kind)
    state["bool"] = raw[..., 0] > 100
    save(tmp_path / "root", state)
    run("export", tmp_path / "root", tmp_path / "out")
    tensors = loaded(tmp_path / "out")
    assert [name for name in state if not same_bits(tensors[name], state[name])] == []


def test_a_dtype_that_safetensors_do_not_have_is_refused(run: Commands, tmp_path: Path) -> None:
    save(tmp_path / "root", {"a": {"phase": torch.zeros(3, dtype=torch.complex128)}, "b": torch.ones(2)})
    line = run.refused("export", tmp_path / "root", tmp_path / "out")
    assert "a/phase" in line
    assert "complex128" in line
    assert "exclude 'a/phase'" in line
    assert not (tmp_path / "out").exists()
    run("export", tmp_path / "root", tmp_path / "out", "--exclude", "a/phase")
    assert set(loaded(tmp_path / "out")) == {"b"}


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_dtype_converts_as_torch_does(run: Commands, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 300
    numbers[:4] = torch.tensor([float("nan"), float("inf"), 1e30, -0.0])
    state = {"f32": numbers, "f64": numbers.double(), "bf16": numbers.bfloat16(), "f16": numbers.half()}
    state |= {"ints": torch.arange(9), "f8": numbers.to(torch.float8_e5m2)}
    save(tmp_path / "root", state)
    run("export", tmp_path / "root", tmp_path / "out", "--dtype", name)
    tensors = loaded(tmp_path / "out")
    for key in ("f32", "f64", "bf16", "f16"):
        assert tensors[key].dtype == dtype
        assert torch.equal(tensors[key].nan_to_num(7), state[key].to(dtype).nan_to_num(7)), key
    assert same_bits(tensors["ints"], state["ints"])
    assert same_bits(tensors["f8"], state["f8"])
    assert ("f32: 1 finite element became Inf in float16" in run.out) == (name == "fp16")


def test_tied_tensors(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    run("export", saved["one"], tmp_path / "all", "--prefix", "model")
    both = loaded(tmp_path / "all")
    assert same_bits(both["weight"], both["tied"])
    run("export", saved["one"], tmp_path / "first", "--filter", "model/*", "--drop-tied")
    assert "model.tied" not in loaded(tmp_path / "first")
    run("export", saved["one"], tmp_path / "alias", "--filter", "model/tied", "--drop-tied")
    assert set(loaded(tmp_path / "alias")) == {"model.tied"}, "the only chosen name is not left out"


def test_names_of_per_rank_tensors_have_the_rank(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    document = run.json("export", saved["two"], tmp_path / "out", "--filter", "own*")
    assert document["tensors"] == 2
    assert torch.equal(loaded(tmp_path / "out")["own@rank1"], states.state(4, 1)["own"].value)


def test_the_other_formats(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    run("export", saved["one"], tmp_path / "hf", "--to", "hf")
    assert "left out: model/tied" in run.out
    assert "weight" in loaded(tmp_path / "hf")
    document = run.json("export", saved["one"], tmp_path / "a.pt", "--to", "torch", "--prefix", "model")
    assert (document["files"], document["verified"]) == (["a.pt"], True)
    tensors = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same_bits(tensors["edge"], states.state(4)["model"]["edge"])
    assert "is a directory" in run.refused("export", saved["one"], tmp_path / "hf", "--to", "torch")
    assert "all bits are equal" in run("export", saved["one"], tmp_path / "dcp", "--to", "dcp")


def test_invalid_targets(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "is not empty" in run.refused("export", saved["one"], tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert "not a directory" in run.refused("export", saved["one"], tmp_path / "full" / "notes.txt")
    assert "no such directory" in run.refused("export", saved["one"], tmp_path / "nowhere" / "out")
    root = Path(shutil.copytree(saved["one"], tmp_path / "root"))
    before = sorted(root.rglob("*"))
    assert "is inside" in run.refused("export", root, root / "step_00000004" / "model" / "out")
    assert sorted(root.rglob("*")) == before
    (tmp_path / "link").symlink_to(root / "step_00000004" / "model")
    assert "is inside" in run.refused("export", root, tmp_path / "link" / "out")
    (tmp_path / "empty").mkdir()
    run("export", root, tmp_path / "empty")
    assert run.refused("export", root, tmp_path / "new\nline" / "x").count("\n") == 1
    run.refused("export", root, tmp_path / "nu\0ll")


def test_a_directory_that_may_not_be_written(
    run: Commands, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, *_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.mkdir", refuse)
    assert "Permission denied" in run.refused("export", saved["one"], tmp_path / "out")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--filter", "nothing*"),
        ("--exclude", "nothing*"),
        ("--filter", "model/weight", "--exclude", "model/*"),
        ("--prefix", "nothing"),
        ("--max-shard-size", "0"),
        ("--max-shard-size", "much"),
        ("--dtype", "int4"),
        ("--to", "gguf"),
    ],
)
def test_invalid_arguments(run: Commands, saved: dict[str, Path], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    run.refused("export", saved["one"], tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_name_collisions(run: Commands, tmp_path: Path) -> None:
    save(tmp_path / "root", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "__metadata__": torch.ones(1)})
    assert "both be named 'a.b'" in run.refused("export", tmp_path / "root", tmp_path / "out")
    assert "__metadata__" in run.refused("export", tmp_path / "root", tmp_path / "out", "--exclude", "a/b")
    run("export", tmp_path / "root", tmp_path / "out", "--exclude", "a/b", "--exclude", "__meta*")
    assert torch.equal(loaded(tmp_path / "out")["a.b"], torch.zeros(2))


def test_keys_with_slashes_are_kept_apart(run: Commands, tmp_path: Path) -> None:
    save(tmp_path / "root", {"a": {"b": torch.ones(2)}, "a/b": torch.zeros(2)})
    run("export", tmp_path / "root", tmp_path / "out")
    tensors = loaded(tmp_path / "out")
    assert torch.equal(tensors["a.b"], torch.ones(2))
    assert torch.equal(tensors["a/b"], torch.zeros(2))


def test_nothing_is_left_of_a_damaged_export(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(saved["one"], tmp_path / "root"))
    file = root / "step_00000004/packs/000/rank_00000_000"
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)
    assert "tensor model/tied, chunk (0, 0)" in run.refused("export", root, tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    run.refused("export", root, tmp_path / "there", code=1)
    assert list((tmp_path / "there").iterdir()) == []


def test_an_unpublished_save_is_not_exported(run: Commands, tmp_path: Path) -> None:
    (tmp_path / "root/.pending").mkdir(parents=True)
    run.refused("export", tmp_path / "root", tmp_path / "out", code=3)
    run.refused("export", tmp_path / "nowhere", tmp_path / "out")


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shape=st.lists(st.sampled_from((0, 1, 2, 3, 7, 13)), max_size=3),
    block_bytes=st.sampled_from((1, 50, 400, 1 << 20)),
    inner_bytes=st.sampled_from((16, 200, 4 << 20)),
)
def test_any_shape_in_any_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shape: list[int],
    block_bytes: int,
    inner_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    save(folder / "root", {"t": tensor}, file_bytes=512, inner_bytes=inner_bytes)
    monkeypatch.setattr(selection, "_BLOCK_BYTES", block_bytes)
    Commands(capsys)("export", folder / "root", folder / "out")
    assert same_bits(loaded(folder / "out")["t"], tensor)


@pytest.mark.timeout(180)  # it moves much data, and a disk may be slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    numbers = torch.arange(100_000_000, dtype=torch.float32)
    state = {"w": numbers[:80_000_000].view(8000, 10000), "v": numbers[80_000_000:]}
    with Checkpointer(tmp_path / "root") as checkpointer:
        save_here(checkpointer, state, 0)
    grown, has_torch = peak_growth(("export", tmp_path / "root", tmp_path / "out", "--dtype", "bf16"))
    assert grown < MEMORY_BOUND < 400_000_000
    assert not has_torch
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("v"), state["v"].bfloat16())
    shutil.rmtree(tmp_path)
