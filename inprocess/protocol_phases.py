"""The phases of the restart protocol, and which may follow on which; see `protocol`."""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """Where a rank is in the protocol."""

    ASSIGN = "assign ranks"
    BEGIN = "begin the iteration"
    INITIALIZE = "initialize"
    RUN = "run the function"
    RESERVE = "wait as a spare"
    COMPLETE = "wait for the others to complete"
    RELEASE = "release what the iteration holds"
    FINALIZE = "finalize"
    HEALTH = "check health"
    BARRIER = "wait for the others to end the iteration"
    END = "end the iteration"
    LEAVE = "leave"
    DONE = "done"

    def leads_to(self, phase: Phase) -> bool:
        """Return whether `phase` may come next."""
        return phase in _NEXT[self]


_FAULT = {Phase.RELEASE, Phase.LEAVE}
_NEXT: dict[Phase, set[Phase]] = {
    Phase.ASSIGN: {Phase.BEGIN, Phase.LEAVE},
    Phase.BEGIN: {Phase.INITIALIZE} | _FAULT,
    Phase.INITIALIZE: {Phase.RUN, Phase.RESERVE} | _FAULT,
    Phase.RUN: {Phase.COMPLETE} | _FAULT,
    Phase.RESERVE: {Phase.COMPLETE} | _FAULT,
    Phase.COMPLETE: {Phase.DONE} | _FAULT,
    Phase.RELEASE: {Phase.FINALIZE, Phase.LEAVE},
    Phase.FINALIZE: {Phase.HEALTH, Phase.LEAVE},
    Phase.HEALTH: {Phase.BARRIER, Phase.LEAVE},
    Phase.BARRIER: {Phase.END, Phase.LEAVE},
    Phase.END: {Phase.ASSIGN, Phase.LEAVE},
    Phase.LEAVE: {Phase.DONE},
    Phase.DONE: set(),
}
