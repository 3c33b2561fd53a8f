"""How a cycle ends on a node, and how a launcher ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CycleEnd", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """Exit code, a sentence for the log, and the failures of this node's workers (torch's, by rank) if they matter.

    `ends_job`: no node goes on, so nobody is to be let into the rendezvous any more.
    """

    code: int
    reason: str
    failures: Mapping[int, Any] = field(default_factory=dict)
    ends_job: bool = False


@dataclass(frozen=True)
class CycleEnd:
    """Why a cycle is over on this node. With an outcome the launcher ends; else it is still to be decided.

    `is_ours`: the cause is on this node, the others have to be told. `failures` as in `Outcome`.
    """

    reason: str
    outcome: Outcome | None = None
    failures: Mapping[int, Any] = field(default_factory=dict)
    is_ours: bool = False
