"""Small files beside the steps of a root, in a directory and in a store."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt

_PLACES: dict[str, Callable[[Path], str]] = {
    "directory": lambda folder: str(folder / "made" / "root"),
    "file": lambda folder: f"file://{folder}/root",
    "store": lambda folder: f"directory://{folder}/root",
}


@pytest.mark.parametrize("place", _PLACES)
def test_files_are_written_read_listed_and_removed(tmp_path: Path, place: str) -> None:
    files = ckpt.SmallFiles(_PLACES[place](tmp_path))
    assert (files.names(), files.read("a.json"), files.exists("a.json")) == ([], None, False)
    files.remove("a.json")
    files.write("b.json", b"b")
    files.write("a.json", b"1")
    files.write("a.json", b"22")
    assert ckpt.SmallFiles(_PLACES[place](tmp_path)).names() == ["a.json", "b.json"]
    assert (files.read("a.json"), files.exists("a.json")) == (b"22", True)
    files.remove("a.json")
    assert (files.names(), files.exists("a.json")) == (["b.json"], False)
    with pytest.raises(ValueError, match="at most"):
        files.write("c.json", bytes((1 << 20) + 1))


def test_what_is_no_small_file(tmp_path: Path) -> None:
    files = ckpt.SmallFiles(tmp_path)
    (tmp_path / "large").write_bytes(bytes((1 << 20) + 1))
    (tmp_path / "folder").mkdir()
    os.symlink(tmp_path / "nothing", tmp_path / "link")
    with pytest.raises(ValueError, match="more than"):
        files.read("large")
    with pytest.raises(ckpt.StorageError, match="folder"):
        files.read("folder")
    assert files.exists("link")
    files.remove("link")
    assert files.names() == ["folder", "large"]
    with pytest.raises(ckpt.StorageError, match="http://"):
        ckpt.SmallFiles("http://server/root")


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a//b", "", "."])
def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path, place: str, name: str) -> None:
    files = ckpt.SmallFiles(_PLACES[place](tmp_path))
    uses = (files.read, files.exists, files.remove, lambda each: files.write(each, b""))
    for use in uses:
        with pytest.raises(ValueError, match="no name of a small file"):
            use(name)
