"""How a save can end, as all of its ranks see it."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import StorageError
from ckpt.ranks.failure import Failure
from ckpt.storage.names import SaveId

__all__ = ["Abandoned", "NotDurableError", "Published", "SaveOutcome", "unknown_reason"]


class NotDurableError(StorageError):
    """The step is published, but a sync after the commit failed: it may not survive a loss of power."""


@dataclass(frozen=True, slots=True)
class Published:
    """The save is a published step."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The save can never be published, for this reason."""

    reason: Failure

    @property
    def is_explained(self) -> bool:
        """Whether it is known why; see `unknown_reason`."""
        return self.reason.is_known


SaveOutcome = Published | Abandoned | None
"""None: not decided, or not begun."""


def unknown_reason(save: SaveId) -> Failure:
    """Return the reason of a save that was abandoned without a record of why."""
    return Failure(
        None,
        "SaveAbandonedError",
        f"save {save.name} was abandoned and left no record of the reason (removed by hand, or no space to write it)",
        is_known=False,
    )
