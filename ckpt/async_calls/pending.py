"""A call that has not left the queue, and what becomes of it.

An exception may be thrown into every method from another thread (a restart does that): what was not done then is done
when the method is called again.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from ckpt.async_calls.agreement import Failure, own_rank
from ckpt.async_calls.request import AsyncRequest
from ckpt.errors import CheckpointError, RemoteTraceback, WriterError

__all__ = ["PendingCall"]


class PendingCall:
    """Settled once its outcome is known here. `error` is what to raise if it failed, `abandoned` having been called."""

    def __init__(self, index: int, request: AsyncRequest) -> None:
        self.index = index
        self.request = request
        self.settled = request.async_fn is None
        self.error: CheckpointError | None = None
        self._event_error: Exception | None = None
        self._finalize_fns = deque(request.finalize_fns)

    def take_event(self, event: dict[str, Any]) -> None:
        """Hand it to `on_event`; if that raises, the call fails when it is over."""
        on_event: Callable[[dict[str, Any]], None] | None = getattr(self.request.async_fn, "on_event", None)
        if on_event is None:
            return
        try:
            on_event(event)
        except Exception as error:
            self._event_error = self._event_error or error

    def take_outcome(self, error: CheckpointError | None) -> None:
        if error is None and self._event_error is not None:
            error = WriterError(
                f"on_event of background call {self.index} raised {self._event_error!r}", rank=own_rank()
            )
            error.__cause__ = self._event_error
        if error is not None:
            self.abandon(error)
        self.settled = True

    def finalize(self) -> Exception | None:
        """Run the finalize functions, whatever they raise; returns the first exception. None of them runs twice."""
        first: Exception | None = None
        while self._finalize_fns:
            try:
                self._finalize_fns.popleft()()
            except Exception as error:
                first = first or error
        return first

    def abandon(self, error: CheckpointError) -> None:
        """Fail, unless that has happened before: tell the call and let it choose the error to raise.

        It may choose None: what it had to do is done all the same, and the call is not a failure.
        """
        if self.error is not None:
            return
        chosen: CheckpointError | None = error
        abandoned: Callable[[CheckpointError], CheckpointError | None] | None
        abandoned = getattr(self.request.async_fn, "abandoned", None)
        if abandoned is not None:
            try:
                chosen = abandoned(error)
            except Exception as problem:
                error.add_note(f"besides, abandoned() raised {problem!r}")
        if chosen is not None and chosen is not error and chosen.__cause__ is None:
            chosen.__cause__ = error.__cause__ or error
        self.error = chosen

    def own_failure(self) -> Failure | None:
        """For the other ranks."""
        if self.error is None:
            return None
        return Failure(f"{type(self.error).__name__}: {self.error}", "".join(traceback.format_exception(self.error)))

    def take_failures(self, failures: dict[int, Failure]) -> None:
        """The call failed on these ranks, which may or may not include this one."""
        ranks = sorted(failures)
        if self.error is None:
            first = failures[ranks[0]]
            others = f" (of ranks {ranks})" if len(ranks) > 1 else ""
            message = f"background call {self.index} failed on rank {ranks[0]}{others}: {first.message}"
            error = WriterError(message, rank=ranks[0])
            error.__cause__ = RemoteTraceback(first.traceback)
            self.abandon(error)
            self.error = self.error or error  # it failed elsewhere, whatever was done here
        elif len(ranks) > 1:
            self.error.add_note(f"the call failed on ranks {ranks}")
