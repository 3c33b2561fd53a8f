"""`ckpt.observe`: bring the events of all Checkpointers of this process to sinks.

    trainer's thread, others ── emit(event) ──▶ bounded queue ──▶ thread ──▶ sink(event)
                                   │                  (one of each for every sink)
                                   └──▶ no sink: one check

The list of sinks belongs to the whole process, like the handlers of `logging`, since a program observes what libraries
of others save. Nothing here waits but `Observation.close`.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from ckpt.events import Closed, Event, EventsDropped, SaveAbandoned, SavePublished
from inprocess.ipc.threads import JoinableThread
from inprocess.ipc.uncopied import Uncopied

__all__ = ["Observation", "Sink", "ObservedWork", "emit", "is_failing", "is_observed", "observe", "shortened"]

_log = logging.getLogger("ckpt")

Sink = Callable[[Event], object]
"""Gets one event after the other, in a thread of its own. May have a method ``close()``, which is called at the end."""

_CLOSE_S = 5.0
_REMEMBERED = 64  # ends of saves; more than can be in flight
_CAUSE_CHARACTERS = 1000

_observations: list[Observation] = []  # changed by atomic operations only
_open_work: weakref.WeakSet[ObservedWork] = weakref.WeakSet()
_last_work: list[ObservedWork | None] = [None]  # of the Checkpointer that ended last, of those that had something to do


def observe(sink: Sink, *, limit: int = 10_000) -> Observation:
    """Call `sink(event)` with every event of this process from now on, in a thread of its own.

    For all Checkpointers, also those made before. There may be any number of sinks. `sink` is a function, or an object
    with a method ``close()``, such as those in `ckpt.sinks`. It is called in a copy of the context (`contextvars`) in
    which the event happened.

    Neither a slow sink nor one that raises disturbs training or another sink: at most `limit` events wait for it, those
    that come then are dropped and counted (see `EventsDropped`); the first that is dropped, and the first exception,
    are logged. A process forked from this one has no sinks. What waits when the interpreter exits is still delivered,
    for at most 5 s.
    """
    return Observation(sink, limit)


class Observation(Uncopied):
    """One sink, from `observe` until it is closed. A context manager. For any thread."""

    def __init__(self, sink: Sink, limit: int) -> None:
        self._sink = sink
        self._limit = limit
        self._earlier_work = _last_work[0]
        self._pid = os.getpid()
        self._dropped = 0
        self._failed = 0
        self._closing = False
        self._ends: deque[Event] = deque(maxlen=_REMEMBERED)
        # Its `put` is one step: an exception that another thread throws into this one leaves no lock held.
        self._queue: queue.SimpleQueue[tuple[contextvars.Context, Event] | None] = queue.SimpleQueue()
        self._thread = JoinableThread(self._run, "ckpt-sink")
        self._thread.start()
        atexit.register(self._at_exit)
        _observations.append(self)

    @property
    def dropped(self) -> int:
        """How many events the sink did not get, because it was too slow."""
        return self._dropped

    @property
    def failed(self) -> int:
        """How many events the sink raised an exception for."""
        return self._failed

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Deliver what waits, close the sink and end its thread; after `timeout_s` leave it behind. Idempotent.

        The sink itself may call it, and does not wait then.
        """
        if self._closing or not self._is_ours():
            return
        self._closing = True
        if self in _observations:
            _observations.remove(self)
        atexit.unregister(self._at_exit)
        work = _last_work[0]
        if work is not None and work is not self._earlier_work and work.is_done and not _open_work and not is_failing():
            self._put(Closed(time.time(), work.rank))
        self._queue.put(None)
        if threading.current_thread() is self._thread:  # called by the sink: the rest is delivered when it returns
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "the sink %r did not take its last %d events in %g s", self._sink, self._queue.qsize(), timeout_s
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # the exception that ends the process was handled by Python
            _last_work[0] = None
        self.close()

    def _is_ours(self) -> bool:
        return self._pid == os.getpid()

    def _put(self, event: Event) -> None:
        if self._queue.qsize() < self._limit:
            self._queue.put((contextvars.copy_context(), event))
            return
        self._dropped += 1
        if self._dropped == 1:
            _log.warning(
                "the sink %r is too slow: %d events wait for it, and what comes now is dropped", self._sink, self._limit
            )

    def _run(self) -> None:
        told = 0
        while (item := self._queue.get()) is not None:
            context, event = item
            if isinstance(event, SavePublished | SaveAbandoned):
                if any(event is end for end in self._ends):
                    continue  # emitted again, as an exception was thrown into the trainer then
                self._ends.append(event)
            if (dropped := self._dropped) != told:
                told = dropped
                self._try(partial(self._sink, EventsDropped(time.time(), event.rank, dropped)))
            self._try(partial(context.run, self._sink, event))
        close = getattr(self._sink, "close", None)
        if close is not None:
            self._try(close)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # also what ends threads: SystemExit, or a CancelledError of asyncio
            self._failed += 1
            if self._failed == 1:
                _log.warning("the sink %r failed; what it raises later is not logged", self._sink, exc_info=error)


class ObservedWork:
    """The work of one Checkpointer that writes, open until `end`. `Closed` says that that of a process is done."""

    def __init__(self) -> None:
        self.rank = 0
        self.is_done = False
        _open_work.add(self)

    def end(self, rank: int | None, has_failed: bool) -> None:
        """Note that the Checkpointer has ended; `rank` is None if it had nothing to do."""
        if has_failed or rank is not None:
            self.rank, self.is_done = rank or 0, not has_failed
            _last_work[0] = self
        _open_work.discard(self)


def is_failing() -> bool:
    """Return whether an exception is being handled, as in `finally: checkpointer.close()`; but for a plain exit."""
    error = sys.exception()
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def is_observed() -> bool:
    """Return whether this process has a sink."""
    return bool(_observations) and any(each._is_ours() for each in _observations)


def emit(event: Event) -> None:
    """Give an event to all sinks, without waiting. From any thread."""
    for observation in tuple(_observations):
        if observation._is_ours():
            observation._put(event)


def shortened(text: str) -> str:
    """Return the message of an error as it stands in events."""
    return text if len(text) <= _CAUSE_CHARACTERS else text[: _CAUSE_CHARACTERS - 3] + "..."
