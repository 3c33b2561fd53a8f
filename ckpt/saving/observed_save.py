"""The events of one save on one rank, and its line in the log: one start and exactly one end, whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckpt.errors import CheckpointError
from ckpt.events import SaveAbandoned, SavePublished, SaveStaged, SaveStarted
from ckpt.observing import emit, is_observed, shortened
from ckpt.saving.task import COORDINATOR, SharePublished
from ckpt.storage.outcomes import Abandoned, Published, SaveOutcome

_log = logging.getLogger("ckpt")


class ObservedSave:
    """Emits the events of a save that was called `waited_s` seconds ago. For the thread that trains.

    Adds itself to `all_observed` first, so that the end of a save that is interrupted is not forgotten. An exception
    may be thrown into every method from another thread: the end is emitted when one is called again.
    """

    def __init__(self, step: int, rank: int, waited_s: float, all_observed: list[ObservedSave]) -> None:
        self.outcome: SaveOutcome = None
        """What was found in storage after a fault: how the save ends if its writer does not say more."""
        self._step = step
        self._rank = rank
        self._begin = time.time() - waited_s
        self._begin_monotonic = time.monotonic() - waited_s
        self._staged_at = self._begin
        self._stall_s = 0.0
        self._nbytes = 0
        self._all_bytes: Callable[[], int] = lambda: 0
        self._end: SavePublished | SaveAbandoned | None = None  # the one that is emitted
        self._ended = False
        all_observed.append(self)
        if is_observed():
            emit(SaveStarted(self._begin, rank, step))

    @property
    def ended(self) -> bool:
        """Whether the end was emitted."""
        return self._ended

    def staged(self, times: dict[str, float], nbytes: Callable[[], int], all_bytes: Callable[[], int]) -> None:
        """The share of this rank is staged; the step has `all_bytes`, before compression."""
        self._all_bytes = all_bytes
        self._stall_s = times["stall_s"]
        self._staged_at = times["begin"] + self._stall_s
        if is_observed():
            self._nbytes = nbytes()
            stall = times["wait_s"], times["stage_s"], times["stall_s"]
            emit(SaveStaged(self._staged_at, self._rank, self._step, self._nbytes, *stall))

    def published(self, share: SharePublished | None = None, *, durable: bool = True) -> None:
        """The step is published; the writer reported `share`."""
        if self._ended:
            return
        at = time.time() if share is None else share.at
        nbytes, queue_s, write_s, sync_s, rate = self._nbytes, 0.0, 0.0, 0.0, 0.0
        if share is not None:
            nbytes, write_s, sync_s = share.nbytes, share.write_s, share.sync_s
            queue_s = max(0.0, share.write_begin - self._staged_at)
            rate = share.nbytes / max(write_s + sync_s, 1e-6)
        seconds = max(at - self._begin, self._stall_s + write_s + sync_s)  # the clock may have been set meanwhile
        seconds = min(seconds, time.monotonic() - self._begin_monotonic)
        self._emit(SavePublished(at, self._rank, self._step, nbytes, seconds, queue_s, write_s, sync_s, rate, durable))
        if self._rank == COORDINATOR and _log.isEnabledFor(logging.INFO):  # a line for the job, not for each rank
            told = self._step, self._all_bytes(), seconds, self._stall_s
            _log.info("step %d is published: %d bytes in %.3g s, of which training waited %.3g s", *told)

    def abandoned(self, by_rank: int | None, kind: str, cause: str) -> None:
        """The save was given up."""
        if not self._ended:
            self._emit(SaveAbandoned(time.time(), self._rank, self._step, by_rank, kind, shortened(cause)))

    def failed(self, rank: int, error: BaseException) -> None:
        """The save was given up, as this was raised on this rank."""
        by_rank = error.rank if isinstance(error, CheckpointError) and error.rank is not None else rank
        self.abandoned(by_rank, type(error).__name__, str(error))

    def left(self, kind: str, cause: str) -> None:
        """This rank looks no more: the save ends as `outcome` says, or is reported as abandoned."""
        match self.outcome:
            case Published():
                self.published()
            case Abandoned(reason):
                self.abandoned(reason.rank, reason.kind, reason.message)
            case None:
                self.abandoned(self._rank, kind, cause)

    def _emit(self, end: SavePublished | SaveAbandoned) -> None:
        self._end = self._end or end
        if is_observed():
            emit(self._end)  # if this is interrupted the same event is emitted again; see `Observation`
        self._ended = True
