import copy
import os
import pickle

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
