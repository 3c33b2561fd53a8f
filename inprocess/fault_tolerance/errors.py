"""The client's one error, how other errors are converted to it, and the exception hook."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from inprocess.fault_tolerance.link import LinkError
from inprocess.fault_tolerance.recorder import Forked
from inprocess.fault_tolerance.timeouts_calc import TimeoutsCalcError
from inprocess.sections.board import BoardError

__all__ = ["RankMonitorClientError", "errors", "exit_after", "not_initialized", "raise_error"]

_FAULTS = (TimeoutsCalcError, LinkError, BoardError, OSError, EOFError, ValueError, RuntimeError)


class RankMonitorClientError(Exception):
    """A call to the client is invalid, or there is no monitor; the text has the cause."""


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Convert expected errors to a RankMonitorClientError whose text begins with `what`."""
    try:
        yield
    except RankMonitorClientError:
        raise
    except Forked as error:
        raise_error(error)
    except _FAULTS as error:
        raise RankMonitorClientError(f"{what}: {str(error) or type(error).__name__}") from error


def raise_error(error: Exception) -> NoReturn:
    """Raise the error of an event as a RankMonitorClientError."""
    if isinstance(error, Forked):
        text = "this process was forked from the monitored one; only the monitored process may use the client"
        raise RankMonitorClientError(text) from error
    raise RankMonitorClientError(str(error)) from error


def not_initialized() -> NoReturn:
    """Raise the error of a call before initialization."""
    raise RankMonitorClientError("monitoring is not initialized; call init_workload_monitoring first")


def exit_after(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Exception hook: end the process at once, without waiting for threads that a failed program never ends."""
    text = "".join(traceback.format_exception(kind, error, tb))
    logging.getLogger(__name__).critical("this rank fails:\n%s", text)
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()
    os._exit(1)
