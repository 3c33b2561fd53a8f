"""Slots are made ready in the background, and given back whole."""

import errno
import threading

import pytest

from ckpt.staging.arena import Arena, SlotState
from inprocess.ipc.shared_memory import SharedMemory
from tests.support import LeakCheck


def no_wait() -> None:
    pytest.fail("a new arena has free slots")


def test_acquire_waits_until_the_slot_is_ready(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    begun, go, original = threading.Event(), threading.Event(), SharedMemory.prefault

    def slow(region: SharedMemory, stopped: object) -> None:
        begun.set()
        assert go.wait(20)
        original(region)

    monkeypatch.setattr(SharedMemory, "prefault", slow)
    arena = Arena(2, None, pin=False)
    arena.resize(1 << 20)  # does not wait
    assert begun.wait(20)
    threading.Timer(0.05, go.set).start()
    slot = arena.acquire(1, no_wait)
    assert go.is_set()
    assert slot.state is SlotState.STAGING
    arena.close()


def test_close_ends_the_thread(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    begun = threading.Event()

    def endless(region: SharedMemory, stopped: object) -> None:
        begun.set()
        assert callable(stopped)
        while not stopped():
            pass

    monkeypatch.setattr(SharedMemory, "prefault", endless)
    arena = Arena(2, None, pin=False)
    arena.resize(1 << 20)
    assert begun.wait(20)
    arena.close()
    arena.close()


def test_without_memory_the_save_fails_and_the_next_may_work(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    def refuse(region: SharedMemory, stopped: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    arena = Arena(2, None, pin=False)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "prefault", refuse)
        arena.resize(1 << 20)
        with pytest.raises(OSError, match="no memory"):
            arena.acquire(1, no_wait)
    assert arena.slot_bytes == 0
    arena.resize(1 << 20)
    assert arena.acquire(2, no_wait).tensor.numel() == 1 << 20
    arena.close()
