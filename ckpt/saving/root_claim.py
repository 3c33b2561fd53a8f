"""`RootClaim`: how a job becomes the owner of the root that it saves to, and what its next save continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ckpt.errors import CheckpointError, CheckpointExistsError
from ckpt.saving.recover import Branch, lost_token, whole_steps
from ckpt.storage.interface import Root
from ckpt.storage.node_packs import NodePacks
from ckpt.storage.ownership import ClaimLease
from ckpt.storage.roots import is_seen, note_seen

_SHOWN = 4


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
        self.run: str | None = None
        """The run that saves are of, as `Checkpointer.start_over` was told, or else the step that was restored says."""
        self._root = root
        self._packs = packs
        self._before = before
        self._has_seen = False
        self._has_saved = False
        self._lease = ClaimLease(root.ownership)

    def claim_for(self, step: int) -> int:
        """Claim the root for a save of `step`, as `claim` does; before there is one, for -1, only if one may follow.

        Returns 0 if none may. CheckpointExistsError, with nothing written, if the root has steps that training does not
        go on from: this Checkpointer has restored and saved none of them, and did not find the root empty. Steps before
        `step` count as those that it goes on from if another part of this process has seen them.
        """
        if self._has_saved or self.branch is None or self.branch.step is not None:
            return self.claim()
        steps = whole_steps(self._root)
        if not steps or (is_seen(self._root.path) and step > steps[-1]):
            return self.claim()
        if step < 0:  # a warmup, and a restore may follow
            return 0
        raise CheckpointExistsError(self._refusal(steps, step), step=steps[-1])

    def _refusal(self, steps: list[int], step: int) -> str:
        number = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the newest are {steps[-_SHOWN:]}"
        number += f"; step {step} is already published" if step in steps else ""
        return (
            f"{self._root.path} has {number}. This Checkpointer has restored none of them, so the save of step {step} "
            "would mix two trainings. Nothing was written. To go on from the newest step, call restore(state) before "
            "the first save. To begin anew, give another root; or call start_over('NAME OF THE RUN') before the first "
            "save, which then moves these steps to .superseded/"
        )

    def claim(self) -> int:
        """Claim the root, which is made if need be, and return the token. FencedError if another job was faster."""
        self._before()
        self._root.make()
        if self._packs is not None:
            self._packs.claim()
        seen = self.seen if self._has_seen else self._root.ownership.newest()
        above = self.above if seen else max(self.above, lost_token(self._root))
        self._note_token(self._root.ownership.claim(seen, above=above))
        assert self.token is not None
        self._lease.hold(self.token)
        return self.token

    def note_save(self, token: int) -> None:
        """Note the token with which this job saves."""
        self._note_token(token)
        if not self._has_saved:  # once: it looks at each folder of the path
            note_seen(self._root.path)
        self._has_saved = True

    def _note_token(self, token: int) -> None:
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
