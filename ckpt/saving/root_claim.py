"""`RootClaim`: how a job becomes the owner of the root that it saves to, and what its next save continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ckpt.errors import CheckpointError
from ckpt.saving.recover import Branch, lost_token
from ckpt.storage.interface import Root
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.ownership import ClaimLease

__all__ = ["RootClaim"]


class RootClaim:
    """The claim of one Checkpointer on its root. For the thread that trains, and one that plans a save meanwhile."""

    def __init__(self, root: Root, packs: NodePacks | None, before: Callable[[], None]) -> None:
        """`before` is called before a claim: it waits until saves of this program can no longer be fenced by it."""
        self.above = 0
        """A claim of this process gets a larger token than this one."""
        self.seen = 0
        """The newest token known to this job; 0 if there is none. Later ones are of later starts."""
        self.token: int | None = None
        """The token that this job saved with last, or that this process claimed; None before."""
        self.branch: Branch | None = Branch()
        """The branch that the next save continues; None if one of this owner is known to be published."""
        self._root = root
        self._packs = packs
        self._before = before
        self._has_seen = False
        self._lease = ClaimLease(root.ownership)

    def claim(self) -> int:
        """Claim the root, which is made if need be, and return the token. FencedError if another job was faster."""
        self._before()
        self._root.make()
        if self._packs is not None:
            self._packs.claim()
        seen = self.seen if self._has_seen else self._root.ownership.newest()
        above = self.above if seen else max(self.above, lost_token(self._root))
        self.note(self._root.ownership.claim(seen, above=above))
        assert self.token is not None
        self._lease.hold(self.token)
        return self.token

    def note(self, token: int) -> None:
        """Note the token with which this job saves."""
        self.seen = self.token = token
        self._has_seen = True

    def confirm(self, token: int) -> None:
        """Raise StorageError unless this rank sees the claim of the coordinator, and can write beside it."""
        self._root.confirm(token)
        if self._packs is not None:
            self._packs.claim()

    @property
    def is_owner(self) -> bool:
        """Whether this job owns the root, as far as storage tells."""
        ownership = self._root.ownership
        return self._has_seen and self.seen in (ownership.newest(), ownership.owner())

    def own(self) -> int:
        """Return the token; claim the root first unless this job owns it. FencedError if a later job owns it."""
        if self.token is None:
            return self.claim()
        self._root.ownership.check(self.token)
        return self.token

    def continue_from(self, branch: Branch, seen: int | None) -> None:
        """Let the next save continue the step of `branch`. `seen` is a token seen since."""
        self.branch = branch
        if seen is not None:
            self.seen, self._has_seen = max(seen, self.seen), True

    def taken_over(self, branch: Branch | None) -> None:
        """Remember that a save is published which took over what earlier owners left: later ones need not."""
        if branch is self.branch:
            self.branch = None

    def release(self, rank: int, *, done: bool) -> None:
        """Record in the root that this trainer does not use it any more; nor do its writers, if all is `done`."""
        if self.token is not None:
            with contextlib.suppress(CheckpointError):  # then its lease expires
                self._root.ownership.release(self.token, rank, done=done)

    def close(self) -> None:
        """End the lease of a claim without a save. Idempotent."""
        self._lease.close()
