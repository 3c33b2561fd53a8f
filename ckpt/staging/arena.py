"""The arena: slots of shared memory that saves are staged in.

           acquire               staged               release (files written, or save abandoned)
    FREE ──────────▶ STAGING ─────────────▶ WRITING ──────────────────────────────▶ FREE
      ▲                 │                                         if it is kept     │
      │  let_go         ▼   release of a snapshot that is kept                      ▼
      └────────────── HELD ◀────────────────────────────────────────────────────── HELD
      pin, unpin: FREE ◀──▶ HELD

A slot is mapped, faulted in and (on CUDA) pinned once, and used again and again. There are two by default: one may
still be written while the next save is staged. With snapshots there are three: one is held, as a restart may need it.
Faulting in and pinning take long, so a thread does them, one slot after the other; `acquire` waits until its slot is
ready, and `close` ends the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import Enum

import torch

from ckpt.errors import CheckpointTimeoutError
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.threads import JoinableThread

__all__ = ["Arena", "Slot", "SlotState"]


class SlotState(Enum):
    """Which process uses a slot: none, the trainer, the writer; or none, but what it holds is still needed."""

    FREE = "free"
    STAGING = "staging"
    WRITING = "writing"
    HELD = "held"


class Slot:
    """One region of shared memory.

    `tensor` is all of it as a 1-d uint8 tensor; `step` the save that is or was in it; `prepared_for` whose constants
    are in it (None while it is new), `described_for` whose documents are behind it; `used` how many slots had been
    acquired when this one was; `is_kept` whether it is held when it is released, as a snapshot, and `is_pinned` the
    same, as what is replicated.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.state = SlotState.FREE
        self.step: int | None = None
        self.used = 0
        self.is_kept = False
        self.is_pinned = False
        self.prepared_for: object = None
        self.described_for: object = None
        self.region = SharedMemory.create(f"ckpt-slot-{number}", size)
        self.tensor = torch.frombuffer(self.region.buffer, dtype=torch.uint8)
        self._pinned = False
        self._ready: Future[None] = Future()

    def prepare(self, stopped: Callable[[], bool], device: int | None) -> None:
        """Fault in, and pin for the GPU `device`. Runs in the arena's thread, once."""
        try:
            self.region.prefault(stopped)
            if device is not None and not stopped():
                _register(self.tensor, device)
                self._pinned = True
        except Exception as error:
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)

    def wait_ready(self, deadline: Deadline | None = None) -> None:
        """Wait for `prepare`. Raises what it raised: OSError when the system has not enough memory.

        CheckpointTimeoutError at the deadline.
        """
        if deadline is not None and not wait([self._ready], deadline.left_s).done:
            raise CheckpointTimeoutError(
                f"the memory of a staging slot, {self.region.size} bytes, was not ready after {deadline.timeout_s:g} "
                "s: the system is short of memory or very busy; the next save goes on waiting for it"
            )
        self._ready.result()

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
        """Give the memory back. Idempotent. Not to be called while `prepare` runs.

        A writer that still writes from it keeps its own mapping.
        """
        if self._pinned:
            _unregister(self.tensor)
            self._pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.region.close()


class Arena:
    """`slots` slots of the same size, made when first needed. Belongs to one thread of the trainer."""

    def __init__(self, slots: int, pin: bool) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, not {slots}")
        self._count = slots
        self._pin = pin
        self._slots: list[Slot] = []
        self._outgrown: list[Slot] = []  # too small, but held
        self._thread: threading.Thread | None = None  # prepares all of `_slots`, and nothing else
        self._stopped = threading.Event()
        self.slot_bytes = 0
        self._acquired = 0
        self._kept: Slot | None = None

    def resize(self, size: int) -> None:
        """Give every slot room for `size` bytes, without waiting until the memory is ready.

        Slots in use are replaced; their writers keep the old memory. Those that are held stay until they are let go.
        """
        if size <= self.slot_bytes:
            return
        self._close_but_held()  # waits, as there may not be enough memory for both
        for number in range(self._count):
            self._slots.append(Slot(number, size))
        device = torch.cuda.current_device() if self._pin and torch.cuda.is_available() else None
        self._stopped = threading.Event()  # an earlier thread may still be about to notice its own
        thread = JoinableThread(_prepare, "ckpt-arena", (tuple(self._slots), device, self._stopped.is_set))
        self._thread = thread
        thread.start()
        self.slot_bytes = size

    def acquire(self, step: int, wait: Callable[[], None], deadline: Deadline | None = None) -> Slot:
        """Return a free slot, for `step` to be staged. While there is none, call `wait`, which may free one or raise.

        CheckpointTimeoutError if its memory is not ready at the deadline. OSError when the system has not enough
        memory; all slots but those that are held are closed then, and the arena is to be resized again.
        """
        while True:
            self._close_outgrown()
            if self.has_free():
                free = [slot for slot in self._slots if slot.state is SlotState.FREE]
                slot = min(free, key=lambda slot: (slot is self._kept, slot.used))
                try:
                    slot.wait_ready(deadline)
                except CheckpointTimeoutError:
                    raise
                except Exception:
                    self._close_but_held()
                    raise
                self._acquired += 1
                slot.state, slot.step, slot.used, slot.is_kept = SlotState.STAGING, step, self._acquired, False
                return slot
            wait()

    def has_free(self) -> bool:
        """Return whether any slot is free."""
        return any(slot.state is SlotState.FREE for slot in self._slots)

    def keep(self, region: SharedMemory) -> None:
        """Acquire the slot with this memory again only when no other is free, as a restore may need what it holds."""
        self._kept = next((slot for slot in self._slots if slot.region is region), None)

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
        self._stopped.set()
        self.slot_bytes = 0
        thread, slots = self._thread, list(self.slots)
        if wait:
            _free(thread, slots)
        else:
            _free_later(thread, slots)
        self._thread = None
        self._slots.clear()
        self._outgrown.clear()

    def _close_but_held(self) -> None:
        """Close all slots that are not held. Those that are will not be used again."""
        held = [slot for slot in self._slots if slot.state is SlotState.HELD]
        self._stopped.set()
        self.slot_bytes = 0
        _free(self._thread, [slot for slot in self._slots if slot not in held])
        self._thread = None
        self._outgrown += [slot for slot in held if slot not in self._outgrown]
        self._slots.clear()

    def _close_outgrown(self) -> None:
        """Close, soon, the slots that are too small and not held any more."""
        free = [slot for slot in self._outgrown if slot.state is SlotState.FREE]
        if free:
            self._outgrown = [slot for slot in self._outgrown if slot not in free]
            _free_later(None, free)


def _prepare(slots: tuple[Slot, ...], device: int | None, stopped: Callable[[], bool]) -> None:
    for slot in slots:
        slot.prepare(stopped, device)


def _free(thread: threading.Thread | None, slots: list[Slot]) -> None:
    """Close slots when the thread that prepares them has ended."""
    if thread is not None:
        thread.join()
    for slot in slots:
        slot.close()


def _free_later(thread: threading.Thread | None, slots: list[Slot]) -> None:
    if slots:
        threading.Thread(target=_free, args=(thread, slots), name="ckpt-arena-free", daemon=False).start()


def _register(tensor: torch.Tensor, device: int) -> None:
    """Pin the pages for DMA. Sets the device, as a new thread starts on device 0, which others may use."""
    with torch.cuda.device(device):
        result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        torch.cuda.check_error(int(result))


def _unregister(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
