"""Which published steps stay when a new one is published."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.storage.recycled import discard_recycled, recycle_step
from ckpt.storage.root import CheckpointRoot

__all__ = ["Retention", "retain"]


@dataclass(frozen=True, slots=True)
class Retention:
    """The newest `keep_last` steps stay, and every multiple of `keep_every`; None keeps all.

    With `reuse_files` the next save writes over the files of a step that does not stay.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    reuse_files: bool = False

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 (the newest step is never removed), not {self.keep_last}")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, not {self.keep_every}")

    def superfluous(self, steps: list[int]) -> list[int]:
        """Return the steps to remove, oldest first; never the newest."""
        if self.keep_last is None:
            return []
        old = sorted(steps)[: -self.keep_last]
        return [step for step in old if not (self.keep_every and step % self.keep_every == 0)]


def retain(root: CheckpointRoot, retention: Retention, token: int, newest: int, plan: str) -> None:
    """Remove superfluous steps: they are renamed, and their files are to be deleted later (see `removal`).

    Never removes a step that is being read, nor anything newer than `newest`. `plan` is the digest of the plan that the
    next save is likely to have. For the owner: FencedError if `token` is not the newest; a step of a later owner is put
    back.
    """
    if retention.keep_last is None:
        return
    root.ownership.check(token)
    superfluous = retention.superfluous([step for step in root.steps() if step <= newest])
    if superfluous and retention.reuse_files:
        discard_recycled(root)  # the save has taken from there what it could use
    for step in superfluous:
        if retention.reuse_files:
            recycle_step(root, step, plan, token)
        else:
            root.move_step(step, root.abandoned_path, token)
