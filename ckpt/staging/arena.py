"""The arena: slots of shared memory that saves are staged in.

           acquire               staged               release (files written, or save abandoned)
    FREE ──────────▶ STAGING ─────────────▶ WRITING ──────────────────────────────▶ FREE
      ▲                 │                                         if it is kept     │
      │  let_go         ▼   release of a snapshot that is kept                      ▼
      └────────────── HELD ◀────────────────────────────────────────────────────── HELD
      pin, unpin: FREE ◀──▶ HELD

A slot is an address range from the beginning, and takes memory when it is first used: one slot at rest, as long as
each save finds it free again (two with snapshots, one of which is held, as a restart may need it). Another one is made
when a save finds none, and given back after `_IDLE_ACQUISITIONS` saves that would not have needed it. A slot that is
pinned for a GPU stays.

Memory takes long to be had, so it is made ready in the background (see `preparation`). `acquire` takes the first slot
that is ready and free, and works on one that is not while it waits. The descriptors are the same all the time, so those
who have them (writers, neighbours, the keeper) need not be told; memory that is given back is zero for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from enum import Enum

import torch

from ckpt.errors import CheckpointTimeoutError
from ckpt.staging.held_runs import HeldRuns
from ckpt.staging.preparation import Preparation
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.threads import JoinableThread

_log = logging.getLogger("ckpt")
_IDLE_ACQUISITIONS = 8  # a writer that is late once in a while gets the second slot each time anew with fewer
_LABEL_BYTES = 4096
_HURRY_S = 0.01  # between two looks whether another slot is free


class SlotState(Enum):
    """Which process uses a slot: none, the trainer, the writer; or none, but what it holds is still needed."""

    FREE = "free"
    STAGING = "staging"
    WRITING = "writing"
    HELD = "held"


class Slot:
    """One region of shared memory.

    `tensor` is all of it as a 1-d uint8 tensor; `step` the save that is or was in it; `prepared_for` whose constants
    are in it (None while it is new), `held_runs` what is known of the runs of memory there, `described_for` whose
    documents are behind it; `used` how many slots had been acquired when this one was; `is_kept` whether it is held
    when it is released, as a snapshot, and `is_pinned` the same, as what is replicated.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.state = SlotState.FREE
        self.step: int | None = None
        self.used = 0
        self.is_kept = False
        self.is_pinned = False
        self.prepared_for: object = None
        self.held_runs: HeldRuns | None = None
        self.described_for: object = None
        self.region = SharedMemory.create(f"ckpt-slot-{number}", size)
        self.tensor = torch.frombuffer(self.region.buffer, dtype=torch.uint8)
        self._is_for_gpu = False
        self._memory: Preparation | None = None  # None without memory
        self._clearing: JoinableThread | None = None

    def prepare(self, device: int | None) -> Preparation:
        """Make its memory ready, pinned for the GPU `device`; begun once, in the background."""
        if self._memory is None:
            self._is_for_gpu = device is not None
            pin = None if device is None else lambda: _register(self.tensor, device)
            self._memory = Preparation(self.region, pin, after=self._clearing)
        self._memory.begin()
        return self._memory

    @property
    def is_prepared(self) -> bool:
        """Whether it has memory, or will have it soon."""
        return self._memory is not None

    @property
    def is_ready(self) -> bool:
        """Whether its memory can be used now."""
        return self._memory is not None and self._memory.is_over

    def give_back(self) -> None:
        """Give its memory back, soon after this has returned; not that for a GPU. To be called while it is free."""
        if self._memory is None or self._is_for_gpu:
            return
        memory = self._memory
        self.step, self.prepared_for, self.described_for = None, (), None  # not zero as long as it is not cleared
        memory.stop()
        self.tensor[-_LABEL_BYTES:].zero_()  # from now on it is no share of a save, see `ckpt/saving/share.py`

        def clear() -> None:
            memory.join()
            self.region.clear()
            self.prepared_for = None

        self._memory, self._clearing = None, JoinableThread(clear, "ckpt-arena-clear")
        self._clearing.start()

    def release(self) -> None:
        """Make the slot free for the next save, or hold it if it is kept or pinned."""
        self.state = SlotState.HELD if self.is_kept or self.is_pinned else SlotState.FREE

    def let_go(self) -> None:
        """Keep it no longer. It becomes free, unless it is pinned or a writer still uses it."""
        self.is_kept = False
        if self.state is SlotState.HELD:
            self.release()

    def pin(self) -> None:
        """Pin it: what it holds is being replicated, or may be needed with the replicas of others."""
        self.is_pinned = True
        if self.state is SlotState.FREE:
            self.state = SlotState.HELD

    def unpin(self) -> None:
        """Pin it no longer. It becomes free, unless it is kept or a writer still uses it."""
        self.is_pinned = False
        if self.state is SlotState.HELD:
            self.release()

    def close(self) -> None:
        """Give everything back, when its threads have ended. Idempotent.

        A writer that still writes from it keeps its own mapping.
        """
        if self._memory is not None:
            self._memory.stop()
            self._memory.join()
            if self._memory.is_pinned:
                _unregister(self.tensor)
            self._memory = None
        if self._clearing is not None:
            self._clearing.join()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.region.close()


class Arena:
    """At most `slots` slots of the same size, `at_rest` of them with memory at all times.

    Belongs to one thread of the trainer.
    """

    def __init__(self, slots: int, pin: bool, at_rest: int = 1) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {slots}")
        self._count = slots
        self._at_rest = at_rest
        self._pin = pin
        self._device: int | None = None
        self._slots: list[Slot] = []
        self._outgrown: list[Slot] = []  # too small, but held
        self.slot_bytes = 0
        self._acquired = 0
        self._idle = 0  # acquisitions in a row that found more than one slot
        self._kept: Slot | None = None

    def resize(self, size: int) -> None:
        """Give every slot room for `size` bytes, without waiting until there is memory.

        Slots in use are replaced; their writers keep the old memory. Those that are held stay until they are let go.
        """
        if size <= self.slot_bytes:
            return
        self._close_but_held()  # waits, as there may not be enough memory for both
        self._device = torch.cuda.current_device() if self._pin and torch.cuda.is_available() else None
        for number in range(self._count):
            self._slots.append(Slot(number, size))
        for slot in self._slots[: self._at_rest]:
            slot.prepare(self._device)
        self.slot_bytes, self._idle = size, 0

    def acquire(self, step: int, wait: Callable[[], None], deadline: Deadline | None = None) -> Slot:
        """Return a free slot, for `step` to be staged.

        While there is none, or none with memory, and others are in use, call `wait`, which may free one or raise.
        CheckpointTimeoutError if its memory is not ready at the deadline. OSError when the system has not enough
        memory; all slots but those that are held are closed then, and the arena is to be resized again.
        """
        begun: Slot | None = None
        has_waited = False
        try:
            while True:
                self._close_outgrown()
                ready = [slot for slot in self._free() if slot.is_ready]
                if ready and (slot := self._checked(min(ready, key=self._order))) is not None:
                    return self._taken(slot, step)
                others_in_use = any(slot.state is not SlotState.FREE for slot in self._slots)
                begun = self._preparing() if has_waited or not others_in_use else None
                if begun is not None:
                    begun.prepare(self._device).hurry(_HURRY_S)
                    if not begun.is_ready and deadline is not None and deadline.is_over:
                        raise _late(begun, deadline)
                if others_in_use:
                    has_waited = True
                    wait()
        finally:
            if begun is not None and not begun.is_ready:
                begun.prepare(self._device).relax()

    def _free(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.state is SlotState.FREE]

    def _preparing(self) -> Slot | None:
        """Return a free slot whose memory is not ready; one of which that was begun, if there is any."""
        free = [slot for slot in self._free() if not slot.is_ready]
        return max(free, key=lambda slot: slot.is_prepared, default=None)

    def _order(self, slot: Slot) -> tuple[bool, int]:
        return slot is self._kept, slot.used

    def _checked(self, slot: Slot) -> Slot | None:
        """Return a slot that is ready; None if there is no memory for it, but others have some.

        It is no longer one of the slots then. If it was the only one, the error is raised.
        """
        try:
            slot.prepare(self._device).check()
        except Exception as error:
            if not any(other.is_ready for other in self._slots if other is not slot):
                self._close_but_held()
                raise
            self._slots.remove(slot)
            slot.close()
            _log.warning("there is no memory for another staging slot, so saves wait for the one before: %s", error)
            return None
        return slot

    def _taken(self, slot: Slot, step: int) -> Slot:
        free = sum(each.is_prepared for each in self._free())
        self._acquired += 1
        self._idle = self._idle + 1 if free > 1 else 0
        slot.state, slot.step, slot.used, slot.is_kept = SlotState.STAGING, step, self._acquired, False
        self._give_back()
        return slot

    def _give_back(self) -> None:
        """Give back the memory of free slots that the last saves have not needed, but what a restore may need."""
        if self._idle < _IDLE_ACQUISITIONS:
            return
        idle = [slot for slot in self._free() if slot.is_prepared and slot is not self._kept]
        for slot in idle[: sum(slot.is_prepared for slot in self._slots) - self._at_rest]:
            slot.give_back()

    def has_free(self) -> bool:
        """Return whether any slot is free."""
        return any(slot.state is SlotState.FREE for slot in self._slots)

    def has_ready(self) -> bool:
        """Return whether any slot is free and has its memory, so that `acquire` does not wait."""
        return any(slot.is_ready for slot in self._free())

    def keep(self, region: SharedMemory) -> None:
        """Acquire the slot with this memory again only when no other is free, as a restore may need what it holds."""
        self._kept = next((slot for slot in self._slots if slot.region is region), None)
        self._give_back()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, also those that are held and too small to be used again."""
        return (*self._slots, *self._outgrown)

    def release_all(self) -> None:
        """Make all slots free, whatever their states, but hold those that are kept."""
        for slot in self.slots:
            slot.release()

    def in_use(self) -> list[Slot]:
        """The slots that the trainer or a writer uses."""
        return [slot for slot in self._slots if slot.state in (SlotState.STAGING, SlotState.WRITING)]

    def close(self, *, wait: bool = True) -> None:
        """Give all memory back; without `wait`, in a thread that ends soon, and that the interpreter waits for.

        Idempotent; after an interrupt it can be called again.
        """
        self.slot_bytes = 0
        slots = list(self.slots)
        (_free if wait else _free_later)(slots)
        self._slots.clear()
        self._outgrown.clear()

    def _close_but_held(self) -> None:
        """Close all slots that are not held. Those that are will not be used again."""
        held = [slot for slot in self._slots if slot.state is SlotState.HELD]
        self.slot_bytes = 0
        _free([slot for slot in self._slots if slot not in held])
        self._outgrown += [slot for slot in held if slot not in self._outgrown]
        self._slots.clear()

    def _close_outgrown(self) -> None:
        """Close, soon, the slots that are too small and not held any more."""
        free = [slot for slot in self._outgrown if slot.state is SlotState.FREE]
        if free:
            self._outgrown = [slot for slot in self._outgrown if slot not in free]
            _free_later(free)


def _late(slot: Slot, deadline: Deadline) -> CheckpointTimeoutError:
    return CheckpointTimeoutError(
        f"the memory of a staging slot, {slot.region.size} bytes, was not ready after {deadline.timeout_s:g} s: the "
        "system is short of memory or very busy; the next save goes on waiting for it"
    )


def _free(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.close()


def _free_later(slots: list[Slot]) -> None:
    if slots:
        threading.Thread(target=_free, args=(slots,), name="ckpt-arena-free", daemon=False).start()


def _register(tensor: torch.Tensor, device: int) -> None:
    """Pin the pages for DMA. Sets the device, as a new thread starts on device 0, which others may use."""
    with torch.cuda.device(device):
        result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        torch.cuda.check_error(int(result))


def _unregister(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
