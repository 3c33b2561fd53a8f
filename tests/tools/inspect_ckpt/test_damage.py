"""All damage is found, and the damaged file is named; a whole checkpoint has no problems."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from ckpt.validation import Problem, Report, validate
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.damages import KINDS, Damage, applied, chunks, damages, read_tree

FLIPS, EACH = 700, 20


def names_all(report: Report, damage: Damage) -> bool:
    """Whether a problem names every changed file."""

    def named(name: str) -> bool:
        return any(problem.file == name or name in problem.message for problem in report.problems)

    return all(named(name) for name in damage.changes)


@pytest.fixture(params=states.NAMES)
def step(request: pytest.FixtureRequest, saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a step. Tests may damage it."""
    return Path(shutil.copytree(saved[request.param] / "step_00000004", tmp_path / "step_00000004"))


@pytest.mark.parametrize("name", states.NAMES)
@pytest.mark.parametrize("quick", [True, False])
def test_whole_steps_are_whole(saved: dict[str, Path], name: str, quick: bool) -> None:
    for number in states.STEPS:
        report = validate(str(saved[name] / f"step_{number:08d}"), quick=quick)
        assert report.whole, report.problems
        assert report.step == number
        assert report.restorable


def test_all_damage_is_found_and_named(step: Path, saved: dict[str, Path], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["step"]
    tree = read_tree(step)
    other_step = read_tree(saved[name] / "step_00000003")
    other_world = read_tree(saved["one" if name == "two" else "two"] / "step_00000004")
    done: Counter[str] = Counter()
    missed = []
    for damage in damages(tree, other_step, other_world, states.NAMES.index(name), FLIPS, EACH):
        with applied(step, tree, damage):
            report = validate(str(step), jobs=2)
        done[damage.kind] += 1
        if report.whole or not names_all(report, damage):
            missed.append((damage.kind, list(damage.changes), report.problems[:3]))
    assert not missed
    assert set(done) == {"flip", *KINDS}
    assert done.total() >= 900, "three steps make more than 2,700 damages"
    assert validate(str(step)).whole


def test_every_bit_of_the_version_number_is_checked(step: Path) -> None:
    tree = read_tree(step)
    at = tree["zarr.json"].index(b'"format":1') + len(b'"format":')
    for bit in range(8):
        content = bytearray(tree["zarr.json"])
        content[at] ^= 1 << bit
        damage = Damage("flip", {"zarr.json": bytes(content)})
        with applied(step, tree, damage):
            assert names_all(validate(str(step)), damage)


def test_a_damaged_chunk_is_reported_with_tensor_chunk_and_rank(step: Path) -> None:
    tree = read_tree(step)
    name = next(name for name in chunks(tree) if name.startswith("model/weight/"))
    for content in (tree[name][:-9] + b"damaged!!", tree[name][:-1], None):
        with applied(step, tree, Damage("", {name: content})):
            (problem,) = validate(str(step)).problems
        assert (problem.file, problem.tensor) == (name, "model/weight")
        assert problem.chunk is not None
        assert problem.rank is not None
        assert problem.fatal
        assert "\n" not in problem.message


def test_a_wrong_checksum_names_the_offset(step: Path) -> None:
    tree = read_tree(step)
    name = max(chunks(tree), key=lambda name: len(tree[name]))
    content = bytes([tree[name][0] ^ 1]) + tree[name][1:]
    with applied(step, tree, Damage("", {name: content})):
        (problem,) = validate(str(step)).problems
    assert "at offset 0" in problem.message


def test_a_damaged_part_is_one_problem_and_its_chunks_are_still_checked(step: Path) -> None:
    tree = read_tree(step)
    part = tree["parts/000/rank_00000.json"].replace(b'"rank":0', b'"rank":7', 1)
    chunk = chunks(tree)[-1]
    flipped = tree[chunk][:-1] + bytes([tree[chunk][-1] ^ 1])
    with applied(step, tree, Damage("", {"parts/000/rank_00000.json": part})):
        report = validate(str(step))
        assert [problem.file for problem in report.problems] == ["parts/000/rank_00000.json"]
        assert report.restorable, "restore does not need the parts"
    with applied(step, tree, Damage("", {"parts/000/rank_00000.json": part, chunk: flipped})):
        assert {problem.file for problem in validate(str(step)).problems} == {"parts/000/rank_00000.json", chunk}


def test_what_restore_does_not_read_is_not_fatal(step: Path) -> None:
    tree = read_tree(step)
    for changes in ({"extra": b""}, {"intent.json": None}, {"model/weight/zarr.json": b"{}"}):
        with applied(step, tree, Damage("", changes)):
            report = validate(str(step))
        assert not report.whole
        assert report.restorable


def test_an_extra_directory_is_found(step: Path) -> None:
    (step / "model" / "nothing").mkdir()
    (problem,) = validate(str(step)).problems
    assert problem == Problem("this directory does not belong to the checkpoint", "model/nothing")


def test_a_step_under_another_number_is_found(step: Path) -> None:
    step = step.rename(step.with_name("step_00000005"))
    assert ["another save" in problem.message for problem in validate(str(step)).problems] == [True]


def test_quick_validation_opens_no_chunk(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a chunk was read")

    monkeypatch.setattr("ckpt.validation.checks.verify_chunk", refuse)
    assert validate(str(step), quick=True).whole
