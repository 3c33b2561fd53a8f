"""One directory through two FUSE mounts with separate locks, as two hosts see a network file system."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckpt
from tests.ckpt.shared_fs.mounts import Mounts
from tests.support.selection import FULL

_MOUNT_DEADLINE_S = 20.0
CACHED_S = 300


Mount = Callable[..., Path]
_CACHED = ("-o", f"attr_timeout={CACHED_S},entry_timeout={CACHED_S},negative_timeout={CACHED_S}")


@pytest.fixture(scope="session")
def queue() -> Iterator[ckpt.AsyncCallsQueue]:
    """The writer of jobs that need none of their own."""
    with ckpt.AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts one directory; skip the test without bindfs, unless TESTS is "full"."""
    if shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"):
        if FULL:
            pytest.fail("bindfs or /dev/fuse is missing: apt-get install bindfs")
        pytest.skip("bindfs or /dev/fuse is missing: apt-get install bindfs")
    folder = tmp_path / "folder"
    folder.mkdir()
    made: list[Path] = []

    def mount(name: str, *options: str) -> Path:
        where = tmp_path / name
        where.mkdir()
        subprocess.run(["bindfs", "--multithreaded", *options, folder, where], check=True)
        made.append(where)
        deadline = time.monotonic() + _MOUNT_DEADLINE_S
        while not where.is_mount():
            assert time.monotonic() < deadline, f"{where} was not mounted"
            time.sleep(0.01)
        return where

    try:
        yield mount
    finally:
        for where in made:
            subprocess.run(["umount", "--lazy", where], check=True)


@pytest.fixture
def mounts(mounted: Mount, tmp_path: Path) -> Mounts:
    """Mount a directory three times."""
    return Mounts(tmp_path / "folder", mounted("one"), mounted("two", "--write-rate=20M"), mounted("read_only", "-r"))


@pytest.fixture
def cached_mounts(mounted: Mount, tmp_path: Path) -> Mounts:
    """Mount a directory so that each mount answers from a cache, long after the other one has changed something."""
    return Mounts(tmp_path / "folder", mounted("one", *_CACHED), mounted("two", *_CACHED), mounted("read_only", "-r"))
