"""All damage is found, and the damaged file is named; a whole checkpoint has no problems."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from ckpt.loading.consistency import array_name, read_index
from ckpt.storage.documents import FORMAT_VERSION
from ckpt.validation import Problem, Report, validate
from tests.support.selection import FULL
from tests.tools.inspect_ckpt import states
from tests.tools.inspect_ckpt.damages import KINDS, Damage, applied, damages, packs, read_tree

FLIPS, EACH = (700, 20) if FULL else (100, 6)


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
    assert done.total() >= (900 if FULL else 150)
    assert validate(str(step)).whole


def test_every_bit_of_the_version_number_is_checked(step: Path) -> None:
    tree = read_tree(step)
    at = tree["zarr.json"].index(b'"format":%d' % FORMAT_VERSION) + len(b'"format":')
    for bit in range(8):
        content = bytearray(tree["zarr.json"])
        content[at] ^= 1 << bit
        damage = Damage("flip", {"zarr.json": bytes(content)})
        with applied(step, tree, damage):
            assert names_all(validate(str(step)), damage)


def test_a_damaged_chunk_is_reported_with_tensor_chunk_and_rank(step: Path) -> None:
    tree = read_tree(step)
    stored = read_index(str(step)).packs
    for array in stored.arrays:
        for index in array.meta.chunk_indices():
            file, offset, nbytes = stored.place(array, index)
            content = bytearray(tree[file])
            content[offset + nbytes // 2] ^= 1
            with applied(step, tree, Damage("", {file: bytes(content)})):
                (problem,) = validate(str(step)).problems
            assert (problem.file, problem.tensor, problem.chunk) == (file, array_name(array), index)
            assert problem.rank == int(file[-9:-4])
            assert problem.fatal
            assert f"the chunk is at offset {offset}" in problem.message
            assert "\n" not in problem.message


def test_a_missing_file_of_a_pack_is_one_problem(step: Path) -> None:
    tree = read_tree(step)
    for name in packs(tree):
        with applied(step, tree, Damage("", {name: None})):
            report = validate(str(step))
        assert report.problems == [Problem("is missing", name, rank=int(name[-9:-4]), fatal=True)]


def test_a_wrong_checksum_names_the_offset_in_the_chunk(step: Path) -> None:
    tree = read_tree(step)
    name = max(packs(tree), key=lambda name: len(tree[name]))
    content = bytes([tree[name][0] ^ 1]) + tree[name][1:]
    with applied(step, tree, Damage("", {name: content})):
        (problem,) = validate(str(step)).problems
    assert "at offset 0 of the chunk" in problem.message


def test_a_damaged_part_is_one_problem_and_its_chunks_are_still_checked(
    step: Path, request: pytest.FixtureRequest
) -> None:
    """Only the part says where compressed chunks are: without it, they can neither be checked nor restored."""
    compressed = request.node.callspec.params["step"] == "zstd"
    tree = read_tree(step)
    part = tree["parts/000/rank_00000.json"].replace(b'"rank":0', b'"rank":7', 1)
    chunk = packs(tree)[-1]
    flipped = tree[chunk][:-1] + bytes([tree[chunk][-1] ^ 1])
    with applied(step, tree, Damage("", {"parts/000/rank_00000.json": part})):
        report = validate(str(step))
        assert [problem.file for problem in report.problems] == ["parts/000/rank_00000.json"]
        assert report.restorable != compressed
        assert validate(str(step), quick=True).restorable != compressed
    with applied(step, tree, Damage("", {"parts/000/rank_00000.json": part, chunk: flipped})):
        found = {problem.file for problem in validate(str(step)).problems}
    assert found == {"parts/000/rank_00000.json"} | (set() if compressed else {chunk})


def test_what_restore_does_not_read_is_not_fatal(step: Path) -> None:
    tree = read_tree(step)
    for changes in ({"extra": b""}, {"intent.json": None}, {"references.json": b"{}"}):
        with applied(step, tree, Damage("", changes)):
            report = validate(str(step))
        assert not report.whole
        assert report.restorable


def test_an_extra_directory_is_found(step: Path) -> None:
    (step / "packs" / "nothing").mkdir()
    (problem,) = validate(str(step)).problems
    assert problem == Problem("this directory does not belong to the checkpoint", "packs/nothing")


def test_a_step_under_another_number_is_found(step: Path) -> None:
    step = step.rename(step.with_name("step_00000005"))
    assert ["another save" in problem.message for problem in validate(str(step)).problems] == [True]


def test_quick_validation_opens_no_pack(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pack was opened")

    monkeypatch.setattr("ckpt.storage.step_source.open_regular", refuse)
    assert validate(str(step), quick=True).whole
    with pytest.raises(AssertionError, match="a pack was opened"):
        validate(str(step))
