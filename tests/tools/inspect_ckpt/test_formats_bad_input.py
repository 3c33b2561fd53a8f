"""Files of other formats that are damaged or contain code: one line on stderr, no code is run, nothing is written."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.tools.inspect_ckpt.commands import Commands
from tests.tools.inspect_ckpt.evil import Evil, swapped_global

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that code in a pickle would create."""
    file = tmp_path / "was-run"
    Evil.proves_itself(file)
    return file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(40.0).view(5, 8), "lr": 0.1, "words": ["a", "b"]}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


# -- code in pickles ---------------------------------------------------------------------------------------------------


def test_metadata_that_run_code(run: Commands, directory: Path, mark: Path, tmp_path: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    line = run.refused("convert", directory, tmp_path / "root", "--skip-unsafe")
    assert "posix.system" in line
    assert "nothing of it was run" in line
    assert not mark.exists()
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "version", "extra"])
def test_code_in_a_field_of_metadata(run: Commands, directory: Path, mark: Path, tmp_path: Path, where: str) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    setattr(metadata, where, {"lr": Evil(mark)})
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "posix.system" in run.refused("convert", directory, tmp_path / "root")
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("importlib", "import_module"),
        ("_codecs", "encode"),
        ("ckpt.formats.pickles", "load"),
    ],
)
def test_names_that_are_refused_when_looked_up(
    run: Commands, directory: Path, tmp_path: Path, name: tuple[str, str]
) -> None:
    data = pickle.dumps(dcp.FileSystemReader(directory).read_metadata(), protocol=2)
    (directory / ".metadata").write_bytes(swapped_global(data, ("torch", "Size"), name))
    assert ".".join(name) in run.refused("convert", directory, tmp_path / "root")


def test_a_pickle_cannot_change_what_later_ones_use(run: Commands, directory: Path, tmp_path: Path) -> None:
    good = (directory / ".metadata").read_bytes()
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("torch", "float32"),
    ):
        head = b"\x80\x02c" + f"{module}\n{name}\n".encode()
        for state in (b"}X\x06\x00\x00\x00fieldsK\x01s", b"N}X\x0c\x00\x00\x00__setstate__K\x01s\x86"):
            (directory / ".metadata").write_bytes(head + state + b"b.")
            run.refused("convert", directory, tmp_path / "root", code=1)
    (directory / ".metadata").write_bytes(good)
    run("convert", directory, tmp_path / "root")


class Args:
    """An object that users save beside their tensors."""

    def __init__(self) -> None:
        self.lr = 0.1


def test_a_torch_file_that_runs_code(run: Commands, mark: Path, tmp_path: Path) -> None:
    for old in (False, True):
        torch.save({"a": torch.ones(2), "b": Evil(mark)}, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        line = run.refused("convert", tmp_path / "a.pt", tmp_path / "root", "--skip-unsafe")
        assert "nothing of it was loaded" in line
        assert ("posix.system" in line) != old
        assert not mark.exists()
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil(mark)))
    run.refused("convert", tmp_path / "a.pt", tmp_path / "root")
    assert not mark.exists()
    torch.save({"a": torch.ones(2), "args": Args()}, tmp_path / "a.pt")
    assert "Args" in run.refused("convert", tmp_path / "a.pt", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_an_object_in_dcp_that_runs_code(run: Commands, mark: Path, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "bad": {"x": Evil(mark)}, "lr": 0.1}, checkpoint_id=tmp_path / "dcp")
    mark.unlink(missing_ok=True)
    line = run.refused("convert", tmp_path / "dcp", tmp_path / "root")
    assert "bad.x" in line
    assert "posix.system" in line
    assert "--skip-unsafe" in line
    assert not mark.exists()
    run("convert", tmp_path / "dcp", tmp_path / "root", "--skip-unsafe")
    assert "left out" in run.out
    assert not mark.exists()
    shown = run.json("show", tmp_path / "root")
    assert not [name for name in ("tensors", "values", "summary") if "bad" in json.dumps(shown[name])]


def test_a_chunk_in_dcp_that_runs_code(run: Commands, directory: Path, mark: Path, tmp_path: Path) -> None:
    """The archive of a tensor is read by other code than that of an object."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("archive/data.pkl", pickle.dumps(Evil(mark)))
        stream.writestr("archive/version", b"3\n")
        stream.writestr("archive/data/0", bytes(160))
    metadata = dcp.FileSystemReader(directory).read_metadata()
    for index, place in metadata.storage_data.items():
        if index.fqn == "w":
            place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(archive.getvalue())
    (directory / "__9_0.distcp").write_bytes(archive.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    run.refused("convert", directory, tmp_path / "root")
    assert not mark.exists()


# -- damaged DCP -------------------------------------------------------------------------------------------------------


def changed(directory: Path, change: Any) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    change(metadata, next(value for index, value in metadata.storage_data.items() if index.fqn == "w"))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def leads_out(metadata: Any, place: Any) -> None:
    place.relative_path = "../secret"


def leads_to_the_root(metadata: Any, place: Any) -> None:
    place.relative_path = "/etc/passwd"


def names_nothing(metadata: Any, place: Any) -> None:
    place.relative_path = "__7_0.distcp"


def begins_outside(metadata: Any, place: Any) -> None:
    place.offset = 1 << 40


def is_negative(metadata: Any, place: Any) -> None:
    place.offset = -5


def has_another_shape(metadata: Any, place: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([8, 5])
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([8, 5])


def has_a_gap(metadata: Any, place: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([6, 8])


def reaches_outside(metadata: Any, place: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([4, 8])


def is_huge(metadata: Any, place: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 60, 1 << 60])


def is_nowhere(metadata: Any, place: Any) -> None:
    metadata.storage_data = {}


def is_another_dtype(metadata: Any, place: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def is_in_a_huge_list(metadata: Any, place: Any) -> None:
    metadata.planner_data["w"] = ("list", 1 << 50)


def is_below_a_leaf(metadata: Any, place: Any) -> None:
    metadata.planner_data["w"] = ("lr", "w")


def is_there_twice(metadata: Any, place: Any) -> None:
    metadata.planner_data["w"] = ("lr",)


@pytest.mark.parametrize(
    "change",
    [
        leads_out,
        leads_to_the_root,
        names_nothing,
        begins_outside,
        is_negative,
        has_another_shape,
        has_a_gap,
        reaches_outside,
        is_huge,
        is_nowhere,
        is_another_dtype,
        is_in_a_huge_list,
        is_below_a_leaf,
        is_there_twice,
    ],
)
def test_inconsistent_metadata(run: Commands, directory: Path, tmp_path: Path, change: Any) -> None:
    (tmp_path / "secret").write_bytes((directory / "__0_0.distcp").read_bytes())
    changed(directory, change)
    run.refused("convert", directory, tmp_path / "root", code=1)
    assert not (tmp_path / "root").exists()


def test_an_extension_is_named(run: Commands, directory: Path, tmp_path: Path) -> None:
    changed(directory, lambda metadata, place: setattr(place, "transform_descriptors", ["stream.zstd"]))
    assert "stream.zstd" in run.refused("convert", directory, tmp_path / "root")


def test_links_and_directories_in_dcp(run: Commands, directory: Path, tmp_path: Path) -> None:
    data = directory / "__0_0.distcp"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    assert "--follow-links" in run.refused("convert", directory, tmp_path / "root")
    run("convert", directory, tmp_path / "root", "--follow-links")
    data.unlink()
    data.mkdir()
    assert "not a regular file" in run.refused("convert", directory, tmp_path / "new")
    data.rmdir()
    os.mkfifo(data)
    assert "not a regular file" in run.refused("convert", directory, tmp_path / "new")


def test_dcp_with_random_damage(run: Commands, directory: Path, tmp_path: Path) -> None:
    """Whichever byte is wrong, the command reports it, or succeeds because the byte does not matter."""
    rng = random.Random(1)
    for name in (".metadata", "__0_0.distcp"):
        good = (directory / name).read_bytes()
        for number in range(30):
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            if number % 10 == 0:
                bad = bad[: rng.randrange(len(bad))]
            (directory / name).write_bytes(bad)
            code = run.exit_code("convert", directory, tmp_path / f"root{name}{number}")
            assert code in (0, 1, 2)
        (directory / name).write_bytes(good)


# -- damaged safetensors -----------------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD = {
    "empty": b"",
    "no header": bytes(5),
    "truncated header": safetensors({"a": entry()}, b"", 500),
    "a header of 10 GB": safetensors({"a": entry()}, length=10_000_000_000),
    "a header of all there is": safetensors({"a": entry()}, length=(1 << 64) - 1),
    "truncated data": safetensors({"a": entry()}, bytes(7)),
    "no data": safetensors({"a": entry()}, b""),
    "more data": safetensors({"a": entry()}, bytes(9)),
    "overlapping": safetensors({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same twice": safetensors({"a": entry(), "b": entry()}),
    "a hole": safetensors({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "negative": safetensors({"a": entry(offsets=(-8, 0))}),
    "backwards": safetensors({"a": entry(offsets=(8, 0))}),
    "outside": safetensors({"a": entry(offsets=(1 << 40, (1 << 40) + 8))}),
    "another size": safetensors({"a": entry(shape=(3,))}),
    "a negative shape": safetensors({"a": entry(shape=(-1, -2))}),
    "a huge shape": safetensors({"a": entry(shape=(1 << 62, 1 << 62))}),
    "a shape of text": safetensors({"a": entry(shape="2")}),
    "truth as number": safetensors({"a": entry(shape=(True, 2))}),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "three offsets": safetensors({"a": entry(offsets=(0, 4, 8))}),
    "a list": safetensors([1, 2]),
    "an entry that is none": safetensors({"a": 5}),
    "metadata that are none": safetensors({"__metadata__": 5, "a": entry()}),
    "no JSON": safetensors(b"{nonsense"),
    "no text": safetensors(b"{\xff\xfe"),
    "deep": safetensors(b"{" + b'"a":[' * 100_000),
    "a number of many digits": safetensors(b'{"a":' + b"9" * 10_000 + b"}"),
    "a name twice": safetensors(b'{"a":1,"a":2}'),
    "half a character": safetensors(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_safetensors(run: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(BAD[name])
    assert "a.safetensors is damaged" in run.refused("convert", tmp_path / "a.safetensors", tmp_path / "root", code=1)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("dtype", ["F6_E2M3", "nonsense", 5, None, ["F32"]])
def test_a_dtype_that_is_unknown(run: Commands, tmp_path: Path, dtype: Any) -> None:
    (tmp_path / "a.safetensors").write_bytes(safetensors({"tensor": entry(dtype)}))
    assert "'tensor' is of dtype" in run.refused("convert", tmp_path / "a.safetensors", tmp_path / "root")


@pytest.mark.parametrize(
    ("index", "code"),
    [
        ({"weight_map": {"a": "../a.safetensors"}}, 1),
        ({"weight_map": {"a": "/etc/passwd"}}, 1),
        ({"weight_map": {"a": "nothing.safetensors"}}, 1),
        ({"weight_map": {"b": "a.safetensors"}}, 1),
        ({"weight_map": {"a": 5}}, 1),
        ({"weight_map": []}, 1),
        ({}, 1),
        ([], 1),
        ({"weight_map": {"a": "folder"}}, 2),
    ],
)
def test_an_invalid_index(run: Commands, tmp_path: Path, index: Any, code: int) -> None:
    good = safetensors({"a": entry()})
    (tmp_path / "a.safetensors").write_bytes(good)
    (tmp_path / "hf" / "folder").mkdir(parents=True)
    (tmp_path / "hf" / "a.safetensors").write_bytes(good)
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    run.refused("convert", tmp_path / "hf", tmp_path / "root", code=code)
    assert not (tmp_path / "root").exists()


def test_an_ambiguous_directory(run: Commands, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    for name in ("a", "b"):
        (tmp_path / "hf" / f"{name}.safetensors").write_bytes(safetensors({"a": entry()}))
    assert "give one of the files" in run.refused("convert", tmp_path / "hf", tmp_path / "root")
    for name in ("a", "b"):
        (tmp_path / "hf" / f"{name}.safetensors.index.json").write_text("{}")
    assert "several indexes" in run.refused("convert", tmp_path / "hf", tmp_path / "root")


# -- other things ------------------------------------------------------------------------------------------------------


def test_paths_that_are_not_a_checkpoint(run: Commands, saved: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello world, this is no checkpoint")
    (tmp_path / "empty").mkdir()
    assert "neither" in run.refused("convert", tmp_path / "notes.txt", tmp_path / "root")
    assert "is empty" in run.refused("convert", tmp_path / "empty", tmp_path / "root")
    assert "no such file" in run.refused("convert", tmp_path / "nowhere", tmp_path / "root")
    run.refused("convert", "nu\0ll", tmp_path / "root")
    assert "two\\nlines" in run.refused("convert", tmp_path / "two\nlines", tmp_path / "root")
    run.refused("convert", "/dev/null", tmp_path / "root")
    os.mkfifo(tmp_path / "fifo")
    run.refused("convert", tmp_path / "fifo", tmp_path / "root")
    (tmp_path / "pending/.pending/step_00000001-o0-0123456789abcdef").mkdir(parents=True)
    run.refused("export", tmp_path / "pending", tmp_path / "dcp", "--to", "dcp", code=3)
    run.refused("export", *(tmp_path / "pending").glob(".pending/*"), tmp_path / "dcp", "--to", "dcp", code=3)
    assert not (tmp_path / "root").exists()
    assert not (tmp_path / "dcp").exists()


def test_torch_files_with_random_damage(run: Commands, tmp_path: Path) -> None:
    rng = random.Random(2)
    file = tmp_path / "a.pt"
    torch.save({"w": torch.arange(40.0).view(5, 8), "lr": 0.1}, file)
    good = file.read_bytes()
    for number in range(40):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        if number % 5 == 0:
            bad = bad[: rng.randrange(len(bad))]
        file.write_bytes(bad)
        assert run.exit_code("convert", file, tmp_path / f"root{number}") in (0, 1, 2)


def _zipped(source: Path, target: Path, compression: int, **records: bytes) -> None:
    """Copy the archive `source` with some of its records replaced."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, records.get(name.rpartition("/")[2], old.read(name)))


def test_a_torch_file_that_is_compressed(run: Commands, tmp_path: Path) -> None:
    """Mapped, it would give the compressed bytes; loaded, it could expand to any size."""
    torch.save({"w": torch.arange(40.0)}, tmp_path / "a.pt")
    _zipped(tmp_path / "a.pt", tmp_path / "b.pt", zipfile.ZIP_DEFLATED)
    assert "is compressed" in run.refused("convert", tmp_path / "b.pt", tmp_path / "root", code=1)
    _zipped(tmp_path / "a.pt", tmp_path / "b.pt", zipfile.ZIP_STORED)
    run("convert", tmp_path / "b.pt", tmp_path / "root")


def test_an_object_in_dcp_that_is_a_zip_bomb(run: Commands, directory: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    torch.save(["a", "b"], tmp_path / "words.pt")
    _zipped(tmp_path / "words.pt", directory / "__9_0.distcp", zipfile.ZIP_DEFLATED, version=bytes(1 << 28))
    for index, place in metadata.storage_data.items():
        if index.fqn == "words":
            place.relative_path, place.offset = "__9_0.distcp", 0
            place.length = (directory / "__9_0.distcp").stat().st_size
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "is compressed" in run.refused("convert", directory, tmp_path / "root", code=1)


def test_lists_that_hold_each_other(run: Commands, directory: Path, tmp_path: Path) -> None:
    """A pickle of some hundred bytes whose `repr` has 2**60."""
    twice: list[Any] = []
    for _ in range(60):
        twice = [twice, twice]

    def change(metadata: Any, place: Any) -> None:
        place.relative_path = twice

    changed(directory, change)
    assert "is not a name" in run.refused("convert", directory, tmp_path / "root", code=1)


STRANGE = (None, True, -1, 0, 3, 1 << 62, 10**30, 0.5, "", "F32", "../x", [], {}, [0], [-1, 8], [0, 1 << 62], {"a": 1})


def test_safetensors_with_random_headers(run: Commands, tmp_path: Path) -> None:
    rng = random.Random(3)
    deep: Any = []
    for _ in range(850):
        deep = [deep]
    for number in range(150):
        header: dict[str, Any] = {"a": entry(), "b": entry("I64", (3,), (8, 32)), "__metadata__": {"format": "pt"}}
        for _ in range(rng.choice((1, 1, 2))):
            target = rng.choice((header, header["a"] if isinstance(header.get("a"), dict) else header))
            target[rng.choice(list(target))] = rng.choice((*STRANGE, deep))
        (tmp_path / "a.safetensors").write_bytes(safetensors(header, bytes(32)))
        code = run.exit_code("convert", tmp_path / "a.safetensors", tmp_path / f"root{number}")
        assert code in (0, 1, 2), header


def test_a_full_disk(run: Commands, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("ckpt.formats.dcp_writer._write_object", full)
        assert "No space" in run.refused("export", saved["one"], tmp_path / "dcp", "--to", "dcp")
    assert not (tmp_path / "dcp").exists()
    (tmp_path / "a.safetensors").write_bytes(safetensors({"a": entry()}))
    with monkeypatch.context() as patched:
        patched.setattr("ckpt.storage.pack_writers.write_pages", full)
        assert "No space" in run.refused("convert", tmp_path / "a.safetensors", tmp_path / "root")
    assert not list((tmp_path / "root").glob("step_*"))
