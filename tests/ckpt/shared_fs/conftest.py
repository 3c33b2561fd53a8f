"""One directory through two FUSE mounts with separate locks, as two hosts see a network file system."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ckpt.shared_fs.mounts import Mounts
from tests.support.selection import FULL

_MOUNT_DEADLINE_S = 20.0


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Mount a directory twice; skip the test without bindfs, unless TESTS is "full"."""
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
        yield Mounts(folder, mount("one"), mount("two", "--write-rate=20M"), mount("read_only", "-r"))
    finally:
        for where in made:
            subprocess.run(["umount", "--lazy", where], check=True)
