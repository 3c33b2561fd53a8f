"""What the trainer of rank 0 and its mirror process tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.saving.recover import Branch
from ckpt.saving.retention import Keep
from ckpt.storage.names import SaveId
from ckpt.storage.options import StorageOptions

__all__ = ["Begun", "Done", "Due", "Failed", "NotDue", "Owner", "Report", "Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What the process copies from and to. `before` is the token that an earlier process of this job had there.

    That of rank 0 owns the mirror and publishes; the others copy the shares of their ranks. With `node_local`, the
    directory of this node with pack files of the root, each can copy only what is on its node.
    """

    rank: int
    root: str
    root_options: StorageOptions | None
    mirror: str
    mirror_options: StorageOptions
    keep: Keep | None
    bandwidth: float | None
    close_s: float
    before: int
    node_local: str | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A published save whose step is to be copied. `branch` is what the steps of its job continue.

    `token` is that of the job in the first root that wants it: not the one that saved it, if an earlier job began the
    copy. `is_helped`: the processes of other ranks were told, too. Without `is_due` the process reads from the step
    whether rank 0 wants it.
    """

    save: SaveId
    token: int
    branch: Branch
    is_helped: bool = False
    is_due: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """The key by which later saves are larger: those of another branch are of another owner."""
        return self.save.owner, self.save.step


@dataclass(frozen=True, slots=True)
class Owner:
    """The process owns the mirror with this token."""

    token: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A rank other than 0 copies its share."""


@dataclass(frozen=True, slots=True)
class NotDue:
    """Rank 0 does not want this save to be copied."""

    save: SaveId


@dataclass(frozen=True, slots=True)
class Done:
    """A step is in the mirror; `nbytes` were written in `seconds`. `resumed`: some of it had been there."""

    save: SaveId
    nbytes: int
    seconds: float
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A step could not be copied. Unless `again`, it is given up. `save` is None if the mirror cannot be used."""

    save: SaveId | None
    cause: str
    again: bool


Report = Owner | Begun | NotDue | Done | Failed
