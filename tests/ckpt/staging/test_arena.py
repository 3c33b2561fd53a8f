"""One slot has memory at rest, others when they are needed; it is made ready beside training, and given back whole."""

import errno
import logging
import os
import threading
import time

import pytest

from ckpt.staging import arena as arena_module
from ckpt.staging.arena import Arena, Slot, SlotState
from ckpt.staging.preparation import Preparation
from inprocess.ipc.shared_memory import SharedMemory
from tests.support import LeakCheck

SIZE = 1 << 20


def no_wait() -> None:
    pytest.fail("a slot is free, and no other one is in use")


def nothing_freed() -> None:
    """Be called while other slots are in use, and free none."""


def memory_of(region: SharedMemory) -> int:
    return os.fstat(region.fd).st_blocks * 512


def with_memory(arena: Arena) -> list[int]:
    """Return the numbers of the slots that have memory, when no thread changes that any more."""
    for thread in threading.enumerate():
        if thread.name in ("ckpt-arena", "ckpt-arena-clear"):
            thread.join(20)
    return [slot.number for slot in arena.slots if memory_of(slot.region)]


def save(arena: Arena, step: int) -> Slot:
    """Stage a save, have it written, and published."""
    slot = arena.acquire(step, nothing_freed)
    slot.tensor.fill_(step % 256)
    slot.release()
    arena.keep(slot.region)
    return slot


class Gate:
    """Holds the threads of low priority before the first block of the regions with these names, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.blocks = 0
        original = SharedMemory.populate

        def populate(region: SharedMemory, start: int, size: int) -> None:
            if region.name in names and threading.current_thread() is not threading.main_thread():
                self.begun.set()
                assert self.open.wait(20)
            self.blocks += 1
            original(region, start, size)

        monkeypatch.setattr(SharedMemory, "populate", populate)


def test_acquire_waits_until_the_slot_is_ready(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    gate = Gate(monkeypatch, "ckpt-slot-0")
    arena = Arena(2, pin=False)
    arena.resize(SIZE)  # does not wait
    assert gate.begun.wait(20)
    threading.Timer(0.05, gate.open.set).start()
    slot = arena.acquire(1, no_wait)
    assert gate.open.is_set()
    assert slot.state is SlotState.STAGING
    arena.close()


def test_close_ends_the_threads(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    gate = Gate(monkeypatch, "ckpt-slot-0")
    arena = Arena(2, pin=False)
    arena.resize(1 << 30)
    assert gate.begun.wait(20)
    threading.Timer(0.05, gate.open.set).start()
    arena.close()
    assert gate.blocks == 1  # of 64
    arena.close()


def test_a_save_that_waits_for_memory_works_on_it(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    workers: set[int] = set()
    met = threading.Barrier(2)

    def populate(region: SharedMemory, start: int, size: int) -> None:
        if threading.get_ident() not in workers:
            workers.add(threading.get_ident())
            met.wait(20)  # for the other thread

    monkeypatch.setattr(SharedMemory, "populate", populate)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    arena = Arena(1, pin=False)
    arena.resize(1 << 30)
    arena.acquire(1, no_wait)
    assert len(workers) == 2
    assert threading.get_ident() in workers
    arena.close()


def test_without_memory_the_save_fails_and_the_next_may_work(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    arena = Arena(2, pin=False)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "populate", refuse)
        arena.resize(SIZE)
        with pytest.raises(OSError, match="no memory"):
            arena.acquire(1, no_wait)
    assert arena.slot_bytes == 0
    arena.resize(SIZE)
    assert arena.acquire(2, no_wait).tensor.numel() == SIZE
    arena.close()


def refuse(region: SharedMemory, start: int, size: int) -> None:
    raise OSError(errno.ENOMEM, "no memory")


def test_saves_that_find_the_slot_free_need_no_other(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(SIZE)
    assert {save(arena, step).number for step in range(5)} == {0}
    assert with_memory(arena) == [0]
    arena.close()


def test_a_save_that_finds_the_slot_in_use_gets_another(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(SIZE)
    first = arena.acquire(1, no_wait)
    second = arena.acquire(2, nothing_freed)
    assert second is not first
    assert with_memory(arena) == [0, 1]
    arena.close()


def test_a_slot_that_is_free_before_the_other_has_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    gate = Gate(monkeypatch, "ckpt-slot-1")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    arena = Arena(2, pin=False)
    arena.resize(1 << 25)
    first = arena.acquire(1, no_wait)

    def written() -> None:
        if gate.begun.is_set():
            first.release()

    assert arena.acquire(2, written) is first
    gate.open.set()
    assert arena.acquire(3, nothing_freed) is not first
    arena.close()


def test_no_other_slot_is_made_if_the_first_look_frees_one(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(SIZE)
    first = arena.acquire(1, no_wait)
    assert arena.acquire(2, first.release) is first  # as a snapshot that is let go
    assert with_memory(arena) == [0]
    arena.close()


def test_a_second_slot_for_which_there_is_no_memory_is_done_without(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(2, pin=False)
    arena.resize(SIZE)
    first = arena.acquire(1, no_wait)
    monkeypatch.setattr(SharedMemory, "populate", refuse)

    def written() -> None:
        if len(arena.slots) == 1:
            first.release()

    with caplog.at_level(logging.WARNING):
        assert arena.acquire(2, written) is first
    assert "saves wait for the one before" in caplog.text
    arena.close()


def test_a_slot_that_saves_do_not_need_gives_its_memory_back(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(SIZE)
    with SharedMemory(os.dup(arena.slots[0].region.fd), SIZE, "as a neighbour", "0") as theirs:
        first, second = arena.acquire(1, no_wait), arena.acquire(2, nothing_freed)
        first.tensor.fill_(1)
        first.release()
        second.release()
        for step in range(3, 3 + arena_module._IDLE_ACQUISITIONS):
            assert with_memory(arena) == [0, 1]
            last = save(arena, step)
        assert with_memory(arena) == [last.number] == [1]
        assert not any(theirs.buffer)
        assert save(arena, 99) is last
        assert last.tensor.min() == 99
        last.state = SlotState.WRITING
        again = arena.acquire(100, nothing_freed)  # while it may be giving its memory back
        assert again is first
        assert not again.tensor.any()
        assert again.prepared_for is None
    arena.close()


def test_memory_that_could_not_be_given_back_is_not_taken_for_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(region: SharedMemory) -> None:
        raise OSError(errno.EOPNOTSUPP, "not on this kernel")

    monkeypatch.setattr(SharedMemory, "clear", refuse)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    arena = Arena(1, pin=False)
    arena.resize(SIZE)
    slot = save(arena, 1)
    slot.prepared_for = "a layout"
    slot.give_back()
    again = arena.acquire(2, no_wait)
    assert again.tensor.any()
    assert again.prepared_for is not None
    arena.close()


def test_the_last_block_may_be_the_one_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save took it, so the thread finds none left, and ends before the save knows."""
    region = SharedMemory.create("slot", SIZE)
    preparation = Preparation(region, None)

    def populate(start: int, size: int) -> None:
        preparation.begin()
        while not preparation.is_over:
            time.sleep(0.001)
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr(region, "populate", populate)
    preparation.hurry(0.01)
    with pytest.raises(OSError, match="no memory"):
        preparation.check()
    preparation.join()
    region.close()


def test_a_slot_that_is_not_needed_before_it_has_memory_gets_no_more(
    monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck
) -> None:
    gate = Gate(monkeypatch, "ckpt-slot-1")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    arena = Arena(2, pin=False)
    arena.resize(1 << 26)
    first = arena.acquire(1, no_wait)

    def written() -> None:
        if gate.begun.is_set():
            first.release()

    arena.acquire(2, written).release()
    for step in range(3, 3 + arena_module._IDLE_ACQUISITIONS):
        save(arena, step)
    blocks = gate.blocks
    gate.open.set()
    assert with_memory(arena) == [0]
    assert gate.blocks == blocks + 1  # the one that had begun
    arena.close()


def test_a_slot_for_a_gpu_keeps_its_memory(monkeypatch: pytest.MonkeyPatch, leak_check: LeakCheck) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(arena_module, "_register", lambda tensor, device: pinned.append(tensor.data_ptr()))
    monkeypatch.setattr(arena_module, "_unregister", lambda tensor: pinned.remove(tensor.data_ptr()))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    arena = Arena(2, pin=True)
    arena.resize(SIZE)
    first, second = arena.acquire(1, no_wait), arena.acquire(2, nothing_freed)
    for slot in (first, second):
        slot.release()
    for step in range(3, 3 + 2 * arena_module._IDLE_ACQUISITIONS):
        save(arena, step)
    assert with_memory(arena) == [0, 1]
    assert sorted(pinned) == sorted(slot.tensor.data_ptr() for slot in (first, second))
    arena.close()
    assert not pinned


def test_a_kept_slot_is_held_when_it_is_released(leak_check: LeakCheck) -> None:
    arena = Arena(2, pin=False)
    arena.resize(1 << 16)
    first = arena.acquire(1, no_wait)
    first.is_kept = True
    first.release()
    assert first.state is SlotState.HELD
    second = arena.acquire(2, nothing_freed)
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
    assert arena.acquire(2, nothing_freed) is not first
    assert not arena.has_free()
    first.unpin()
    assert arena.acquire(3, nothing_freed) is first
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
        assert arena.acquire(step, nothing_freed).tensor.numel() == 1 << 20
    assert held not in arena.slots
    arena.close()
