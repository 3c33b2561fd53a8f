"""Hooks that report the restarts inside a process to an outer launcher, through the log.

One line per phase, on one rank only, at INFO. A hook of your own that writes another is a `NestedRestarterCallback`.

    [NestedRestarter] name=[InProcess] state=<word> [stage=<word>]

    NestedRestarterHandlingCompleted   initialize   state=initialize at first, then state=handling stage=completed
    NestedRestarterHandlingStarting    abort        state=handling stage=starting
    NestedRestarterFinalized           completion   state=finalized
    NestedRestarterAborted             terminate    state=aborted
"""

from __future__ import annotations

import logging
from typing import Any

from inprocess.abort import Abort
from inprocess.completion import Completion
from inprocess.initialize import Initialize
from inprocess.state import FrozenState
from inprocess.terminate import Terminate

__all__ = [
    "NestedRestarterAborted",
    "NestedRestarterCallback",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
    "NestedRestarterLogger",
]

_log = logging.getLogger(__name__)


class NestedRestarterLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that has the methods of the one that the hooks of nvidia_resiliency_ext write to.

    Its lines go to `restarter_logger`, by default that of this module. `set_connected_rank` has no effect on them.
    """

    def __init__(self) -> None:
        super().__init__(_log, {})
        self.restarter_logger = _log
        self.rank: int | None = None

    def set_connected_rank(self, rank: int | None) -> None:
        """Remember the rank."""
        self.rank = rank

    def log_for_restarter(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Write a line at INFO."""
        self.restarter_logger.info(message, *args, **kwargs)

    def log_restarter_event(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Write a line at INFO, too."""
        self.log_for_restarter(message, *args, **kwargs)


class NestedRestarterCallback:
    """Writes one line with the given words to `logger`, on the initial rank `special_rank` only.

    `logger` is a `NestedRestarterLogger` or one of logging; None for that of this module.
    """

    def __init__(
        self,
        restarter_state: str,
        restarter_stage: str | None = None,
        logger: logging.Logger | NestedRestarterLogger | None = None,
        special_rank: int = 0,
    ) -> None:
        self.restarter_state = restarter_state
        self.restarter_stage = restarter_stage
        self.logger = NestedRestarterLogger() if logger is None else logger
        self.special_rank = special_rank

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.initial_rank == self.special_rank:
            words = ["[NestedRestarter]", "name=[InProcess]", f"state={self.restarter_state}"]
            if self.restarter_stage is not None:
                words.append(f"stage={self.restarter_stage}")
            write = getattr(self.logger, "log_for_restarter", self.logger.info)
            write(" ".join(words))
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """Reports that a restart is over; the first time, that the job begins."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", None, None, special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        try:
            return super().__call__(state)
        finally:
            self.restarter_state, self.restarter_stage = "handling", "completed"


class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """Reports that a restart begins."""

    def __init__(
        self,
        restarter_state: str = "handling",
        restarter_stage: str | None = "starting",
        logger: logging.Logger | NestedRestarterLogger | None = None,
        special_rank: int = 0,
    ) -> None:
        super().__init__(restarter_state, restarter_stage, logger, special_rank)


class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """Reports that the job has succeeded."""

    def __init__(
        self,
        restarter_state: str = "finalized",
        restarter_stage: str | None = None,
        logger: logging.Logger | NestedRestarterLogger | None = None,
        special_rank: int = 0,
    ) -> None:
        super().__init__(restarter_state, restarter_stage, logger, special_rank)


class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """Reports that this rank leaves."""

    def __init__(
        self,
        restarter_state: str = "aborted",
        restarter_stage: str | None = None,
        logger: logging.Logger | NestedRestarterLogger | None = None,
        special_rank: int = 0,
    ) -> None:
        super().__init__(restarter_state, restarter_stage, logger, special_rank)
