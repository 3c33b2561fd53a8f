"""What the user says about one level of the tree."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from inprocess.rank_assignment.base import check_count
from inprocess.state import FrozenState

__all__ = ["Layer", "LayerFlag"]


class LayerFlag(enum.Flag):
    """How the groups of a layer deal with a lost active rank.

    RESERVE: a spare of the group may take its place. BACKFILL: the largest active ranks of the group may.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass(frozen=True)
class Layer:
    """One level: ranks with the same key, below the same parent, are a group.

    A group with fewer than `min_ranks` healthy ranks loses all of them at the next restart. At most `max_ranks` (None:
    any number) of a group are active. `key_or_fn` is the key, or a function that returns it for a rank's `FrozenState`.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[FrozenState], object] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_count("min_ranks", self.min_ranks)
        if self.max_ranks is not None:
            check_count("max_ranks", self.max_ranks)
            if self.min_ranks > self.max_ranks:
                raise ValueError(f"min_ranks ({self.min_ranks}) must not be larger than max_ranks ({self.max_ranks})")
        if not isinstance(self.key_or_fn, str) and not callable(self.key_or_fn):
            raise TypeError(f"key_or_fn must be a str or a function, not {type(self.key_or_fn).__name__}")
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag must be a LayerFlag, not {type(self.flag).__name__}: {self.flag!r}")

    def has(self, flag: LayerFlag) -> bool:
        """Return whether the layer has `flag`."""
        return self.flag is not None and flag in self.flag

    def key_of(self, state: FrozenState) -> str:
        """Return the key of the rank that `state` belongs to."""
        return self.key_or_fn if isinstance(self.key_or_fn, str) else str(self.key_or_fn(state))
