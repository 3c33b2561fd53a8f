"""Hooks that report the restarts inside a process to an outer launcher, through the log.

One line per phase, on one rank only, at INFO:

    [NestedRestarter] name=[InProcess] state=<word> [stage=<word>]

    NestedRestarterHandlingCompleted   initialize   state=initialize at first, then state=handling stage=completed
    NestedRestarterHandlingStarting    abort        state=handling stage=starting
    NestedRestarterFinalized           completion   state=finalized
    NestedRestarterAborted             terminate    state=aborted
"""

from __future__ import annotations

import logging

from inprocess.abort import Abort
from inprocess.completion import Completion
from inprocess.initialize import Initialize
from inprocess.state import FrozenState
from inprocess.terminate import Terminate

__all__ = [
    "NestedRestarterAborted",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
]

_log = logging.getLogger(__name__)


class _OnOneRank:
    """Writes one line with the given words to `logger`, on the initial rank `special_rank` only."""

    def __init__(
        self, restarter_state: str, restarter_stage: str | None, logger: logging.Logger | None, special_rank: int
    ) -> None:
        self.restarter_state = restarter_state
        self.restarter_stage = restarter_stage
        self.logger = _log if logger is None else logger
        self.special_rank = special_rank

    def _report(self, frozen: FrozenState) -> FrozenState:
        if frozen.initial_rank == self.special_rank:
            words = ["[NestedRestarter]", "name=[InProcess]", f"state={self.restarter_state}"]
            if self.restarter_stage is not None:
                words.append(f"stage={self.restarter_stage}")
            self.logger.info(" ".join(words))
        return frozen


class NestedRestarterHandlingCompleted(_OnOneRank, Initialize):
    """Reports that a restart is over; the first time, that the job begins."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", None, None, special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        try:
            return self._report(state)
        finally:
            self.restarter_state, self.restarter_stage = "handling", "completed"


class NestedRestarterHandlingStarting(_OnOneRank, Abort):
    """Reports that a restart begins."""

    def __init__(
        self,
        restarter_state: str = "handling",
        restarter_stage: str | None = "starting",
        logger: logging.Logger | None = None,
        special_rank: int = 0,
    ) -> None:
        super().__init__(restarter_state, restarter_stage, logger, special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._report(state)


class NestedRestarterFinalized(_OnOneRank, Completion):
    """Reports that the job has succeeded."""

    def __init__(
        self,
        restarter_state: str = "finalized",
        restarter_stage: str | None = None,
        logger: logging.Logger | None = None,
        special_rank: int = 0,
    ) -> None:
        super().__init__(restarter_state, restarter_stage, logger, special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._report(state)


class NestedRestarterAborted(_OnOneRank, Terminate):
    """Reports that this rank leaves."""

    def __init__(
        self,
        restarter_state: str = "aborted",
        restarter_stage: str | None = None,
        logger: logging.Logger | None = None,
        special_rank: int = 0,
    ) -> None:
        super().__init__(restarter_state, restarter_stage, logger, special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._report(state)
