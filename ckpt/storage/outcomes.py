"""How a save can end, as all of its ranks see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt.errors import StorageError
from ckpt.storage.names import SaveId

__all__ = ["Abandoned", "NotDurableError", "Published", "Reason", "SaveOutcome", "unknown_reason"]


class NotDurableError(StorageError):
    """The step is published, but a sync after the commit failed: it may not survive a loss of power."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a save was abandoned: the rank, and the error's type, message and traceback.

    Without `is_known` it may only have come of that: the error of a rank that failed when the save was abandoned.
    """

    rank: int | None
    kind: str
    message: str
    traceback: str = ""
    is_known: bool = True

    def to_document(self) -> dict[str, Any]:
        known = {} if self.is_known else {"known": False}
        return {
            "rank": self.rank,
            "kind": self.kind,
            "message": _printable(self.message),
            "traceback": _printable(self.traceback),
            **known,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Reason:
        """Return the reason that a document describes. One of `ILL_FORMED` if it describes none."""
        rank = document.get("rank")
        if rank is not None and type(rank) is not int:
            raise ValueError(f"{rank!r:.80} is not a rank")
        kind, message, trace = (str(document[name]) for name in ("kind", "message", "traceback"))
        return cls(rank, kind, message, trace, document.get("known", True) is True)


@dataclass(frozen=True, slots=True)
class Published:
    """The save is a published step."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The save can never be published, for this reason."""

    reason: Reason

    @property
    def is_explained(self) -> bool:
        """Whether it is known why; see `unknown_reason`."""
        return self.reason.is_known


SaveOutcome = Published | Abandoned | None
"""None: not decided, or not begun."""


def unknown_reason(save: SaveId) -> Reason:
    """Return the reason of a save that was abandoned without a record of why."""
    return Reason(
        None,
        "SaveAbandonedError",
        f"save {save.name} was abandoned and left no record of the reason (removed by hand, or no space to write it)",
        is_known=False,
    )


def _printable(text: str) -> str:
    """Return a text that can be encoded: a path in it may not be, where names of files are in ASCII."""
    return text.encode(errors="backslashreplace").decode()
