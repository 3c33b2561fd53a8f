"""Hooks that tell an outer launcher, through the log, what the restarts inside a process are doing.

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
    """`special_rank` is the initial rank that writes the lines."""

    def __init__(self, special_rank: int = 0) -> None:
        self.special_rank = special_rank

    def _report(self, frozen: FrozenState, state: str, stage: str | None = None) -> FrozenState:
        if frozen.initial_rank == self.special_rank:
            words = ["[NestedRestarter]", "name=[InProcess]", f"state={state}"]
            _log.info(" ".join(words if stage is None else [*words, f"stage={stage}"]))
        return frozen


class NestedRestarterHandlingCompleted(_OnOneRank, Initialize):
    """A restart is over; the first time: the job begins."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__(special_rank)
        self._began = False

    def __call__(self, state: FrozenState) -> FrozenState:
        if self._began:
            return self._report(state, "handling", "completed")
        self._began = True
        return self._report(state, "initialize")


class NestedRestarterHandlingStarting(_OnOneRank, Abort):
    """A restart begins."""

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._report(state, "handling", "starting")


class NestedRestarterFinalized(_OnOneRank, Completion):
    """The job has succeeded."""

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._report(state, "finalized")


class NestedRestarterAborted(_OnOneRank, Terminate):
    """This rank leaves."""

    def __call__(self, state: FrozenState) -> FrozenState:
        return self._report(state, "aborted")
