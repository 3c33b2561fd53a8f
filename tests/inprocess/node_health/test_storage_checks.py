"""Checks of storage, on file systems of this machine: a small one in memory, and one that hangs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inprocess.node_health.check_chain import CheckChain
from inprocess.node_health.interface import FAILED, NOT_APPLICABLE, OK, CheckResult
from inprocess.node_health.storage_checks import SharedMountsCheck, StoragePathCheck


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    found = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(f"no file system can be mounted: {found.stderr}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    check = StoragePathCheck(str(small_disk))
    (small_disk / "other").write_bytes(b"data")
    assert check.run().outcome == OK
    (small_disk / "large").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - (64 << 10)))
    result = check.run()
    assert result.outcome == FAILED
    assert result.why.startswith(f"writing {small_disk}/.node_health.")
    assert result.why.endswith("No space left on device")
    assert sorted(os.listdir(small_disk)) == ["large", "other"], "the file of the check is removed, no other"
    assert (small_disk / "other").read_bytes() == b"data"


def test_too_little_space(small_disk: Path) -> None:
    assert StoragePathCheck(str(small_disk), min_free_bytes=3 << 20).run().outcome == OK
    result = StoragePathCheck(str(small_disk), min_free_bytes=1 << 30).run()
    assert result.outcome == FAILED
    assert result.why == "0.00 GB are free, of at least 1.07 GB"
    assert os.listdir(small_disk) == []


def test_a_path_that_cannot_be_used(small_disk: Path, tmp_path: Path) -> None:
    assert StoragePathCheck(str(tmp_path / "none")).run().why == f"{tmp_path}/none does not exist"
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert StoragePathCheck(str(small_disk)).run().why.endswith("Read-only file system")
    file = tmp_path / "file"
    file.write_text("text")
    assert StoragePathCheck(str(file)).run().outcome == OK
    assert file.read_text() == "text"


def test_a_path_that_hangs_fails_at_its_limit_and_keeps_no_other_check(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it waits for a writer, as a file system that does not answer
    chain = CheckChain([StoragePathCheck(f"{tmp_path}/pipe", limit_s=0.2), StoragePathCheck(str(tmp_path))], 60)
    for _ in range(2):
        hanging, well = chain.run()
        assert hanging.why == f"it has not ended within 0.2 s (reading {tmp_path}/pipe)"
        assert well.outcome == OK
    os.close(os.open(tmp_path / "pipe", os.O_WRONLY))  # the file system comes back
    assert all(call.wait(30) for call in chain._running.values())
    os.remove(tmp_path / "pipe")
    (tmp_path / "pipe").touch()
    assert [result.outcome for result in chain.run()] == [OK, OK]


def test_mounts_of_shared_file_systems(tmp_path: Path) -> None:
    mounts, lustre = tmp_path / "mounts", tmp_path / "health_check"

    def run() -> CheckResult:
        return SharedMountsCheck(mounts=mounts, lustre=lustre).run()

    mounts.write_text("tmpfs /tmp tmpfs rw 0 0\n")
    assert run().outcome == NOT_APPLICABLE
    place = tmp_path / "a b\u00e4"
    name = str(place).replace(" ", "\\040")
    mounts.write_text(f"tmpfs /tmp tmpfs rw 0 0\nserver:/x {name} nfs4 rw 0 0\n")
    assert run().why == f"{place}: No such file or directory"
    place.mkdir()
    lustre.write_text("healthy\n")
    assert run().outcome == OK
    lustre.write_text("NOT HEALTHY\n")
    assert run().why == "Lustre is NOT HEALTHY"
