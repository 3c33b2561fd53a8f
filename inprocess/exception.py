"""The errors of the restart wrapper.

`RestartError` and its family are ordinary failures of one rank. The two that derive from `BaseException` are not errors
but decisions, and must pass through user code: `RestartAbort` ends the job, `RankShouldRestart` unwinds one iteration.
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
    "RestartAbort",
    "RestartError",
    "StaleViewError",
    "StoreError",
    "StoreLostError",
    "StoreTimeoutError",
    "TimeoutError",
]

_log = logging.getLogger(__name__)
_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep


class RestartError(Exception):
    """Base of the errors raised by `inprocess`."""


class HealthCheckError(RestartError):
    """This rank is not fit to go on."""


class InternalError(RestartError):
    """The restart protocol did not do what it promises; the rank leaves."""


class TimeoutError(RestartError):
    """Something bounded did not end in its time."""


class StoreError(RestartError):
    """The coordination store did not do what it was asked."""


class StoreLostError(StoreError):
    """The server of the coordination store was not reached for `heartbeat_timeout`: this rank must not go on.

    Either the server's node is lost, then all ranks end so and the job is to be started again; or this one is cut off
    from it, and the others go on without it.
    """


class StaleViewError(RestartError):
    """The others have gone on without this process, which was stopped or cut off: it must end and touch nothing."""


class StoreTimeoutError(StoreError, builtins.TimeoutError):
    """What a store request waited for did not happen in its time; the store itself is well."""


class RankDiscarded(RestartError):
    """This rank takes no part in the next iteration."""


class FaultCounterExceeded(RestartError):
    """This rank has failed more often than it may."""


class BarrierError(RestartError):
    """Base of what goes wrong at a barrier."""


class BarrierTimeout(BarrierError):
    """Some ranks did not arrive in time; the text names them where they are known."""


class BarrierOverflow(BarrierError):
    """More ranks arrived than were expected."""


class RestartAbort(BaseException):
    """Raised by a hook: this rank leaves for good. Raised on every rank it ends the job cleanly."""


class RankShouldRestart(BaseException):
    """Thrown into the main thread to unwind the wrapped function; user code must let it pass.

    With the logger ``inprocess`` at DEBUG, one that disappears in somebody's ``except`` says where.
    """

    _caught_by_us = False

    def __del__(self) -> None:
        if self._caught_by_us or not _log.isEnabledFor(logging.DEBUG):
            return
        place = _where_swallowed(self.__traceback__)
        if place is not None:
            _log.debug("RankShouldRestart was swallowed near %s; let BaseException pass there", place)


def _where_swallowed(tb: TracebackType | None) -> str | None:
    """Return "file:line in function" of the outermost frame the exception reached; None if that is ours."""
    if tb is None:
        return None
    frame = traceback.extract_tb(tb)[0]
    if frame.filename.startswith(_OWN_FILES):
        return None
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
