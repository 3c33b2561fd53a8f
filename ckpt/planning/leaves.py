"""Marks that a user puts into a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PerRank"]


@dataclass(slots=True)
class PerRank:
    """A part of the state that belongs to this rank alone: the state of its random number generators, its position in
    the data.

    `value` is anything a state may hold. Each rank saves its own, and gets its own back. A rank that the checkpoint
    does not know, because it was written by fewer ranks, keeps what it has. `value` itself is replaced by a restore if
    it is not a container.
    """

    value: Any
