"""Which snapshots are complete on all ranks, known without a collective: ranks count themselves in the store of torch.

Each snapshot is a round <session>/<save> there (see `ckpt.ranks.rounds`):

    arrived     how many ranks have had this snapshot whole in memory
    decision    "complete" or "withdrawn", by the first rank that finds it complete or gives it up

A session is a nonce that all ranks have agreed on in a collective. After a fault there is another one, and ranks count
anew what they still hold: whether the store is the same or not, no rank is counted twice, and no rank that has left.

Each rank adds itself once to every snapshot, and looks only when it needs a slot. The decision counts: without it a
rank could give a snapshot up after another one has found it complete and let go of the one before. When rank 0 finds a
snapshot complete it deletes the keys before it: every rank has this one, and finds it by its count. So there are never
more than a few keys. Save names are unique: several Checkpointers can use one store.

For one thread of the trainer.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ckpt.ranks.collectives import Ranks
from ckpt.ranks.rounds import Round

_COMPLETE, _WITHDRAWN = "complete", "withdrawn"


class SnapshotCounts:
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
        return self._ranks.world_size == 1 or self._ranks.in_store(lambda store: self._count(store, name), False)

    def _count(self, store: Any, name: str) -> bool:
        if self._ranks.rank == 0:
            self._counted.append(self._in_session(name))
        with contextlib.suppress(RuntimeError, ValueError):
            self._round(store, self._in_session(name)).arrive()
        return True

    def newest_of(self, names: list[str]) -> str | None:
        """Return the newest of these snapshots, oldest first, that is complete on all ranks; None if none is known.

        They were counted by this rank before.
        """
        if self._ranks.world_size == 1:
            return names[-1] if names else None
        return self._ranks.in_store(lambda store: self._newest_in(store, names), None)

    def is_begun(self, name: str) -> bool:
        """Return whether any rank has counted itself for this snapshot, as far as is known."""
        return self.progress(name)[0] > 0

    def withdraw(self, name: str) -> bool:
        """Decide that a snapshot can never be complete; False if it is, or if that is not known.

        Other ranks may have found it complete just before: then it stays.
        """
        return self._ranks.in_store(lambda store: self._withdraw(store, name), False)

    def _withdraw(self, store: Any, name: str) -> bool:
        snapshot = self._round(store, self._in_session(name))
        count = snapshot.arrived
        if count is None:  # rank 0 has deleted it
            return False
        return snapshot.decide(_COMPLETE if count == self._ranks.world_size else _WITHDRAWN) == _WITHDRAWN

    def progress(self, name: str) -> tuple[int, int]:
        """Return on how many ranks a snapshot is complete, and how many there are; for messages."""
        name = self._in_session(name)
        return self._ranks.in_store(lambda store: self._round(store, name).arrived, None) or 0, self._ranks.world_size

    def _newest_in(self, store: Any, names: list[str]) -> str | None:
        for name in reversed(names):
            if name == self._complete:
                return name
            snapshot = self._round(store, self._in_session(name))
            if snapshot.arrived == self._ranks.world_size and snapshot.decide(_COMPLETE) == _COMPLETE:
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
            self._round(store, old).delete()
        del self._counted[:end]

    def forget(self) -> None:
        """Forget what is complete, after a fault: ranks may have been replaced, and the store."""
        self._complete = None

    def _in_session(self, name: str) -> str:
        return f"snapshots/{self._session}/{name}"

    def _round(self, store: Any, name: str) -> Round:
        return Round(store, name, self._ranks.world_size)
