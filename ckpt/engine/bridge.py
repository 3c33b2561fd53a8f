"""`RestartBridge`: what a restart of the training function, and a monitor of the rank, ask of a `Checkpointer`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from ckpt.async_calls import CallTimer
from ckpt.engine.closing import Closing
from ckpt.engine.parts import Parts
from ckpt.engine.phases import PhaseObserver, Phases
from ckpt.engine.restores import Restores
from ckpt.loading.restore_step import RestoreReport
from ckpt.ranks.group import Group

_ANSWER_S = 5.0  # for writers to report saves that are already decided


class RestartBridge:
    """The side of a Checkpointer that `ckpt.restart` uses. For the thread that trains, but `interrupt`."""

    def __init__(self, parts: Parts, restores: Restores, closing: Closing, phases: Phases) -> None:
        self._saver, self._queue = parts.saver, parts.queue
        self._restores, self._closing, self._phases = restores, closing, phases
        self._interrupted_at: float | None = None
        self._restores_later = False

    @property
    def last_restore(self) -> RestoreReport | None:
        """See `Checkpointer.last_restore`."""
        return self._restores.last

    @property
    def resume_step(self) -> int | None:
        """See `Checkpointer.resume_step`."""
        return self._restores.resume_step

    @property
    def interrupted_at(self) -> float | None:
        """When `interrupt` was first called since the last fault, in seconds since 1970; None if it was not."""
        return self._interrupted_at

    def interrupt(self) -> None:
        """Wake a thread that waits in a method. From any thread; see `AsyncCallsQueue.interrupt`."""
        self._interrupted_at = self._interrupted_at or time.time()
        self._queue.interrupt()

    def recover_from_fault(self, drain_timeout: timedelta | None, rank: int | None = 0) -> None:
        """Decide every save in flight, forget the process group, and restore the registered state to the newest step.

        Snapshots stay as they are, and are not waited for. What is restored here is a published step: to agree on one
        that is in memory alone, ranks need each other (see `restore_registered`).

        On every surviving rank, when nothing else runs in this process. Makes no collective. With a `drain_timeout` a
        save that all ranks have completely staged is still published, within that time; without, all saves that are not
        published by now are given up, and this waits for no other process. An earlier save is never published after
        this has returned.

        `rank` is that of this process before the fault, in case it has not used its process group yet; None if it was a
        spare: it has no part in any save, and restores nothing here. Raises what `Checkpointer.restore` raises; also
        CheckpointCorruptError for a damaged step, because other ranks may not find it damaged.
        """
        self._closing.check_open()
        drain_s = 0.0 if drain_timeout is None else drain_timeout.total_seconds()
        if drain_timeout is None:
            self._queue.recover(0.0)  # kills the writers
        last, last_rank = self._restores.last, self._saver.last_rank
        rank = last_rank if last_rank is not None else rank
        if rank is not None:
            self._saver.settle_all(rank, time.monotonic() + drain_s)
        self._queue.recover(min(drain_s, _ANSWER_S))
        if rank is not None:
            self._saver.refuse_left(rank)
        self._saver.forget_saves()
        self._restores.note(None)
        if self._restores.registered and rank is not None and not self._restores_later:
            self._restores.restore_registered_alone(last, rank)
        self._interrupted_at = None

    def leave_restoring_to_next_iteration(self) -> None:
        """Let `recover_from_fault` restore nothing: `restore_registered` does, in the next iteration."""
        self._restores_later = True

    def restore_registered(self, ranks: Group, restart: int) -> None:
        """After a fault, restore the registered state to the newest step that is whole in memory or published.

        Collective, through `ranks`, which need no process group. `restart` is the index of the iteration that begins.
        Raises what `Checkpointer.restore` raises.
        """
        self._closing.check_open()
        if self._restores.registered:
            with self._phases("ckpt.restore"):
                self._restores.restore_registered(ranks, restart)

    def observe_phases(
        self, phase: PhaseObserver, background: Callable[[str, int], CallTimer | None] | None = None
    ) -> None:
        """Enter the context `phase(name)` around the work that the trainer does on checkpoints, in its thread.

        There may be several; an equal one replaces nothing and is ignored. For events without time limits, in another
        thread, see `ckpt.observe`.

        The names are ``ckpt.stage`` (`Checkpointer.save_request`), ``ckpt.finalize`` (`maybe_finalize`) and
        ``ckpt.restore``. ``background("ckpt.write", at_ns)`` is called in the same thread when this rank's writer
        begins a save, with the time of CLOCK_MONOTONIC. When its timer runs out, the writer is killed and the save
        abandoned on all ranks: by the next method that handles messages of writers, or at once if one is waiting.
        """
        self._phases.observe(phase, background)
