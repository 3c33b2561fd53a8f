"""A disk that is full soon, for the tests of saves."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path], capture_output=True)
    if made.returncode:
        pytest.skip("not allowed to mount a file system")
    yield path
    subprocess.run(["umount", "-l", path], check=True)
