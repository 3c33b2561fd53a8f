"""The errors of the restart wrapper.

`RestartError` and its subclasses are ordinary failures of one rank. The two that derive from `BaseException` are not
errors but decisions, and must pass through user code: `RestartAbort` ends the job, `RankShouldRestart` unwinds one
iteration.
"""

from __future__ import annotations

import builtins
import logging
import os
import traceback
from types import TracebackType

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "FaultCounterExceeded",
    "HealthCheckError",
    "InternalError",
    "RankDiscarded",
    "RankShouldRestart",
    "RepeatedFault",
    "RestartAbort",
    "RestartError",
    "StaleViewError",
    "StoreError",
    "StoreLostError",
    "StoreTimeoutError",
    "TimeoutError",
    "is_restart",
]

_log = logging.getLogger(__name__)
_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep


class RestartError(Exception):
    """Base of the errors raised by `inprocess`."""


class HealthCheckError(RestartError):
    """This rank is not fit to go on."""


class InternalError(RestartError):
    """A defect of the restart protocol; the rank leaves."""


class TimeoutError(RestartError):
    """A call did not end within its time limit."""


class StoreError(RestartError):
    """A request to the coordination store failed."""


class StoreLostError(StoreError):
    """The coordination store was unreachable, or refused changes, for `heartbeat_timeout`: this rank must not go on.

    Either the node of the server is lost: then all ranks end with this error, and the job must be started again. Or
    this node is cut off from it, and the others go on without it.
    """


class StaleViewError(RestartError):
    """The others went on without this process, which was stopped or cut off: it must end and change nothing."""


class StoreTimeoutError(StoreError, builtins.TimeoutError):
    """What a request to the store waited for did not happen in time; the store itself works."""


class RankDiscarded(RestartError):
    """This rank takes no part in the next iteration."""


class RepeatedFault(RestartError):
    """Faults on other ranks came back too often, without progress between them: the job ends."""


class FaultCounterExceeded(RestartError):
    """This rank has failed more often than it may."""


class BarrierError(RestartError):
    """Base of the errors of barriers."""


class BarrierTimeout(BarrierError):
    """Some ranks did not arrive in time; the message names them if they are known."""


class BarrierOverflow(BarrierError):
    """More ranks arrived than were expected."""


class RestartAbort(BaseException):
    """Raised by a hook: this rank leaves for good. If every rank raises it, the job ends cleanly."""


class RankShouldRestart(BaseException):
    """Thrown into the main thread to unwind the wrapped function; user code must let it pass.

    With the logger ``inprocess`` at DEBUG, one that an ``except`` has swallowed logs where.
    """

    _caught_by_us = False

    def __del__(self) -> None:
        if self._caught_by_us or not _log.isEnabledFor(logging.DEBUG):
            return
        place = _where_swallowed(self.__traceback__)
        if place is not None:
            _log.debug("RankShouldRestart was swallowed near %s; let BaseException pass there", place)


def is_restart(error: BaseException) -> bool:
    """Return whether `error` is RankShouldRestart, or a group of nothing else, as task groups make it.

    Those that it holds have reached the wrapper: none of them was swallowed.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_restart, error.exceptions))
    if isinstance(error, RankShouldRestart):
        error._caught_by_us = True
        return True
    return False


def _where_swallowed(tb: TracebackType | None) -> str | None:
    """Return "file:line in function" of the outermost frame the exception reached; None if it is in this package."""
    if tb is None:
        return None
    frame = traceback.extract_tb(tb)[0]
    if frame.filename.startswith(_OWN_FILES):
        return None
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
