"""The removal of a published step by the user's order."""

from __future__ import annotations

from ckpt.engine.parts import Parts
from ckpt.errors import CheckpointNotFoundError, StorageError


def delete_step(parts: Parts, step: int) -> None:
    """Remove a published step, on rank 0. See `Checkpointer.delete`."""
    if parts.ranks.rank != 0:
        raise ValueError(f"rank {parts.ranks.rank} cannot delete step {step}: call delete on rank 0 alone")
    root = parts.root
    if step not in root.steps():
        raise CheckpointNotFoundError(
            f"{root.path} has no published step {step}; it has {root.steps() or 'none'}", step=step
        )
    if not root.remove_step(step, parts.saver.root_claim.own()):
        if step in root.pinned_steps():
            raise StorageError(f"step {step} of {root.path} is pinned: unpin it first")
        raise StorageError(f"step {step} of {root.path} is being read: delete it when its readers are done")
