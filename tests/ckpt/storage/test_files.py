import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import StorageError
from ckpt.storage import directories, files
from ckpt.storage.directories import Rename, lock_shared, try_lock_exclusive
from tests.ckpt.storage.conftest import Mount
from tests.support import LeakCheck
from tests.support.seeds import random_bytes


def image(size: int) -> memoryview:
    pages = max(1, -(-size // 4096))
    view = memoryview(mmap.mmap(-1, pages * 4096))
    view[:] = random_bytes(len(view))
    return view


def test_write_durable_replaces(tmp_path: Path, leak_check: LeakCheck) -> None:
    path = tmp_path / "a.json"
    for data in (b"first", b"", b"second"):
        files.write_durable(str(path), data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.json"]


def test_create_exclusive_has_one_winner(tmp_path: Path) -> None:
    path = tmp_path / "intent.json"
    contents = [f"{i}".encode() * 1000 for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda data: files.create_exclusive(str(path), data), contents))
    assert won.count(True) == 1
    assert path.read_bytes() == contents[won.index(True)]
    assert os.listdir(tmp_path) == ["intent.json"]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_000_003])
@pytest.mark.parametrize("direct", [True, False])
def test_write_pages(tmp_path: Path, size: int, direct: bool, leak_check: LeakCheck) -> None:
    path, view = tmp_path / "c", image(size)
    used = files.write_pages(str(path), view, size, direct=direct)
    files.sync_files([str(path)], [str(tmp_path)])
    assert path.read_bytes() == view[:size]
    assert not (used and not direct)
    with pytest.raises(StorageError, match="already"):
        files.write_pages(str(path), view, size, direct=direct)


def test_file_systems_that_refuse_o_direct_when_opening(mount: Mount) -> None:
    path = mount("ramfs") / "c"
    view = image(10_000)
    assert files.write_pages(str(path), view, 10_000) is False
    assert path.read_bytes() == view[:10_000]


def test_file_systems_that_refuse_o_direct_when_writing(tmp_path: Path) -> None:
    misaligned = memoryview(mmap.mmap(-1, 3 * 4096))[1 : 1 + 2 * 4096]
    misaligned[:] = random_bytes(len(misaligned))
    files.write_pages(str(tmp_path / "c"), misaligned, 5000)
    assert (tmp_path / "c").read_bytes() == misaligned[:5000]


@pytest.mark.parametrize("direct", [True, False])
def test_disk_full(mount: Mount, direct: bool, leak_check: LeakCheck) -> None:
    root = mount("tmpfs", "size=1m")
    with pytest.raises(StorageError, match=rf"{root}/c: .*free space"):
        files.write_pages(str(root / "c"), image(2 << 20), 2 << 20, direct=direct)
    with pytest.raises(StorageError, match="free space"):
        files.write_durable(str(root / "a.json"), bytes(2 << 20))
    assert not (root / "a.json").exists()
    assert not [name for name in os.listdir(root) if name.endswith(".tmp")]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("direct", [True, False])
def test_a_write_that_is_cut_short(tmp_path: Path, direct: bool) -> None:
    with file_size_limit(10_000), pytest.raises(StorageError, match=r"ulimit -f|free space"):
        files.write_pages(str(tmp_path / "c"), image(20_000), 20_000, direct=direct)


def test_read_only_file_system(mount: Mount) -> None:
    root = mount("tmpfs", "ro")
    with pytest.raises(StorageError, match="read-only"):
        files.write_new(str(root / "a"), b"")


def test_errors_say_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/x: .*is a file"):
        files.write_new(str(tmp_path / "file/x"), b"")
    with pytest.raises(StorageError, match=r"gone/x: .*abandoned"):
        files.write_durable(str(tmp_path / "gone/x"), b"")
    with pytest.raises(StorageError, match=r"file: .*already"):
        files.write_new(str(tmp_path / "file"), b"")
    with pytest.raises(StorageError, match="sync"):
        files.sync_files([str(tmp_path / "gone")], [])


def test_directories_are_made_below_a_root_that_exists(tmp_path: Path) -> None:
    root = str(tmp_path)
    made = directories.make_directories(root, "a/b")
    assert made == [root, f"{root}/a", f"{root}/a/b"] == directories.make_directories(root, "a/b")
    assert directories.make_directories(root, "") == [root]
    with pytest.raises(StorageError, match="abandoned"):
        directories.make_directories(f"{root}/gone", "a")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("relative", ["", "..", "a/../b", "/a", "a//b", ".", "a/", "a\0b"])
def test_paths_stay_below_the_root(relative: str) -> None:
    with pytest.raises(StorageError, match="not a path below /root"):
        files.under("/root", relative)


def test_rename_happens_once(tmp_path: Path) -> None:
    (tmp_path / "pending").mkdir()
    (tmp_path / "pending/x").touch()
    targets = [str(tmp_path / f"target{i}") for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda target: directories.rename_directory(str(tmp_path / "pending"), target), targets)
        )
    assert sorted(result.name for result in results) == ["DONE"] + ["SOURCE_GONE"] * 15
    assert os.listdir(targets[results.index(Rename.DONE)]) == ["x"]


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_rename_never_overwrites(tmp_path: Path, has_renameat2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_renameat2:  # an old libc
        monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: object())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert directories.rename_directory(a, b) is Rename.TARGET_EXISTS
    assert os.listdir(b) == ["b"]
    assert directories.rename_directory(a, c) is Rename.DONE
    assert directories.rename_directory(a, c) in (Rename.SOURCE_GONE, Rename.TARGET_EXISTS)
    with pytest.raises(StorageError):
        directories.rename_directory(b, str(tmp_path / "gone/b"))


def test_remove_tree(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/link").symlink_to(tmp_path / "kept")
    for _ in range(2):
        directories.remove_tree(str(tmp_path / "a"))
        assert os.listdir(tmp_path) == ["kept"]


def test_readers_keep_a_step_from_being_removed(tmp_path: Path, leak_check: LeakCheck) -> None:
    path = str(tmp_path)
    with lock_shared(path), lock_shared(path):  # type: ignore[union-attr]
        assert try_lock_exclusive(path) is None
    removal = try_lock_exclusive(path)
    assert removal is not None
    assert lock_shared(path) is None
    removal.close()
    removal.close()


@pytest.mark.parametrize("write", [files.write_durable, files.create_exclusive])
def test_a_file_is_written_again_but_its_directory_is_not_synced_again(
    write: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def tries_again(error: StorageError) -> bool:
        asked.append(str(error))
        monkeypatch.undo()
        return True

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "a server was away")

    monkeypatch.setattr(files.os, "fsync", fail)  # of the file: another one is written in full
    assert write(str(tmp_path / "a"), b"mine", tries_again) in (None, True)
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert len(asked) == 1
    monkeypatch.setattr(files, "fsync", fail)  # of the directory: the kernel may have dropped what is in it
    with pytest.raises(StorageError, match="a server was away"):
        write(str(tmp_path / "b"), b"mine", tries_again)
    assert len(asked) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("found", [b"mine", b"theirs"])
def test_a_file_that_a_server_has_created_and_reported_as_an_error_is_created(
    found: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    assert files.create_exclusive(str(path.with_name("c")), b"mine")
    assert not files.create_exclusive(str(path.with_name("c")), b"mine")

    def link(source: str, target: str) -> None:
        path.write_bytes(found)
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(files, "_link", link)

    def tries_again(error: StorageError) -> bool:
        monkeypatch.undo()
        return True

    assert files.create_exclusive(str(path), b"mine", tries_again) is (found == b"mine")
    assert path.read_bytes() == found
