"""Which ranks have written their parts of a save."""

from __future__ import annotations

from ckpt.storage.interface import Pending
from ckpt.storage.names import RANKS_PER_DIRECTORY, parts_directory


class PartsWatch:
    """Which ranks have completed their parts, for a process that waits for all of them.

    Each look lists the directories that were not complete at the one before.
    """

    def __init__(self, pending: Pending, world_size: int) -> None:
        self._pending = pending
        self._missing: dict[str, set[int]] = {}
        for first in range(0, world_size, RANKS_PER_DIRECTORY):
            ranks = range(first, min(first + RANKS_PER_DIRECTORY, world_size))
            self._missing[parts_directory(first)] = set(ranks)

    @property
    def missing(self) -> set[int]:
        """The ranks whose parts were missing at the last look."""
        return set().union(*self._missing.values())

    @property
    def directories_left(self) -> int:
        """How many directories the next look lists."""
        return len(self._missing)

    def look(self) -> bool:
        """Return whether all parts are there."""
        for directory, ranks in list(self._missing.items()):
            ranks.difference_update(self._pending.ranks_in(directory))
            if not ranks:
                del self._missing[directory]
        return not self._missing
