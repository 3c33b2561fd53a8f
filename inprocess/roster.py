"""The roster: what all ranks know of the end of an iteration."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from inprocess.repetition import FaultHistory

__all__ = ["Roster"]


@dataclass(frozen=True)
class Roster:
    """The end of an iteration: the dense ranks, in that iteration, and the initial ranks of those who left.

    `joined` are the initial ranks of newcomers, in the order in which they are numbered behind all others. If there are
    any, `initial_ranks` are those of all, by dense rank; -1 for one that left and had not published its own. `faults`
    is the history of the job's faults.
    """

    terminated_ranks: frozenset[int]
    departed: frozenset[int]
    joined: tuple[int, ...] = ()
    initial_ranks: tuple[int, ...] = ()
    faults: FaultHistory = field(default_factory=FaultHistory, compare=False)

    @classmethod
    def from_text(cls, text: bytes) -> Roster:
        """Read what the process that closed the roster has written."""
        document = json.loads(text)
        return cls(
            frozenset(document["terminated_ranks"]),
            frozenset(document["departed"]),
            tuple(document["joined"]),
            tuple(document["initial_ranks"]),
            FaultHistory.from_json(document["faults"]),
        )
