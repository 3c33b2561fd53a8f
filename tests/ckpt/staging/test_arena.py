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
    arena = Arena(2, pin=False)
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
    arena = Arena(2, pin=False)
    arena.resize(1 << 20)
    assert begun.wait(20)
    arena.close()
    arena.close()


def test_without_memory_the_save_fails_and_the_next_may_work(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    def refuse(region: SharedMemory, stopped: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    arena = Arena(2, pin=False)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "prefault", refuse)
        arena.resize(1 << 20)
        with pytest.raises(OSError, match="no memory"):
            arena.acquire(1, no_wait)
    assert arena.slot_bytes == 0
    arena.resize(1 << 20)
    assert arena.acquire(2, no_wait).tensor.numel() == 1 << 20
    arena.close()


def test_a_kept_slot_is_held_when_it_is_released(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(1 << 16)
    first = arena.acquire(1, no_wait)
    first.is_kept = True
    first.release()
    assert first.state is SlotState.HELD
    second = arena.acquire(2, no_wait)
    assert second is not first
    assert not arena.has_free()
    arena.release_all()  # after a fault
    assert (first.state, second.state) == (SlotState.HELD, SlotState.FREE)
    first.let_go()
    assert first.state is SlotState.FREE
    arena.close()


def test_a_slot_that_is_let_go_while_it_is_written_stays_the_writers(leak_check: LeakCheck) -> None:
    arena = Arena(1, pin=False)
    arena.resize(1 << 16)
    slot = arena.acquire(1, no_wait)
    slot.is_kept, slot.state = True, SlotState.WRITING
    slot.let_go()
    assert slot.state is SlotState.WRITING
    slot.release()
    assert slot.state is SlotState.FREE
    arena.close()


def test_a_slot_that_is_pinned_when_it_is_free_is_not_staged_over(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(1 << 16)
    first = arena.acquire(1, no_wait)
    first.release()
    first.pin()  # as what is replicated, though a newer snapshot is complete
    assert arena.acquire(2, no_wait) is not first
    assert not arena.has_free()
    first.unpin()
    assert arena.acquire(3, no_wait) is first
    first.pin()
    assert first.state is SlotState.STAGING
    arena.close()


def test_held_slots_outlive_a_resize(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(1 << 16)
    held = arena.acquire(1, no_wait)
    held.tensor.fill_(7)
    held.is_kept = True
    held.release()
    arena.resize(1 << 20)
    assert len(arena.slots) == 3
    assert held in arena.slots
    assert held.tensor.min() == 7
    held.let_go()
    for step in (2, 3):
        assert arena.acquire(step, no_wait).tensor.numel() == 1 << 20
    assert held not in arena.slots
    arena.close()
