"""`convert` makes steps of what Orbax writes, bit by bit, without Orbax and without jax."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import load, load_foreign
from tests.support.orbax_checkpoints import expected_state, write_with_orbax
from tests.support.selection import full_only
from tests.tools.inspect_ckpt.commands import REPOSITORY, Commands

pytestmark = pytest.mark.timeout(180)  # the first test waits for a process that imports jax


@pytest.fixture(scope="session")
def orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of Orbax. Tests must not change them."""
    return write_with_orbax(tmp_path_factory.mktemp("orbax"))


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, the same types and the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("ocdbt", "state"),
        ("files", "state"),
        ("zarr3", "state"),
        ("zarr3 files", "state"),
        ("standard", "tree"),
        ("v1", "v1"),
        ("composite/5/params", "params"),
        ("key", "key"),  # a random key becomes its data
    ],
)
def test_every_layout(run: Commands, tmp_path: Path, orbax: Path, name: str, holds: str) -> None:
    assert "all bits are equal" in run("convert", orbax / name, tmp_path / "root", "--step", "7")
    run("validate", tmp_path / "root")
    assert same(load(tmp_path / "root"), expected_state(orbax, holds))
    assert same(load_foreign(orbax / name), expected_state(orbax, holds))
    shown = run("show", orbax / name)
    assert "Orbax" in shown
    for leaf in expected_state(orbax, holds) if holds == "params" else ():
        assert leaf in shown


def test_neither_orbax_nor_jax_is_needed(tmp_path: Path, orbax: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(jax=None, orbax=None, zarr=None)\n"
        "from tools.inspect_ckpt.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "convert", str(orbax / "ocdbt"), str(tmp_path / "root")]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    assert same(load(tmp_path / "root"), expected_state(orbax, "state"))


def test_steps_and_items(run: Commands, tmp_path: Path, orbax: Path) -> None:
    """The only step and the only tree are taken; where there are several, the user is asked."""
    line = run.refused("convert", orbax / "manager", tmp_path / "root")
    assert f"manager has several steps of Orbax: 3, 12; give one of them: {orbax}/manager/12" in line
    line = run.refused("convert", orbax / "composite", tmp_path / "root")
    assert "composite/5 has several items of Orbax: params, state; give one of them: " in line
    run("convert", orbax / "manager" / "12", tmp_path / "root", "--step", "12")
    assert same(load(tmp_path / "root"), {"w": torch.full((4, 2), 12, dtype=torch.int32)})
    run("convert", orbax / "manager" / "3" / "default", tmp_path / "root", "--step", "13")
    assert same(load(tmp_path / "root"), {"w": torch.full((4, 2), 3, dtype=torch.int32)})
    one = tmp_path / "one"
    shutil.copytree(orbax / "composite", one)
    shutil.rmtree(one / "5" / "params")
    assert "left out, because they are no trees of arrays: about" in run("convert", one, tmp_path / "root")
    assert load(tmp_path / "root", step=0) == {"step": 5}
    shutil.rmtree(one / "5" / "state")
    assert "has no item that is a tree of arrays; it has: about" in run.refused("convert", one, tmp_path / "new")


@pytest.mark.parametrize(
    "path",
    ["renamed.orbax-checkpoint-tmp", "bucket/2", "manager/3", "manager/3/default", "manager/12.orbax-checkpoint-tmp-7"],
)
def test_saves_that_orbax_has_not_committed(run: Commands, tmp_path: Path, orbax: Path, path: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(orbax, source)
    shutil.copytree(source / "manager" / "12", source / "manager" / "12.orbax-checkpoint-tmp-7")
    for file in (source / "manager" / "3").rglob("commit_success.txt"):
        file.unlink()
    shutil.copy(source / "bucket" / "2" / "_CHECKPOINT_METADATA", source / "manager" / "3")
    assert "is a save that Orbax has not committed" in run.refused("convert", source / path, tmp_path / "root")
    for committed in ("bucket/1", "manager/12"):
        run("convert", source / committed, tmp_path / committed.partition("/")[0])


def test_processes_that_were_not_merged(run: Commands, tmp_path: Path, orbax: Path) -> None:
    shutil.copytree(orbax / "ocdbt", tmp_path / "parts")
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"):
        (tmp_path / "parts" / name).unlink()
    assert "they were not merged" in run.refused("convert", tmp_path / "parts", tmp_path / "root")


def test_leaves_that_cannot_be_converted(run: Commands, tmp_path: Path, orbax: Path) -> None:
    line = run.refused("convert", orbax / "int4", tmp_path / "root")
    assert "layers/quantized is of dtype int4" in line
    line = run.refused("convert", orbax / "dots", tmp_path / "root")
    assert "['a', 'b'] and ['a.b'] have the same array 'a.b'" in line
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("command", ["ls", "validate", "timeline", "clean"])
@pytest.mark.parametrize("path", ["ocdbt", "zarr3 files", "manager", "manager/12", "manager/12/default"])
def test_what_other_commands_say(run: Commands, orbax: Path, command: str, path: str) -> None:
    assert f"{path} is an Orbax checkpoint, not a checkpoint of ckpt; to make a step" in run.refused(
        command, orbax / path
    )


def test_steps_with_the_names_of_ours(run: Commands, tmp_path: Path, orbax: Path) -> None:
    shutil.copytree(orbax / "manager" / "12", tmp_path / "step_00000012")
    assert run("show", tmp_path / "step_00000012").startswith("Orbax")
    for command in ("ls", "validate"):
        assert "is an Orbax checkpoint" in run.refused(command, tmp_path / "step_00000012")
    run("convert", tmp_path / "step_00000012", tmp_path / "root", "--step", "12")


def test_links_out_of_a_root(run: Commands, tmp_path: Path, orbax: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "12").symlink_to(orbax / "manager" / "12")
    assert "root/12 is a link to" in run.refused("convert", tmp_path / "root", tmp_path / "new")
    run("convert", tmp_path / "root", tmp_path / "new", "--follow-links")


def without_flag(item: Path) -> None:
    """Make the metadata those of older versions of Orbax, which did not store chunks of zeros."""
    document = json.loads((item / "_METADATA").read_text())
    del document["store_array_data_equal_to_fill_value"]
    (item / "_METADATA").write_text(json.dumps(document))


@pytest.mark.parametrize(("name", "chunk"), [("files", "params.zeros/1.0"), ("zarr3 files", "params.zeros/c/1/0")])
def test_chunks_that_are_missing(run: Commands, tmp_path: Path, orbax: Path, name: str, chunk: str) -> None:
    """Orbax stores all chunks since it says so in the metadata: then one that is missing was lost."""
    item = Path(shutil.copytree(orbax / name, tmp_path / "item"))
    (item / chunk).unlink()
    line = run.refused("convert", item, tmp_path / "root", code=1)
    assert "params/zeros cannot be read: NOT_FOUND: chunk {" in line
    without_flag(item)
    assert "params/zeros has chunks that are not stored" in run("convert", item, tmp_path / "root")
    assert same(load(tmp_path / "root"), expected_state(orbax, "state"))


@pytest.mark.parametrize(
    "name", ["ocdbt", pytest.param("zarr3", marks=full_only), pytest.param("files", marks=full_only), "zarr3 files"]
)
def test_lost_and_truncated_files(run: Commands, tmp_path: Path, orbax: Path, name: str) -> None:
    """Without a file, or with half of it, a checkpoint is refused, or all that it holds is read from other files."""
    wanted, refused = expected_state(orbax, "state"), 0
    files = [file for file in sorted((orbax / name).rglob("*")) if file.is_file()]
    for number, file in enumerate(files[::8] if "files" in name else files):
        item = Path(shutil.copytree(orbax / name, tmp_path / f"item {number}"))
        damaged = item / file.relative_to(orbax / name)
        for damage in (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), Path.unlink):
            damage(damaged)
            root = tmp_path / f"root {number} {damaged.exists()}"
            if run.exit_code("convert", item, root, "--no-verify"):
                refused += 1
                assert str(item) in run.err
            else:
                assert same(load(root), wanted), file
        shutil.rmtree(item)
    assert refused > 4


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("_METADATA", lambda document: document["tree_metadata"].clear() or {}),
        ("_METADATA", lambda document: {**document, "tree_metadata": [1]}),
        ("_METADATA", lambda document: {**document, "use_zarr3": "yes"}),
        ("_METADATA", lambda document: {**document, "use_zarr3": True}),
        ("_METADATA", lambda document: {"tree_metadata": {"x": entry([("l", 2), ("999999", 1)])}}),
        ("_METADATA", lambda document: {"tree_metadata": {"x": entry([("../../secret", 2)])}}),
        ("_METADATA", lambda document: {"tree_metadata": {"x": entry([("/etc", 2)])}}),
        ("_METADATA", lambda document: {"tree_metadata": {"x": entry([("a", 2)] * 101)}}),
        ("_METADATA", lambda document: {"tree_metadata": {"x": entry([("a", 2)], "module.Handler")}}),
        ("_METADATA", lambda document: {"tree_metadata": {"x": entry([], "None")}}),
        ("_METADATA", lambda document: []),
        ("_strings.json", lambda document: {}),
        ("_strings.json", lambda document: 3),
    ],
)
def test_documents_that_make_no_sense(
    run: Commands, tmp_path: Path, orbax: Path, file: str, change: Callable[[Any], Any]
) -> None:
    item = Path(shutil.copytree(orbax / "files", tmp_path / "item"))
    shutil.copytree(item / "params.bool", tmp_path / "secret")
    (item / file).write_text(json.dumps(change(json.loads((item / file).read_text()))))
    assert run.exit_code("convert", item, tmp_path / "root")
    assert "item" in run.err
    assert not list((tmp_path / "root").glob("step_*"))


def entry(keys: list[tuple[str, int]], value_type: str = "jax.Array") -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": kind} for key, kind in keys],
        "value_metadata": {"value_type": value_type, "skip_deserialize": False},
    }
