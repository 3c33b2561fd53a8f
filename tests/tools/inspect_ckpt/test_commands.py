"""Output of the commands for whole checkpoints, and for checkpoints with known damage."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt import Checkpointer, Staging
from ckpt.loading.consistency import read_index
from ckpt.ranks.failure import Failure
from ckpt.storage.commit import Abandoned, PendingSave
from ckpt.storage.compression import Compression
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.root import CheckpointRoot
from ckpt.validation import Report
from inprocess.ipc.process import Process
from tests.ckpt.validation.forgery import reseal_root
from tests.support.saves import save_here
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.commands import Commands

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def root(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the root that two ranks saved to."""
    return Path(shutil.copytree(saved["two"], tmp_path / "root"))


PACK = "packs/000/rank_00000_000"
"""The file with the first chunks of model/weight."""


def damage(root: Path, step: int, name: str = PACK) -> None:
    file = root / f"step_{step:08d}" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def _owner(root: Path) -> int:
    """Return the token of a job that has ended."""
    checkpoints = CheckpointRoot(str(root))
    checkpoints.make()
    if not checkpoints.ownership.newest():
        checkpoints.ownership.release(checkpoints.ownership.claim(0))
    return checkpoints.ownership.newest()


@contextlib.contextmanager
def alive(root: Path) -> Iterator[None]:
    """Register a live writer of the owner for the length of the block."""
    ownership = CheckpointRoot(str(root)).ownership
    lease = ownership.leases(ownership.newest()).register(0, Process.here(), lambda: False)
    yield
    lease.close()


def pending(root: Path, step: int, *, intent: bool = True, old: bool = True) -> PendingSave:
    save = PendingSave(CheckpointRoot(str(root)), SaveId(step, _owner(root), f"{step:016x}"))
    save.begin(2, "plan")
    file = Path(save.path) / PACK
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(5000))
    if not intent:
        (Path(save.path) / "intent.json").unlink()
    if old:
        for path in (Path(save.path), *Path(save.path).rglob("*")):
            os.utime(path, (1e9, 1e9))
    return save


def complete(root: Path, save: PendingSave) -> None:
    for rank in (0, 1):
        save.write_part(rank, {})


# -- ls --------------------------------------------------------------------------------------------------------------


def test_ls_lists_steps_and_chooses_the_newest(run: Commands, root: Path) -> None:
    answer = run.json("ls", root)
    assert [(row["step"], row["state"], row["ranks"]) for row in answer["saves"]] == [
        (3, "published", 2),
        (4, "published", 2),
    ]
    assert answer["restart"]["step"] == 4
    assert "newest published step" in run("ls", root)
    shown = run.json("show", root)
    assert answer["saves"][1]["tensors"] == len([t for t in shown["tensors"] if t["alias_of"] is None])


def test_ls_skips_a_step_that_cannot_be_restored(run: Commands, root: Path) -> None:
    (root / "step_00000004" / PACK).unlink()
    answer = run.json("ls", root, code=1)
    assert answer["restart"]["step"] == 3
    assert "step 4 is skipped" in answer["restart"]["why"]
    assert f"{PACK} (written by rank 0): is missing" in answer["restart"]["why"]


def test_ls_chooses_a_damaged_step_that_can_be_restored(run: Commands, root: Path) -> None:
    (root / "step_00000004" / "extra").touch()
    answer = run.json("ls", root, code=1)
    assert answer["restart"]["step"] == 4
    assert answer["saves"][-1]["state"] == "DAMAGED"


def test_ls_lists_pending_and_abandoned_saves(run: Commands, root: Path) -> None:
    pending(root, 7)
    pending(root, 8, intent=False)
    pending(root, 6).abandon(Failure(1, "StorageError", "the disk is full"))
    rows = {row["step"]: row for row in run.json("ls", root)["saves"]}
    assert (rows[7]["state"], rows[6]["state"]) == ("pending", "abandoned")
    assert "2 parts missing: ranks 0, 1" in rows[7]["note"]
    assert "no intent" in rows[8]["note"]
    assert "rank 1: StorageError: the disk is full" in rows[6]["note"]
    assert rows[7]["bytes"] > 5000
    assert rows[7]["age_s"] > 1e6


def test_ls_chooses_a_complete_pending_save_first(run: Commands, root: Path) -> None:
    save = pending(root, 9)
    complete(root, save)
    answer = run.json("ls", root)
    assert answer["restart"]["step"] == 9
    assert "publishes it first" in answer["restart"]["why"]
    with alive(root):
        assert "is being published" in run.json("ls", root)["restart"]["why"]


def test_ls_of_a_root_without_steps(run: Commands, tmp_path: Path) -> None:
    CheckpointRoot(str(tmp_path)).make()
    assert "from the beginning" in run("ls", tmp_path)


# -- show ------------------------------------------------------------------------------------------------------------


def test_show_lists_everything(run: Commands, root: Path) -> None:
    answer = run.json("show", root)
    tensors = {entry["name"]: entry for entry in answer["tensors"]}
    assert answer["step"] == 4
    assert tensors["model/weight"]["shape"] == [40, 30]
    assert tensors["model/weight"]["bytes"] == 4800
    assert tensors["model/weight"]["ranks"] == [0]  # small, and not known for a parameter
    assert tensors["model/weight"]["chunks"] == 5
    assert tensors["model/tied"]["alias_of"] == "model/weight"
    assert tensors["divided"]["ranks"] == [0, 1]
    assert tensors["own@rank1"]["ranks"] == [1]
    assert tensors["model/empty"]["bytes"] == 0
    assert answer["values"]["numbers/betas"] == [0.9, 0.95]
    assert answer["values"]["position@rank1"] == 5
    assert answer["summary"]["model"]["tensors"] == 5
    text = run("show", root)
    assert "odd name\\n" in text
    assert "= model/weight" in text


def test_show_filter_and_tree(run: Commands, root: Path) -> None:
    names = [entry["name"] for entry in run.json("show", root, "--filter", "model/*e*")["tensors"]]
    assert {"model/weight", "model/edge", "model/empty"} <= set(names)
    assert "half" not in names
    text = run("show", root, "--tree")
    assert "├─ model\n" in text
    assert "weight: float32 [40, 30]" in text


def test_show_reports_damage(run: Commands, root: Path) -> None:
    damage(root, 4, "parts/000/rank_00001.json")
    assert "DAMAGED: parts/000/rank_00001.json" in run("show", root, code=1)


# -- validate --------------------------------------------------------------------------------------------------------


def test_validate_a_root_says_which_steps_are_whole(run: Commands, root: Path) -> None:
    text = run("validate", root)
    assert [line.split(":")[0] for line in text.splitlines()] == ["step_00000003", "step_00000004", "newest whole step"]
    damage(root, 4)
    text = run("validate", root, code=1)
    assert "step_00000003: whole" in text
    assert "step_00000004: DAMAGED, 1 problem" in text
    where = f"{PACK} (tensor model/weight, chunk (1, 0), written by rank 0)"
    assert f"{where}: has a wrong checksum in the 244 bytes at offset 244 of the chunk" in text
    assert "the chunk is at offset 1056" in text
    assert "newest whole step: 3" in text
    answer = run.json("validate", root, code=1)
    assert answer["newest_whole"] == 3
    assert [step["whole"] for step in answer["steps"]] == [True, False]
    assert answer["steps"][1]["problems"][0]["rank"] == 0


def test_validate_quick_reads_no_array(run: Commands, root: Path) -> None:
    damage(root, 4)
    run("validate", "--quick", root)
    answer = run.json("validate", root / "step_00000004", "--jobs", "3", code=1)
    assert answer["steps"][0]["bytes_read"] > 0


def test_a_step_that_cannot_be_checked_does_not_hide_the_others(run: Commands, root: Path) -> None:
    reseal_root(root / "step_00000004", lambda document: document["attributes"]["ckpt"].update(format=99))
    text = run("validate", root, code=2)
    assert "step_00000003: whole" in text
    assert "step_00000004: cannot be checked" in text
    damage(root, 3)
    assert run.json("validate", root, code=1)["newest_whole"] is None
    answer = run.json("ls", root, code=2)["restart"]
    assert answer["step"] is None, "a restart goes back for damage only"
    assert "step 4 cannot be read" in answer["why"]


def test_a_step_is_not_removed_while_it_is_validated(
    run: Commands, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def check(path: str, **_: object) -> Report:
        removed.append(CheckpointRoot(str(root)).remove_step(4))
        return Report(path)

    monkeypatch.setattr("tools.inspect_ckpt.validate.validate_step", check)
    run("validate", root / "step_00000004")
    assert removed == [False]
    assert CheckpointRoot(str(root)).remove_step(4)


# -- diff ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two steps that differ in known ways, and have different chunks."""
    folder = tmp_path_factory.mktemp("pair")
    a = {"same": torch.arange(500.0), "small": torch.ones(3), "nan": torch.tensor([float("nan"), 1.0]), "gone": 1}
    a |= {"little": torch.ones(400, 3), "much": torch.ones(100), "type": torch.ones(4), "count": torch.arange(9)}
    a |= {
        "zero": torch.zeros(5),
        "raw": torch.ones(300).to(torch.float8_e4m3fn),
        "removed": torch.ones(2),
        "n": [1, 2.0],
    }
    b = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in a.items()}
    b["little"][399, 2] = 1.001
    b["much"][::2] = 3.0
    b["type"] = b["type"].double()
    b["count"][0] = 5
    b["zero"][1] = -0.0
    b["raw"][7] = 2.0
    del b["removed"], b["gone"]
    b |= {"added": torch.ones(2), "n": [1, 2]}
    for name, state, size in (("a", a, 512), ("b", b, 2048)):
        staging = Staging(file_bytes=size, inner_bytes=size // 2)
        with Checkpointer(folder / name, staging=staging) as checkpointer:
            save_here(checkpointer, state, 1)
    return folder / "a", folder / "b"


def test_diff_finds_every_change_largest_first(run: Commands, pair: tuple[Path, Path]) -> None:
    answer = run.json("diff", *pair, code=1)
    changes = {change["name"]: change for change in answer["changed"]}
    assert set(changes) == {"little", "much", "type", "count", "zero", "raw"}
    assert [change["name"] for change in answer["changed"]][:2] == ["type", "much"]
    assert (answer["added"], answer["removed"]) == (["added"], ["removed"])
    assert changes["much"]["elements"] == 50
    assert changes["much"]["largest"] == 2.0
    assert changes["much"]["relative"] == pytest.approx(np.sqrt(50 * 4 / 100))
    assert changes["little"]["largest"] == pytest.approx(0.001, rel=1e-3)
    assert changes["zero"]["relative"] == 0.0, "a bit that makes no difference to numbers"
    assert {(value["name"], value["change"]) for value in answer["values"]} == {("gone", "removed"), ("n", "changed")}
    text = run("diff", *pair, code=1)
    assert "float32 [4] -> float64 [4]" in text


def test_diff_of_equal_steps(run: Commands, pair: tuple[Path, Path]) -> None:
    assert run.json("diff", pair[0], pair[0])["equal"]
    assert "10 tensors equal" in run("diff", pair[0], pair[0])


def test_diff_with_a_tolerance(run: Commands, pair: tuple[Path, Path]) -> None:
    names = {change["name"] for change in run.json("diff", *pair, "--rtol", "0.01", code=1)["changed"]}
    assert names == {"much", "type", "count", "raw"}
    names = {change["name"] for change in run.json("diff", *pair, "--atol", "10", code=1)["changed"]}
    assert names == {"type"}


# -- stats -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "normal": torch.randn(300, 70, generator=generator) * 3 + 1000,
        "bf16": torch.randn(999, generator=generator).bfloat16(),
        "f8": torch.randn(999, generator=generator).to(torch.float8_e4m3fn),
        "odd": torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 2.0, -3.0]),
        "ints": torch.randint(-1000, 1000, (40, 40), generator=generator),
        "bools": torch.tensor([True, False, True]),
        "complex": torch.tensor([3 + 4j, 0j]),
        "large": torch.full((64,), 1e200, dtype=torch.float64),
        "scalar": torch.tensor(5.0),
        "empty": torch.zeros(0, 3),
        "constant": torch.ones(70),
        "all_nan": torch.full((3,), float("nan")),
    }
    folder = tmp_path_factory.mktemp("numbers")
    with Checkpointer(folder, staging=Staging(file_bytes=4096, inner_bytes=1024)) as checkpointer:
        save_here(checkpointer, tensors, 1)
    return folder, tensors


@pytest.mark.parametrize("block_bytes", [16 << 20, 512])
def test_stats_are_those_of_the_whole_tensor(
    run: Commands, numbers: tuple[Path, dict[str, torch.Tensor]], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.inspect_ckpt import stats, step

    monkeypatch.setattr(step.block_boxes, "__defaults__", (block_bytes,))
    monkeypatch.setattr(stats, "_ELEMENTS_AT_ONCE", block_bytes // 4)
    folder, tensors = numbers
    found = {entry["name"]: entry for entry in run.json("stats", folder, "*")["tensors"]}
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        entry = found[name]
        wide = tensor.abs().double() if tensor.is_complex() else tensor.double()
        finite = wide[wide.isfinite()]
        assert entry["elements"] == tensor.numel()
        assert entry["zeros"] == int((wide == 0).sum())
        assert entry["nan"] == int(wide.isnan().sum())
        assert entry["inf"] == int(wide.isinf().sum())
        if not finite.numel():
            assert entry["mean"] is entry["min"] is entry["histogram"] is None
            continue
        assert (entry["min"], entry["max"]) == (finite.min().item(), finite.max().item())
        assert entry["mean"] == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-12)
        scale = finite.abs().max().item() or 1.0
        assert entry["std"] == pytest.approx(finite.std(correction=0).item(), rel=1e-9, abs=1e-12 * scale)
        assert entry["norm"] == pytest.approx((finite / scale).norm().item() * scale, rel=1e-12)
        assert sum(entry["histogram"]["counts"]) == finite.numel()


def test_stats_draws_in_text(run: Commands, numbers: tuple[Path, dict[str, torch.Tensor]]) -> None:
    text = run("stats", numbers[0], "normal")
    assert text.count("|") == 20
    assert "#" * 40 in text


def test_stats_reads_in_blocks(numbers: tuple[Path, dict[str, torch.Tensor]]) -> None:
    from tools.inspect_ckpt.step import block_boxes, open_step

    with open_step(str(numbers[0])) as step:
        tensors = step.tensors
    for name, tensor in tensors.items():
        boxes = list(block_boxes(tensor, 2048))
        assert sum(box.elements for box in boxes) == np.prod(tensor.shape)
        if name == "normal":
            assert len(boxes) > 20
            assert max(box.elements for box in boxes) * 4 <= 2048


# -- timeline, plots -------------------------------------------------------------------------------------------------


def test_timeline_adds_up(run: Commands, root: Path) -> None:
    saves = run.json("timeline", root)["saves"]
    assert [save["step"] for save in saves] == [3, 4]
    for save in saves:
        assert save["ranks"] == 2
        assert save["stall_s"] >= save["stage_s"] >= 0
        assert save["rate"] > 0
    assert "zarr.json" in run("timeline", root), "the source of the commit time"


@pytest.mark.parametrize("what", [["timeline"], ["stats"]])
def test_plots_are_drawn(run: Commands, root: Path, tmp_path: Path, what: list[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    run(*what, root, *(["model/*"] if what == ["stats"] else []), "--plot", file)
    assert file.read_bytes().startswith(PNG)
    assert file.stat().st_size > 5000


@pytest.mark.parametrize("file", ["nowhere/picture.png", "picture.nonsense"])
def test_a_plot_that_cannot_be_written(run: Commands, root: Path, tmp_path: Path, file: str) -> None:
    pytest.importorskip("matplotlib")
    run("timeline", root, "--plot", tmp_path / file, code=2)


# -- clean -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def littered(root: Path) -> Path:
    pending(root, 5)
    pending(root, 6, old=False)
    complete(root, pending(root, 7))
    pending(root, 8, intent=False)
    abandoned = pending(root, 9)
    abandoned.abandon(Failure(0, "StorageError", "full"))
    return root


def left(root: Path) -> set[str]:
    return {path.name[:13] for folder in (".pending", ".abandoned") for path in (root / folder).iterdir()}


def test_clean_removes_abandoned_and_stale_saves(run: Commands, littered: Path) -> None:
    before = sorted(littered.rglob("*"))
    text = run("clean", littered, "--dry-run")
    assert sorted(littered.rglob("*")) == before
    assert "would remove 3 saves" in text
    assert "the next start of the job publishes it" in text
    answer = run.json("clean", littered, "--yes")
    assert {name[:13] for name in answer["removed"]} == {"step_00000005", "step_00000008", "step_00000009"}
    assert answer["freed_bytes"] > 14000, "all but the reasons"
    assert {path.name[:13] for path in (littered / ".pending").iterdir()} == {"step_00000006", "step_00000007"}
    assert not list((littered / ".abandoned").rglob("rank_*"))
    (given_up,) = (littered / ".abandoned").glob("step_00000005-*")
    save_id = parse_save_name(given_up.name)
    assert save_id is not None
    outcome = PendingSave(CheckpointRoot(str(littered)), save_id).outcome()
    assert isinstance(outcome, Abandoned)
    assert "inspect_ckpt clean" in outcome.reason.message
    run("validate", littered)
    assert "nothing to remove" in run("clean", littered, "--yes")


def test_clean_removes_files_kept_for_a_next_save(run: Commands, root: Path) -> None:
    kept = root / ".retired" / ("0" * 32) / PACK
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x" * 5000)
    assert "kept for the next save" in run("clean", root, "--dry-run")
    answer = run.json("clean", root, "--yes")
    assert (answer["removed"], answer["freed_bytes"]) == (["0" * 32], 5000)
    assert not list((root / ".retired").iterdir())
    run("validate", root)


def test_clean_keeps_what_is_in_use(run: Commands, littered: Path) -> None:
    (save,) = (littered / ".pending").glob("step_00000005*")
    with alive(littered):
        run("clean", littered, "--yes", code=2)
        assert (save / PACK).exists()


def test_clean_asks_for_confirmation(run: Commands, littered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = left(littered)
    run("clean", littered, code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert "nothing was removed" in run("clean", littered)
    assert left(littered) == before
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert "removed" in run("clean", littered)
    assert not list((littered / ".pending").glob("step_00000005*"))


def test_states_have_every_kind_of_chunk(saved: dict[str, Path]) -> None:
    """test_damage covers only the kinds of chunks that are in these states."""
    for name in states.NAMES:
        index = read_index(str(saved[name] / "step_00000004")).packs
        metas = [array.meta for array in index.arrays if array.region is not None]
        assert {meta.sharded for meta in metas} == {True, False}
        assert {meta.compression for meta in metas} == ({Compression()} if name == "zstd" else {None})
        assert any(max(meta.grid_shape, default=1) > 1 for meta in metas)
        assert any(len(members) > 1 for members in index.arrays_of_regions())
        assert any(len(set(region.ranks.tolist())) > 1 for region in index.regions) == (name == "two")
        assert max(number for _, number in index.files()) >= 2


def test_ls_shows_metrics_and_the_best_steps(run: Commands, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step, loss in {1: 0.5, 2: 0.125, 3: 0.75}.items():
            metrics = {"loss": loss, "name": "a", "acc": 1 - loss} if step != 3 else {"loss": loss}
            save_here(checkpointer, {"w": torch.ones(3)}, step, metrics=metrics)
    text = run("ls", tmp_path)
    assert re.search(r"acc=0\.5 \(lowest\), loss=0\.5$", text, re.MULTILINE)
    assert "acc=0.875 (highest), loss=0.125 (lowest)" in text
    assert "loss=0.75 (highest)" in text
    assert "loss: lowest in step 2, highest in step 3" in text
    assert "acc: lowest in step 1, highest in step 2" in text
    shown = run.json("ls", tmp_path)
    assert shown["best"]["loss"] == {"min": 2, "max": 3}
    assert shown["saves"][0]["metrics"]["loss"] == 0.5


def test_commands_take_the_number_of_a_step_of_a_root(run: Commands, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        for step in (40, 50, 60):
            save_here(checkpointer, {"w": torch.full((3,), float(step))}, step)
    assert run.json("show", root, 50)["step"] == 50
    assert run.json("show", root / "step_00000050") == run.json("show", root, 50)
    changed = run.json("diff", root, 40, 50, code=1)
    assert (changed["a"], changed["b"]) == (str(root / "step_00000040"), str(root / "step_00000050"))
    assert changed["changed"][0]["largest"] == 10
    assert run("diff", root, 50, 50)
    assert run.json("stats", root, "w", "--step", 40)["step"] == 40
    assert [each["step"] for each in run.json("validate", root, 50)["steps"]] == [50]
    assert [each["step"] for each in run.json("validate", root, 40, 60)["steps"]] == [40, 60]
    assert run("index", root, 40).startswith(f"{root}/step_00000040: ")
    run("export", root, tmp_path / "exported", "--step", 40)
    assert (tmp_path / "exported" / "model.safetensors").exists()
    for command in (("show", root, 45), ("diff", root, 40, 45), ("validate", root, 45), ("index", root, 45)):
        assert "has no published step 45; it has 40, 50, 60" in run.refused(*command, code=3)
    assert "'x' is not the number of a step" in run.refused("show", root, "x")
    assert "'x' is not the number of a step" in run.refused("diff", root, "x", 40)
    assert "is a step, not a checkpoint root" in run.refused("show", root / "step_00000040", 40)


def test_a_step_that_is_a_link_is_restored_listed_and_never_deleted_through(run: Commands, tmp_path: Path) -> None:
    root, archive = tmp_path / "root", tmp_path / "archive"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, {"w": torch.full((3,), float(step))}, step)
    (root / "step_00000002").rename(archive)
    (root / "step_00000002").symlink_to(archive)
    before = sorted(path.relative_to(archive) for path in archive.rglob("*"))
    text = run("ls", root)
    assert f"a link to {archive}" in text
    assert "restart: step 2" in text
    state = {"w": torch.zeros(3)}
    with Checkpointer(root, read_only=True) as checkpointer:
        assert checkpointer.restore(state) == 2
    assert "newest whole step: 2" in run("validate", root)
    assert "0 B" in run("rm", root, "2", "--yes"), "only the link is freed"
    assert CheckpointRoot(str(root)).steps() == [1]
    assert sorted(path.relative_to(archive) for path in archive.rglob("*")) == before
