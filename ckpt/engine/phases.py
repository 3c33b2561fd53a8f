"""The work of a trainer on checkpoints, as phases that others observe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from ckpt.async_calls import CallTimer
from ckpt.saving.timers import Timers

PhaseObserver = Callable[[str], AbstractContextManager[object]]


class Phases:
    """The observers of a Checkpointer's phases. For the thread that trains."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers  # of the writer's calls
        self._observers: list[PhaseObserver] = []

    def observe(self, phase: PhaseObserver, background: Callable[[str, int], CallTimer | None] | None = None) -> None:
        """Enter the context `phase(name)` around each phase, from now on; see `RestartBridge.observe_phases`."""
        if phase not in self._observers:
            self._observers.append(phase)
        if background is not None:
            self._timers.add("ckpt.write", background)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter the contexts of all observers for the phase of this name."""
        with contextlib.ExitStack() as stack:
            for phase in self._observers:
                stack.enter_context(phase(name))
            yield
