"""Make a rank fail on purpose, in every way that the restart wrapper handles.

trigger(Fault.SEGFAULT)                             # here and now
injection = inject_fault(num_faults=1, delay=5.0)   # on every rank: 5 s later one of them, chosen by the seed, fails
"""

from __future__ import annotations

import ctypes
import enum
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

_FOREVER_S = 2**31 - 1
_GPU_CYCLES = 2**62


class InjectedException(Exception):
    """What the fault injection raises."""


class Fault(enum.Enum):
    """Ways to fail."""

    GPU_ERROR = enum.auto()  # a kernel that hits an assertion: the CUDA context is lost
    GPU_SLEEP = enum.auto()  # a kernel that does not end
    WORKLOAD_EXC = enum.auto()  # the program raises, where it calls `Injection.check` or `trigger`
    ASYNC_EXC = enum.auto()  # an exception thrown into the main thread from another one
    SIGNAL_EXC = enum.auto()  # a signal handler raises on the main thread
    OS_ABORT = enum.auto()
    OS_EXIT = enum.auto()  # ends at once with code 1, without any cleanup
    LOCK_GIL = enum.auto()  # a C function that never returns and never releases the interpreter lock
    SEGFAULT = enum.auto()
    SIGINT = enum.auto()
    SIGKILL = enum.auto()
    SIGTERM = enum.auto()
    SIGSTOP = enum.auto()


_GPU_FAULTS = frozenset({Fault.GPU_ERROR, Fault.GPU_SLEEP})
_SIGNALS = {
    Fault.SIGINT: signal.SIGINT,
    Fault.SIGKILL: signal.SIGKILL,
    Fault.SIGTERM: signal.SIGTERM,
    Fault.SIGSTOP: signal.SIGSTOP,
}


@dataclass(frozen=True)
class PlannedFault:
    """Initial rank `rank` will fail by `fault`, `delay` seconds after the injection."""

    rank: int
    fault: Fault
    delay: float


class Injection:
    """The faults of one call of `inject_fault`; the same `plan` on all ranks."""

    def __init__(self, plan: Sequence[PlannedFault]) -> None:
        self.plan = tuple(plan)
        self._raise_in_workload = threading.Event()
        self._timers: list[threading.Timer] = []

    def start(self, rank: int, callback: Callable[[Fault], object] | None) -> None:
        """Start the timers for the faults of this rank. Main thread only."""
        for planned in self.plan:
            if planned.rank == rank:
                arm(planned.fault)
                timer = threading.Timer(planned.delay, self._fire, (planned.fault, callback))
                timer.daemon = True
                timer.start()
                self._timers.append(timer)

    def check(self) -> None:
        """Called by the workload, for example once per step: raises InjectedException if WORKLOAD_EXC is due. Once."""
        if self._raise_in_workload.is_set():
            self._raise_in_workload.clear()
            trigger(Fault.WORKLOAD_EXC)

    def cancel(self) -> None:
        """Stop what has not happened yet, and wait for the timers to end."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _fire(self, fault: Fault, callback: Callable[[Fault], object] | None) -> None:
        if callback is not None:
            callback(fault)
        if fault is Fault.WORKLOAD_EXC:
            self._raise_in_workload.set()
        else:
            trigger(fault)


def inject_fault(
    faults: Sequence[Fault] | None = None,
    num_faults: int | tuple[int, int] = 1,
    keep_alive: int = 1,
    delay: float | tuple[float, float] = 0.0,
    seed: int | None = None,
    callback: Callable[[Fault], object] | None = None,
) -> Injection:
    """Let ranks fail later. Called with the same arguments on the main thread of every rank; returns at once.

    `num_faults` and `delay` (seconds) are numbers, or ranges to choose from. Victims are different ranks, none of them
    below `keep_alive`, because the lowest ranks often serve a store. The `faults` are chosen from the given ones, by
    default from all (those of GPUs only if there is one). All ranks choose the same, from `seed`, by default 0. Rank
    and world size are read from the environment. `callback` is called on the victim just before it fails, in the
    timer's thread. ValueError if there are not enough ranks.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kinds = list(faults) if faults is not None else [kind for kind in Fault if _has_gpu() or kind not in _GPU_FAULTS]
    injection = Injection(plan_faults(world_size, kinds, num_faults, keep_alive, delay, 0 if seed is None else seed))
    injection.start(rank, callback)
    return injection


def plan_faults(
    world_size: int,
    faults: Sequence[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
) -> list[PlannedFault]:
    """Choose who fails, how and when: always the same for the same arguments."""
    choice = random.Random(seed)
    count = num_faults if isinstance(num_faults, int) else choice.randint(*num_faults)
    candidates = range(keep_alive, world_size)
    if count > len(candidates):
        raise ValueError(f"{count} ranks cannot fail when {keep_alive} of {world_size} are kept alive")
    if count and not faults:
        raise ValueError("there is no fault to choose")
    return [
        PlannedFault(rank, choice.choice(faults), choice.uniform(*delay) if isinstance(delay, tuple) else float(delay))
        for rank in choice.sample(candidates, count)
    ]


def arm(fault: Fault) -> None:
    """Prepare a fault that will be triggered on another thread: SIGNAL_EXC takes over SIGUSR1. Main thread only."""
    if fault is Fault.SIGNAL_EXC:
        signal.signal(signal.SIGUSR1, _raise_from_handler)


def trigger(fault: Fault) -> None:
    """Fail now, on any thread; SIGNAL_EXC must have been armed unless this is the main thread.

    WORKLOAD_EXC raises InjectedException here; ASYNC_EXC and SIGNAL_EXC raise it on the main thread, soon; so does
    SIGINT with KeyboardInterrupt. RuntimeError for a GPU fault without GPU.
    """
    main_thread = threading.main_thread()
    if fault in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault])
    elif fault in _GPU_FAULTS:
        _fail_gpu(fault)
    elif fault is Fault.WORKLOAD_EXC:
        raise InjectedException("injected into the workload")
    elif fault is Fault.ASYNC_EXC:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(main_thread.ident or 0), ctypes.py_object(InjectedException)
        )
    elif fault is Fault.SIGNAL_EXC:
        if threading.current_thread() is main_thread:
            arm(fault)
        signal.pthread_kill(main_thread.ident or 0, signal.SIGUSR1)
    elif fault is Fault.OS_ABORT:
        os.abort()
    elif fault is Fault.OS_EXIT:
        os._exit(1)
    elif fault is Fault.LOCK_GIL:
        while True:  # a signal ends one sleep
            ctypes.PyDLL(None).sleep(_FOREVER_S)
    elif fault is Fault.SEGFAULT:
        ctypes.string_at(0)


def _raise_from_handler(signum: int, frame: FrameType | None) -> None:
    raise InjectedException("injected by a signal handler")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _fail_gpu(fault: Fault) -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"{fault.name} needs a GPU")
    if fault is Fault.GPU_SLEEP:
        torch.cuda._sleep(_GPU_CYCLES)
    else:
        index = torch.tensor([2**40], device="cuda")
        torch.zeros(1, device="cuda")[index]
