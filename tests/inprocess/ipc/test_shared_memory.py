import copy
import errno
import mmap
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from inprocess.ipc.shared_memory import SharedMemory
from tests.support import LeakCheck


def test_fresh_memory_is_zero_and_writable() -> None:
    with SharedMemory.create("region", 10_000) as region:
        assert region.buffer.nbytes == region.size == 10_000
        assert bytes(region.buffer) == bytes(10_000)
        region.buffer[-1] = 7
        assert os.pread(region.fd, 1, 9_999) == b"\x07"


def test_descriptor_does_not_survive_exec() -> None:
    with SharedMemory.create("region", 1) as region:
        assert not os.get_inheritable(region.fd)


@pytest.mark.parametrize("populate", [True, False])
def test_prefault_keeps_contents_and_takes_memory(populate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not populate:
        monkeypatch.setattr(
            "inprocess.ipc.shared_memory._MADV_POPULATE_WRITE", 9999
        )  # what an older kernel answers: EINVAL
    with SharedMemory.create("region", (1 << 20) + 5) as region:
        region.buffer[4096] = 42
        region.prefault()
        assert region.buffer[4096] == 42
        assert os.fstat(region.fd).st_blocks * 512 >= region.size


def test_large_memory_begins_where_huge_pages_do() -> None:
    """Else the kernel makes none, whatever its settings."""
    with SharedMemory.create("region", (5 << 20) + 4096) as region:
        assert np.frombuffer(region.buffer, dtype=np.uint8).ctypes.data % (2 << 20) == 0
        region.buffer[-1] = 7
        region.prefault()
        assert os.pread(region.fd, 1, region.size - 1) == b"\x07"
        with SharedMemory(os.dup(region.fd), region.size, "attached", "0") as attached:
            assert attached.buffer[-1] == 7


@pytest.mark.parametrize("collapse", [True, False])
def test_pages_are_huge_where_the_kernel_makes_them(collapse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not collapse:  # what an older kernel answers: EINVAL
        monkeypatch.setattr("inprocess.ipc.shared_memory._MADV_COLLAPSE", 9999)
    elif not _can_collapse():
        pytest.skip("this kernel makes no huge pages of 2 MiB")
    with SharedMemory.create("region", 8 << 20) as region:
        region.prefault()
        assert os.fstat(region.fd).st_blocks * 512 >= region.size
        region.buffer[:] = bytes(region.size)
        assert bool(_huge_bytes("region")) is collapse


def _can_collapse() -> bool:
    settings, release = Path("/sys/kernel/mm/transparent_hugepage"), os.uname().release.split(".")
    if (int(release[0]), int(release[1])) < (6, 1) or not (settings / "hpage_pmd_size").exists():
        return False
    is_allowed = "[deny]" not in (settings / "shmem_enabled").read_text()
    return is_allowed and int((settings / "hpage_pmd_size").read_text()) == 2 << 20


def _huge_bytes(name: str) -> int:
    """Return how much of the region with this name is mapped as huge pages."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"/memfd:{name} ")
    return int(after.partition("ShmemPmdMapped:")[2].split()[0])


def test_where_address_space_is_short_memory_is_mapped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mmap.mmap

    def refuse(fd: int, size: int, **options: int) -> mmap.mmap:
        if fd < 0:
            raise OSError(errno.ENOMEM, "no address space")
        return original(fd, size, **options)

    monkeypatch.setattr("mmap.mmap", refuse)
    with SharedMemory.create("region", 4 << 20) as region:
        region.prefault()
        region.buffer[-1] = 7
        assert os.pread(region.fd, 1, region.size - 1) == b"\x07"


def test_cleared_memory_is_zero_for_all_and_can_be_used_again() -> None:
    with (
        SharedMemory.create("region", 4 << 20) as region,
        SharedMemory(os.dup(region.fd), region.size, "attached", "0") as attached,
    ):
        region.buffer[:] = b"\1" * region.size
        region.write_behind(0, b"documents")
        assert attached.buffer[5] == 1
        region.clear()
        assert os.fstat(region.fd).st_blocks == 0
        assert not np.frombuffer(attached.buffer, dtype=np.uint8).any()
        assert region.read_behind(0, 9) == bytes(9)
        region.buffer[5] = 3
        assert attached.buffer[5] == 3


def test_close_is_idempotent_and_final(leak_check: LeakCheck) -> None:
    region = SharedMemory.create("region", 4096)
    assert region.buffer[0] == 0
    region.close()
    region.close()
    assert region.closed
    with pytest.raises(ValueError, match="closed"):
        _ = region.buffer


def test_views_outlive_close_but_not_their_last_user(leak_check: LeakCheck) -> None:
    region = SharedMemory.create("region", 4096)
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    region.close()
    array[0] = 9
    assert array[0] == 9
    del array


def test_forgotten_region_is_released(leak_check: LeakCheck) -> None:
    region = SharedMemory.create("region", 4096)
    region.prefault()
    del region


def test_cannot_be_pickled_or_copied() -> None:
    with SharedMemory.create("region", 1) as region:
        with pytest.raises(TypeError, match="background call"):
            pickle.dumps(region)
        with pytest.raises(TypeError, match="background call"):
            copy.copy(region)


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        SharedMemory.create("region", size)
