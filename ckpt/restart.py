"""Checkpoints across an in-process restart: the only bridge between `ckpt` and `inprocess`.

    wrapper = inprocess.Wrapper(
        abort=inprocess.Compose(CheckpointAbort(checkpointer), inprocess.abort.AbortTorchDistributed()),
        finalize=CheckpointFinalize(checkpointer),
        initialize=CheckpointInitialize(checkpointer),  # with snapshots, for registered state
    )

After a fault in iteration i, on every surviving rank, when the process groups are destroyed and the function has
ended:

    fence      no code of iteration i runs any more; a save that was being staged is given up
    drain      every save that all ranks have staged is published, whichever ranks died; the others are given up
    restore    the registered state is restored to the newest published step: the same on all ranks

Each save is decided by one atomic rename, so all ranks restore the same step without communication. Snapshots are not:
to restore one, the ranks of the next iteration agree on it, in `Checkpointer.restore` or in `CheckpointInitialize`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ckpt.arguments import duration
from ckpt.checkpointer import Checkpointer
from ckpt.events import Restarted
from ckpt.observing import emit, is_observed, shortened
from ckpt.ranks.collectives import StoreRanks
from inprocess.abort import Abort
from inprocess.finalize import Finalize
from inprocess.initialize import Initialize
from inprocess.state import FrozenState
from inprocess.unblock.store_waits import connect_store

if TYPE_CHECKING:
    from inprocess.fault_tolerance import RankMonitorClient

__all__ = ["Bridge", "CheckpointAbort", "CheckpointFinalize", "CheckpointInitialize", "Recoverable", "report_sections"]

_log = logging.getLogger("ckpt")
_DRAIN = timedelta(seconds=30)


def report_sections(checkpointer: Checkpointer, client: RankMonitorClient) -> None:
    """Report the time spent on checkpoints to a rank monitor, as sections.

    The trainer's are ``ckpt.stage``, ``ckpt.finalize`` and ``ckpt.restore``; that of a writer process is
    ``ckpt.write``, in the background. A late ``ckpt.write`` ends the save and its writer process, never the rank.
    Sections that are not in the configuration cost nothing; nor does any while the client is shut down.
    """
    checkpointer.bridge.observe_phases(_Sections(client), client.begin_in_background)


@dataclass(frozen=True)
class _Sections:
    """The sections of a client; equal for the same client, so that it is observed once."""

    client: RankMonitorClient

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return self.client.section(name) if self.client.is_initialized else contextlib.nullcontext()


class Bridge(Protocol):
    """The saves and restores of one or several `Checkpointer`s, for the hooks; see `ckpt.engine.bridge`."""

    @property
    def last_restore(self) -> object: ...
    @property
    def resume_step(self) -> int | None: ...
    @property
    def interrupted_at(self) -> float | None: ...
    def interrupt(self) -> None: ...
    def recover_from_fault(self, drain_timeout: timedelta | None, rank: int | None = 0) -> None: ...


class Recoverable(Protocol):
    """A `Checkpointer`, or an adapter that has several."""

    @property
    def bridge(self) -> Bridge: ...


class CheckpointAbort(Abort):
    """Wakes a main thread that waits for a checkpoint: for a free slot, or for saves to be decided."""

    def __init__(self, checkpointer: Recoverable) -> None:
        self._bridge = checkpointer.bridge

    def __call__(self, state: FrozenState) -> FrozenState:
        self._bridge.interrupt()
        return state


class CheckpointFinalize(Finalize):
    """Drains or gives up the saves in flight, and restores the registered state to the newest published step.

    With ``on_fault="drain"`` a save that was completely staged on all ranks is published in spite of the fault, even if
    trainers were killed; at most `drain_timeout` is spent on that. With ``"abort"`` saves that are not published yet
    are given up at once, without waiting. Afterwards the queue is empty, all slots are free but those of snapshots, no
    finalize function of a save that was given up has run, and none of these saves will ever be published.

    With `CheckpointInitialize` it restores nothing, nor does a spare: when that replaces a rank in the next iteration,
    all ranks call `Checkpointer.restore`.

    Main thread, makes no collective. Raises what `Checkpointer.restore` raises, and then this rank leaves the job.
    """

    def __init__(
        self,
        checkpointer: Recoverable,
        on_fault: Literal["drain", "abort"] = "drain",
        drain_timeout: timedelta | float = _DRAIN,
    ) -> None:
        if on_fault not in ("drain", "abort"):
            raise ValueError(f"on_fault must be 'drain' or 'abort', not {on_fault!r}")
        longest = duration("drain_timeout", drain_timeout, or_zero=True)
        if on_fault == "abort" and longest != _DRAIN:
            raise ValueError("drain_timeout has a meaning only with on_fault='drain': with 'abort' nothing is drained")
        self._bridge = checkpointer.bridge
        self._drain_timeout = longest if on_fault == "drain" else None

    def __call__(self, state: FrozenState) -> FrozenState:
        begin = time.monotonic()
        fault_time = self._bridge.interrupted_at
        self._bridge.recover_from_fault(self._drain_timeout, state.active_rank)
        if is_observed():
            now = time.time()
            seconds = time.monotonic() - begin if fault_time is None else max(0.0, now - fault_time)
            rank = next((rank for rank in (state.active_rank, state.rank) if rank is not None), -1)
            step = self._bridge.resume_step
            emit(Restarted(now, rank, state.iteration + 1, seconds, _cause(state), fault_time, step, *_why(state)))
        _log.info(
            "checkpoints are ready for iteration %d after %.0f ms; restored %s",
            state.iteration + 1,
            1000 * (time.monotonic() - begin),
            self._bridge.last_restore or "nothing",
        )
        return state


class CheckpointInitialize(Initialize):
    """Restores the registered state at the start of an iteration after a fault, to a step that all ranks agree on.

    For registered state and snapshots: the newest step that is whole in memory or published. `CheckpointFinalize` then
    restores nothing. Active ranks agree through the store of the iteration, within `timeout`; a new process must have
    registered its state by then, too. A spare does nothing.

    Main thread. What it raises is a fault of the iteration, like any other.
    """

    def __init__(self, checkpointer: Checkpointer, timeout: timedelta | float = timedelta(minutes=2)) -> None:
        self._bridge = checkpointer.bridge
        self._timeout = duration("timeout", timeout)
        self._bridge.leave_restoring_to_next_iteration()

    def __call__(self, state: FrozenState) -> FrozenState:
        rank, world_size = state.active_rank, state.active_world_size
        if state.iteration == 0 or rank is None or world_size is None:
            return state
        store = None if world_size == 1 else _iteration_store(state.iteration, self._timeout)
        ranks = StoreRanks(rank, world_size, store, self._timeout.total_seconds())
        self._bridge.restore_registered(ranks, state.iteration)
        return state


def _iteration_store(iteration: int, timeout: timedelta) -> Any:
    """Connect to the store that the wrapper serves for the process groups of this iteration."""
    import torch.distributed as dist

    arguments = {
        "host_name": os.environ["MASTER_ADDR"],
        "port": int(os.environ["MASTER_PORT"]),
        "is_master": False,
        "wait_for_workers": False,
    }
    store = connect_store(dist.TCPStore, timeout, arguments)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"ckpt/restore/{iteration}", store)  # type: ignore[attr-defined]


def _cause(state: FrozenState) -> str:
    """Return the first fault that caused the restart, as one line."""
    if state.cause is not None:
        return shortened(f"rank {state.cause.rank}: {state.cause.text}")
    if state.interruptions:  # processes join, which is no fault
        return shortened(f"{state.interruptions[0].interruption.name}: {state.interruptions[0].summary}")
    return "" if state.fn_exception is None else type(state.fn_exception).__name__


def _why(state: FrozenState) -> tuple[str, str, tuple[str, ...]]:
    """Return the class of the fault, what to do about it, and further evidence."""
    cause = state.cause
    return ("unknown", "", ()) if cause is None else (cause.fault_class.value, cause.advice, cause.evidence)
