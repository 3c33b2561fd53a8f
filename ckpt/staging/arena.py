"""The arena: slots of shared memory that saves are staged in.

           acquire                 hand_over                 release (part durable, or save abandoned)
    FREE ----------> STAGING ------------------> WRITING --------------------------------> FREE

A slot is mapped, faulted in and (on CUDA) pinned once, and used again and again. Two slots by default: one may still be
written while the next save is staged.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch

from ckpt.shared_memory import SharedMemory

__all__ = ["Arena", "Slot", "SlotState"]


class SlotState(Enum):
    """Who may touch a slot: nobody, the trainer, the writer."""

    FREE = "free"
    STAGING = "staging"
    WRITING = "writing"


class Slot:
    """One region of shared memory. `tensor` is all of it as a 1-d uint8 tensor; `step` is the save that is or was in
    it."""

    def __init__(self, number: int, size: int, pin: bool) -> None:
        self.number = number
        self.state = SlotState.FREE
        self.step: int | None = None
        self.region = SharedMemory.create(f"ckpt-slot-{number}", size)
        try:
            self.region.prefault()
            self.tensor = torch.frombuffer(self.region.buffer, dtype=torch.uint8)
            self._pinned = pin and _register(self.tensor)
        except BaseException:
            self.region.close()
            raise

    def close(self) -> None:
        """Give the memory back. A writer that still writes from it keeps its own mapping."""
        if self._pinned:
            _unregister(self.tensor)
        del self.tensor
        self.region.close()


class Arena:
    """`slots` slots of the same size, made when first needed. Belongs to one thread of the trainer."""

    def __init__(self, slots: int, max_host_bytes: int | None, pin: bool) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {slots}")
        self._count = slots
        self._pin = pin
        self._slots: list[Slot] = []
        self.max_slot_bytes = None if max_host_bytes is None else max_host_bytes // slots
        self.slot_bytes = 0

    def resize(self, size: int) -> None:
        """Give every slot room for `size` bytes. Slots that are in use are replaced; what is in them stays with their
        users.

        Raises OSError when the system has not enough memory.
        """
        if size <= self.slot_bytes:
            return
        self.close()
        self._slots = [Slot(number, size, self._pin) for number in range(self._count)]
        self.slot_bytes = size

    def acquire(self, step: int, wait: Callable[[], None]) -> Slot:
        """A free slot, now being staged for `step`. While there is none, calls `wait`, which lets events come in or
        raises."""
        while True:
            for slot in self._slots:
                if slot.state is SlotState.FREE:
                    slot.state, slot.step = SlotState.STAGING, step
                    return slot
            wait()

    def in_use(self) -> list[Slot]:
        """The slots that are not free."""
        return [slot for slot in self._slots if slot.state is not SlotState.FREE]

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        slots, self._slots, self.slot_bytes = self._slots, [], 0
        for slot in slots:
            slot.close()


def _register(tensor: torch.Tensor) -> bool:
    """Pin the pages for DMA by the GPU; False when there is none in this process."""
    if not torch.cuda.is_available():
        return False
    result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    torch.cuda.check_error(int(result))
    return True


def _unregister(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
