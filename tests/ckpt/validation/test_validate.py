"""Each kind of damage of a step is a problem that names where it is; a whole step has none."""

from __future__ import annotations

import itertools
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Checkpointer, PerRank, Staging
from ckpt.loading.consistency import array_name, read_index
from ckpt.native import crc32c
from ckpt.storage.documents import digest
from ckpt.storage.names import MANIFEST, NODES
from ckpt.storage.ocdbt import database
from ckpt.storage.pack_index import PackIndex, StoredArray
from ckpt.storage.zarr_entries import Hierarchy
from ckpt.validation import Problem, Report, validate
from ckpt.validation.checks import compressed_places
from tests.ckpt.validation.forgery import array_of, reseal_index, reseal_part, reseal_root
from tests.support import layouts, run_ranks
from tests.support.saves import save_here

RANKS = 4
SHARDED = ("sharded", "rows(33, 17)")
"""A tensor of which each rank has a shard, and whose shards have inner chunks."""

FILE = "packs/000/rank_00001_000"
PART = "parts/000/rank_00001.json"


def save_all(rank: int, world_size: int, folder: Path) -> None:
    state = layouts.build(world_size) | {"own": PerRank(torch.full((rank + 5, 3), 1.0))}
    for name, compression in (("plain", None), ("zstd", "zstd")):
        staging = Staging(compression=compression, file_bytes=8192, inner_bytes=256)
        with Checkpointer(folder / name, staging=staging) as checkpointer:
            save_here(checkpointer, state, 1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of four ranks. Tests must not change them."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_all, RANKS, folder)
    return folder


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "plain" / "step_00000001", tmp_path / "step_00000001"))


@pytest.fixture
def zstd(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "zstd" / "step_00000001", tmp_path / "step_00000001"))


@pytest.mark.parametrize("name", ["plain", "zstd"])
@pytest.mark.parametrize("quick", [True, False])
def test_a_whole_step_has_no_problems(saved: Path, name: str, quick: bool) -> None:
    step = saved / name / "step_00000001"
    report = validate(str(step), quick=quick)
    assert report == Report(str(step), 1, report.files, report.bytes_read)
    assert report.files == sum(file.is_file() for file in step.rglob("*"))
    packs = step.glob("packs/*/*")
    assert report.bytes_read == (0 if quick else sum(file.stat().st_size for file in packs))
    index = read_index(str(step)).packs
    assert any(not array.is_whole for array in index.arrays), "boxes are covered"
    assert any(array.meta.sharded for array in index.arrays), "shards are covered"


# -- damage in the files of packs --------------------------------------------------------------------------------------


def chunks_in(index: PackIndex, file: str) -> list[tuple[int, int, StoredArray, tuple[int, ...]]]:
    """Return the offset, size, array and index of each chunk in a file, in order."""
    found = []
    for array in index.arrays:
        for chunk in array.meta.chunk_indices():
            name, offset, nbytes = index.place(array, chunk)
            if name == file:
                found.append((offset, nbytes, array, chunk))
    return sorted(found, key=lambda chunk: chunk[0])


def patch(file: Path, offset: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    assert offset + len(data) <= len(content)
    content[offset : offset + len(data)] = data
    file.write_bytes(content)


def test_bytes_between_chunks_that_are_not_zero(plain: Path) -> None:
    chunks = chunks_in(read_index(str(plain)).packs, FILE)
    gaps = [(end[0] + end[1], after[0]) for end, after in itertools.pairwise(chunks)]
    end = next(end for start, end in gaps if start < end)
    patch(plain / FILE, end - 1, b"\1")
    report = validate(str(plain))
    assert report.problems == [Problem(f"has other bytes than zeros before offset {end}", FILE, rank=1)]
    assert report.restorable, "no tensor has these bytes"


def sharded_chunk(step: Path) -> tuple[StoredArray, tuple[int, ...], str, int, int]:
    """Return a shard with at least two inner chunks, its index in the grid, its file, offset and bytes."""
    packs = read_index(str(step)).packs
    array = next(array for array in packs.arrays if array.path == SHARDED)
    return array, (0, 0), *packs.place(array, (0, 0))


def test_a_shard_with_another_index(plain: Path) -> None:
    array, chunk, file, offset, nbytes = sharded_chunk(plain)
    at = offset + nbytes - array.meta.index_bytes
    index = (plain / file).read_bytes()[at : offset + nbytes - 4]
    assert len(index) >= 32, "two entries"
    index = index[16:32] + index[:16] + index[32:]
    patch(plain / file, at, index + struct.pack("<I", crc32c(index)))
    (problem,) = validate(str(plain)).problems
    assert (problem.file, problem.tensor, problem.chunk) == (file, array_name(array), chunk)
    assert problem.message.startswith("has another index of inner chunks than this package writes")
    assert f"at offset {offset}" in problem.message


def test_a_valid_chunk_of_another_place(plain: Path) -> None:
    array, _, file, offset, nbytes = sharded_chunk(plain)
    pitch = array.meta.inner_chunk_bytes + 4
    first = (plain / file).read_bytes()[offset : offset + pitch]
    assert nbytes >= 2 * pitch
    patch(plain / file, offset + pitch, first)
    (problem,) = validate(str(plain)).problems
    assert (problem.file, problem.fatal) == (file, True)
    assert "holds other data than its writer recorded" in problem.message


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_names_tensor_chunk_and_place(plain: Path, number: int) -> None:
    offset, nbytes, array, chunk = chunks_in(read_index(str(plain)).packs, FILE)[number]
    byte = (plain / FILE).read_bytes()[offset + nbytes - 1]
    patch(plain / FILE, offset + nbytes - 1, bytes([byte ^ 8]))
    (problem,) = validate(str(plain)).problems
    assert (problem.file, problem.tensor, problem.chunk, problem.rank) == (FILE, array_name(array), chunk, 1)
    assert problem.fatal
    assert problem.message.endswith(f"the chunk is at offset {offset}")
    assert validate(str(plain), quick=True).whole


# -- files that are missing, too many, or of another size --------------------------------------------------------------


def appended(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes((step / name).read_bytes() + bytes(16))


def cut(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes((step / name).read_bytes()[:-1])


def flipped(name: str) -> Callable[[Path], None]:
    def make(step: Path) -> None:
        content = bytearray((step / name).read_bytes())
        content[len(content) // 2] ^= 1
        (step / name).write_bytes(content)

    return make


def missing(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).unlink()


def extra(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes(b"")


def part(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the part of rank 1, with correct checksums."""
    return lambda step: reseal_part(step, 1, lambda document: [change(document), None][1])


def summary(**changes: Any) -> Callable[[Path], None]:
    return lambda step: reseal_root(step, lambda root: root["attributes"]["ckpt"].update(changes))


FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "missing pack": (missing(FILE), FILE, "is missing"),
    "longer pack": (appended(FILE), FILE, " bytes instead of "),
    "shorter pack": (cut(FILE), FILE, " bytes instead of "),
    "extra pack": (extra("packs/000/rank_00001_099"), "packs/000/rank_00001_099", "this file does not belong"),
    "pack of another rank": (extra("packs/000/rank_00004_000"), "packs/000/rank_00004_000", "does not belong"),
    "extra file that begins with a dot": (extra(".nfs"), ".nfs", "this file does not belong"),
    "extra part": (extra("parts/000/rank_00004.json"), "parts/000/rank_00004.json", "does not belong"),
    "missing part": (missing(PART), PART, "is missing"),
    "damaged part": (flipped(PART), PART, "is damaged"),
    "part with a file too many": (
        part(lambda p: p["files"].append([99, 3, 3])),
        PART,
        "lists packs/000/rank_00001_099",
    ),
    "part with a file twice": (part(lambda p: p["files"].append(p["files"][0])), PART, f"lists {FILE}"),
    "part with a file too few": (part(lambda p: p["files"].pop(0)), FILE, "no rank wrote this file"),
    "part that is no part": (part(lambda p: p.update(files=[7])), PART, "the part is invalid"),
    "part with another size": (part(lambda p: p["files"].__setitem__(0, [0, 5, 5])), FILE, "recorded 5"),
    "missing references": (missing("references.json"), "references.json", "is missing"),
    "other references": (flipped("references.json"), "references.json", "differs from what the root says"),
    "longer references": (appended("references.json"), "references.json", "differs from what the root says"),
    "missing manifest": (missing(MANIFEST), MANIFEST, "is missing"),
    "other manifest": (flipped(MANIFEST), MANIFEST, "differs from what the root says"),
    "missing nodes": (missing(NODES), NODES, "is missing"),
    "other nodes": (flipped(NODES), NODES, "differs from what the root says"),
    "longer nodes": (appended(NODES), NODES, "differs from what the root says"),
    "missing index": (missing("index.json"), "index.json", "is missing"),
    "damaged index": (flipped("index.json"), "index.json", "is not the one that belongs to this step"),
    "missing state": (missing("state.json"), "state.json", "is missing"),
    "damaged state": (flipped("state.json"), "state.json", "is not the one that belongs to this step"),
    "missing intent": (missing("intent.json"), "intent.json", "is missing"),
    "damaged root": (flipped("zarr.json"), "zarr.json", "is damaged"),
    "root with another number of files": (summary(files=1), "zarr.json", "says that there are 1 files"),
    "root with another number of bytes": (summary(bytes=1), "zarr.json", "says that there are 1 bytes"),
}


@pytest.mark.parametrize("what", FILES)
def test_files_and_documents(plain: Path, what: str) -> None:
    damage, file, message = FILES[what]
    damage(plain)
    report = validate(str(plain), quick=True)
    (problem,) = report.problems
    assert problem.file == file
    assert message in problem.message
    found = validate(str(plain)).problems
    assert problem in found, "full validation finds all that quick validation does"
    assert {other.file for other in found} == {file}


@pytest.mark.parametrize("name", [".nfs0000000000a1b2c300000001", ".fuse_hidden0000001200000003"])
@pytest.mark.parametrize("folder", ["", "packs/000/", "parts/000/"])
def test_files_that_a_reader_still_has_open(plain: Path, folder: str, name: str) -> None:
    """A client of a network file system keeps a removed file under such a name until its readers have closed it."""
    (plain / folder / name).write_bytes(b"old")
    assert validate(str(plain)).whole


def test_a_wrong_checksum_of_a_file_in_a_part(plain: Path) -> None:
    reseal_part(plain, 1, lambda document: document["files"][0].__setitem__(2, document["files"][0][2] ^ 1))
    assert validate(str(plain), quick=True).whole, "it does not read the file"
    message = "holds other data than its writer recorded: a file of another place, step or save"
    assert validate(str(plain)).problems == [Problem(message, FILE, rank=1, fatal=True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(regions=[]), "does not describe a checkpoint"),
        (lambda index: index["regions"].reverse(), "does not describe a checkpoint"),
        (lambda index: array_of(index, *SHARDED).update(offset=1 << 40), "two regions overlap"),
        (lambda index: array_of(index, *SHARDED).update(dtype="float7"), "float7"),
        (lambda index: array_of(index, *SHARDED).pop("shape"), "shape"),
    ],
)
def test_an_index_with_a_correct_checksum(
    plain: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    reseal_index(plain, lambda index: [change(index), None][1])
    report = validate(str(plain), quick=True)
    assert not report.restorable
    assert all(problem.file for problem in report.problems)
    assert any(message in problem.message for problem in report.problems)


# -- the tables of compressed chunks -----------------------------------------------------------------------------------


def entry_of(step: Path, document: dict[str, Any]) -> list[int]:
    """Return the entry of the chunk of `SHARDED` in the part of rank 1."""
    number = next(array.number for array in read_index(str(step)).packs.arrays if array.path == SHARDED)
    entry: list[int] = next(entry for entry in document["chunks"] if entry[0] == number)
    return entry


def test_a_table_without_a_chunk(zstd: Path) -> None:
    reseal_part(zstd, 1, lambda document: document["chunks"].remove(entry_of(zstd, document)))
    problem = validate(str(zstd), quick=True).problems[0]
    assert (problem.tensor, problem.rank, problem.fatal) == ("sharded/rows(33, 17)", 1, True)
    assert problem.chunk is not None
    assert problem.message == "no part says where this chunk is"


def test_a_table_with_a_chunk_of_another_rank(zstd: Path) -> None:
    reseal_part(zstd, 1, lambda document: document["chunks"].append([0, 10**6, 0, 0, 50]))
    problem = Problem("the part lists chunk 1000000 of array 0, which this rank does not have", PART, rank=1)
    assert validate(str(zstd)).problems == [problem]


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        (3, lambda entry: entry[3] + 16, "has "),
        (3, lambda _: 1 << 40, "ends at offset"),
        (3, lambda _: 0, "another chunk in the same place"),
        (4, lambda entry: entry[4] - 1, "has "),
        (4, lambda _: 1 << 40, "ends at offset"),
        (4, lambda _: 0, "has 0 bytes"),
    ],
)
def test_a_table_with_another_place(zstd: Path, member: int, value: Callable[[list[int]], int], message: str) -> None:
    def change(document: dict[str, Any]) -> None:
        entry = entry_of(zstd, document)
        entry[member] = value(entry)

    reseal_part(zstd, 1, change)
    report = validate(str(zstd))
    assert not report.restorable
    problems = [problem for problem in report.problems if problem.tensor == "sharded/rows(33, 17)"]
    (problem,) = problems
    assert (problem.rank, problem.fatal) == (1, True)
    assert str(problem.file).startswith("packs/000/rank_00001_")
    assert message in problem.message


@pytest.mark.parametrize("entry", [[0], ["0", 0, 0, 0, 0], [-1, 0, 0, 0, 0], [0, 0, 0, 0, 0.5], 7])
def test_a_table_that_is_none(zstd: Path, entry: Any) -> None:
    reseal_part(zstd, 1, lambda document: document["chunks"].append(entry))
    problem = validate(str(zstd)).problems[0]
    assert (problem.file, problem.rank, problem.fatal) == (PART, 1, True)
    assert problem.message.startswith("the part is invalid")


# -- the database ------------------------------------------------------------------------------------------------------


def put_database(step: Path, manifest: bytes, nodes: bytes) -> None:
    """Replace the database by another one, of which the root says that it is the one of this step."""
    for name, data in ((MANIFEST, manifest), (NODES, nodes)):
        (step / name).write_bytes(data)
        reseal_root(step, lambda root, name=name, data=data: root["attributes"]["ckpt"].update({name: digest(data)}))  # type: ignore[misc]


def entries_of(step: Path) -> Any:
    index = read_index(str(step))
    return Hierarchy.of(index.packs).entries(compressed_places(index))


@pytest.mark.parametrize("name", ["plain", "zstd"])
@pytest.mark.parametrize("column", ["offset", "nbytes", "file"])
def test_a_database_with_another_place(
    request: pytest.FixtureRequest, name: str, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one chunk, in small nodes and in compressed ones; the root says that it is right."""
    step: Path = request.getfixturevalue(name)
    for compressed_bytes in (1 << 20, 1):
        monkeypatch.setattr("ckpt.storage.ocdbt._COMPRESSED_BYTES", compressed_bytes)
        entries = entries_of(step)
        put_database(step, *database(entries))
        assert validate(str(step)).whole
        changed = getattr(entries, column).copy()
        changed[next(n for n in range(len(changed)) if entries.file[n] >= 0)] += 1
        put_database(step, *database(replace(entries, **{column: changed})))
        assert validate(str(step), quick=True).whole, "it does not compare them"
        (problem,) = validate(str(step)).problems
        assert (problem.file, problem.fatal) == (NODES, False)
        assert problem.message.startswith("differs from the index")


def test_nodes_that_another_zstd_has_compressed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numcodecs = pytest.importorskip("numcodecs.zstd", reason="needs numcodecs")
    monkeypatch.setattr("ckpt.storage.ocdbt._COMPRESSED_BYTES", 1)
    entries = entries_of(plain)
    other = database(entries, compress=lambda body: bytes(numcodecs.compress(body, 19)))
    assert other != database(entries)
    put_database(plain, *other)
    assert validate(str(plain)).whole


def test_a_manifest_of_another_step(plain: Path, saved: Path) -> None:
    """Its checksum of itself is right."""
    other = saved / "zstd" / "step_00000001"
    put_database(plain, (other / MANIFEST).read_bytes(), (plain / NODES).read_bytes())
    assert validate(str(plain)).problems == [Problem("differs from the index", MANIFEST, rank=0)]


@pytest.mark.parametrize("name", [MANIFEST, NODES])
@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_a_database_of_any_bytes(saved: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: Any) -> None:
    """It is reported, and a restore does not care."""
    step = Path(shutil.copytree(saved / "plain" / "step_00000001", tmp_path_factory.mktemp("step") / "step_00000001"))
    content = (step / name).read_bytes()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content) - 1))
        changed = content[:at] + data.draw(st.binary(max_size=20)) + content[at + data.draw(st.integers(1, 20)) :]
    else:
        changed = data.draw(st.binary(max_size=200))
    assume(changed != content)
    (step / name).write_bytes(changed)
    if data.draw(st.booleans()):
        reseal_root(step, lambda root: root["attributes"]["ckpt"].update({name: digest(changed)}))
    report = validate(str(step))
    assert {problem.file for problem in report.problems} <= {MANIFEST, NODES}
    assert report.problems
    assert report.restorable
    with ckpt.open(step) as checkpoint:
        assert torch.equal(torch.from_numpy(checkpoint["plain/(2,)"][:]), layouts.full_tensor("plain(2,)", (2,)))


@pytest.mark.parametrize("there", [{MANIFEST}, {NODES}, {MANIFEST, NODES}])
def test_a_database_of_which_the_root_says_nothing(plain: Path, there: set[str]) -> None:
    """`inspect_ckpt index` writes both files. What is there must be right."""

    def forget(root: dict[str, Any]) -> None:
        for name in (MANIFEST, NODES):
            del root["attributes"]["ckpt"][name]

    reseal_root(plain, forget)
    for name in {MANIFEST, NODES} - there:
        (plain / name).unlink()
    missing = [Problem("is missing", name, rank=0) for name in {MANIFEST, NODES} - there]
    assert validate(str(plain)).problems == missing
    for name in () if missing else there:
        content = (plain / name).read_bytes()
        flipped(name)(plain)
        assert [(problem.file, problem.fatal) for problem in validate(str(plain)).problems] == [(name, False)]
        (plain / name).write_bytes(content)
