"""Which snapshots are complete on all ranks, known without a collective: ranks count themselves in the store of torch.

    held/<session>/<save>     how many ranks have had this snapshot whole in memory
    fate/<session>/<save>     "complete" or "withdrawn": written once, by the first rank that finds it complete or gives
                              it up

A session is a nonce that all ranks have agreed on in a collective. After a fault there is another one, and ranks count
anew what they still hold: whether the store is the same or not, no rank is counted twice, and no rank that has left.

Each rank adds itself once to every snapshot, and looks only when it needs a slot. The fate decides: without it a rank
could give a snapshot up after another one has found it complete and let go of the one before. When rank 0 finds a
snapshot complete it deletes the keys before it: every rank has this one, and finds it by its count. So there are never
more than a few keys. Save names are unique: several Checkpointers can use one store.

For one thread of the trainer.
"""

from __future__ import annotations

import logging
from typing import Any

from ckpt.ranks.collectives import Ranks

__all__ = ["Completion", "value_of"]

_log = logging.getLogger("ckpt")
_ABSENT = "-"  # no value of a key
_COMPLETE, _WITHDRAWN = "complete", "withdrawn"


class Completion:
    """The counts of this rank's snapshots. A store that fails knows of no snapshot that is complete."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._session = ""
        self._counted: list[str] = []  # whose keys may exist, oldest first, with their sessions; on rank 0
        self._complete: str | None = None  # the newest one that is known to be complete

    def begin(self, session: str) -> None:
        """Count in this session from now on. All ranks begin the same ones, in the same order."""
        self._session = session

    def count(self, name: str) -> bool:
        """Count this rank as one that has a snapshot, once; return whether it was tried: False without a store.

        If the store fails it may have counted. To count again could make the snapshot complete without another rank.
        """
        if self._ranks.world_size == 1:
            return True
        try:
            if (store := self._ranks.store()) is None:
                return False
        except (RuntimeError, ValueError) as error:
            _log.debug("the process group is gone: %s", error)
            return False
        if self._ranks.rank == 0:
            self._counted.append(self._in_session(name))
        try:
            store.add(f"held/{self._in_session(name)}", 1)
        except (RuntimeError, ValueError) as error:
            _log.debug("the store of the process group failed: %s", error)
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
        """Decide that a snapshot can never be complete; False if it is, or if that is not known.

        Other ranks may have found it complete just before: then it stays.
        """
        try:
            store = self._ranks.store()
            count = None if store is None else value_of(store, f"held/{self._in_session(name)}")
            if count is None:  # rank 0 has deleted it
                return False
            is_complete = int(count) == self._ranks.world_size
            return self._decided(store, name, _COMPLETE if is_complete else _WITHDRAWN) == _WITHDRAWN
        except (RuntimeError, ValueError) as error:
            _log.debug("the store of the process group failed: %s", error)
            return False

    def progress(self, name: str) -> tuple[int, int]:
        """Return on how many ranks a snapshot is complete, and how many there are; for messages."""
        try:
            return int(value_of(self._ranks.store(), f"held/{self._in_session(name)}") or 0), self._ranks.world_size
        except (RuntimeError, ValueError, AttributeError):
            return 0, self._ranks.world_size

    def _newest_in(self, store: Any, names: list[str]) -> str | None:
        for name in reversed(names):
            if name == self._complete:
                return name
            everywhere = int(value_of(store, f"held/{self._in_session(name)}") or 0) == self._ranks.world_size
            if everywhere and self._decided(store, name, _COMPLETE) == _COMPLETE:
                self._complete = name
                self._delete_before(store, name)
                return name
        return None

    def _delete_before(self, store: Any, name: str) -> None:
        """Delete the keys before those of a complete snapshot, on rank 0: no rank adds to them any more."""
        if self._ranks.rank != 0:
            return
        end = self._counted.index(self._in_session(name))
        for old in self._counted[:end]:
            store.delete_key(f"held/{old}")
            store.delete_key(f"fate/{old}")
        del self._counted[:end]

    def forget(self) -> None:
        """Forget what is complete, after a fault: ranks may have been replaced, and the store."""
        self._complete = None

    def _in_session(self, name: str) -> str:
        return f"{self._session}/{name}"

    def _decided(self, store: Any, name: str, fate: str) -> str:
        """Return the fate of a snapshot, which is this one unless it was decided before."""
        return str(store.compare_set(f"fate/{self._in_session(name)}", "", fate).decode())


def value_of(store: Any, key: str) -> str | None:
    """Return the value of a key; None if it does not exist. Never waits, unlike `get`, and makes no key."""
    value = store.compare_set(key, _ABSENT, _ABSENT).decode()
    return None if value == _ABSENT else str(value)
