"""Which snapshots are complete on all ranks, known without a collective: ranks count themselves in the store of torch.

    held/<save>     how many ranks have this snapshot whole in memory

Each rank adds itself once to every snapshot, and looks only when it needs a slot. When rank 0 finds a snapshot complete
it deletes the counts before it: every rank has this one, and finds it by its count. So there is never more than one key
beside those of snapshots that are not complete. Save names are unique: several Checkpointers can use one store.

For one thread of the trainer.
"""

from __future__ import annotations

import logging
from typing import Any

from ckpt.ranks import Ranks

__all__ = ["Completion", "value_of"]

_log = logging.getLogger("ckpt")
_ABSENT = "-"  # neither a number nor the name of a save


class Completion:
    """The counts of this rank's snapshots. A store that fails knows of no snapshot that is complete."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._counted: list[str] = []  # whose counts may exist, oldest first; on rank 0

    def count(self, name: str) -> bool:
        """Count this rank as one that has a snapshot; return whether that is known to the store."""
        if self._ranks.world_size == 1:
            return True
        try:
            store = self._ranks.store()
            if store is None:
                return False
            store.add(f"held/{name}", 1)
        except (RuntimeError, ValueError) as error:
            _log.debug("the store of the process group failed: %s", error)
            return False
        if self._ranks.rank == 0:
            self._counted.append(name)
        return True

    def newest_of(self, names: list[str]) -> str | None:
        """Return the newest of these snapshots, oldest first, that is complete on all ranks; None if none is known.

        They were counted by this rank before.
        """
        if self._ranks.world_size == 1:
            return names[-1] if names else None
        try:
            store = self._ranks.store()
            return None if store is None else self._newest_in(store, names)
        except (RuntimeError, ValueError) as error:
            _log.debug("the store of the process group failed: %s", error)
            return None

    def is_begun(self, name: str) -> bool:
        """Return whether any rank has counted itself for this snapshot, as far as is known."""
        return self.progress(name)[0] > 0

    def withdraw(self, name: str) -> bool:
        """Take this rank's count back, so that a snapshot can never be complete; False if that is not known to be so.

        Other ranks may have found it complete just before: then it stays.
        """
        try:
            store = self._ranks.store()
            if store is None or value_of(store, f"held/{name}") is None:
                return False
            left = int(store.add(f"held/{name}", -1))
            if left == self._ranks.world_size - 1:
                store.add(f"held/{name}", 1)
            elif left < 0:  # rank 0 has deleted it just now
                store.delete_key(f"held/{name}")
            return 0 <= left < self._ranks.world_size - 1
        except (RuntimeError, ValueError) as error:
            _log.debug("the store of the process group failed: %s", error)
            return False

    def progress(self, name: str) -> tuple[int, int]:
        """Return on how many ranks a snapshot is complete, and how many there are; for messages."""
        try:
            return int(value_of(self._ranks.store(), f"held/{name}") or 0), self._ranks.world_size
        except (RuntimeError, ValueError, AttributeError):
            return 0, self._ranks.world_size

    def _newest_in(self, store: Any, names: list[str]) -> str | None:
        for name in reversed(names):
            if int(value_of(store, f"held/{name}") or 0) == self._ranks.world_size:
                self._delete_before(store, name)
                return name
        return None

    def _delete_before(self, store: Any, name: str) -> None:
        """Delete the counts before that of a complete snapshot, on rank 0: no rank adds to them any more."""
        if self._ranks.rank != 0:
            return
        end = self._counted.index(name)
        for old in self._counted[:end]:
            store.delete_key(f"held/{old}")
        del self._counted[:end]

    def forget(self) -> None:
        """Forget the counts, after the store was replaced."""
        self._counted.clear()


def value_of(store: Any, key: str) -> str | None:
    """Return the value of a key; None if it does not exist. Never waits, unlike `get`, and makes no key."""
    value = store.compare_set(key, _ABSENT, _ABSENT).decode()
    return None if value == _ABSENT else str(value)
