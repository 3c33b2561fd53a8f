"""What the trainer of rank 0 and its mirror process tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.saving.recover import Branch
from ckpt.saving.retention import Keep
from ckpt.storage.options import StorageOptions

__all__ = ["Begun", "Done", "Due", "Failed", "Owner", "Report", "Setup"]


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
    """A step to copy. `token` is that of the job in the first root, `branch` what its steps continue.

    `is_helped`: the processes of other ranks were told, too.
    """

    step: int
    token: int
    branch: Branch
    is_helped: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """The process owns the mirror with this token."""

    token: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A rank other than 0 copies its share."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step is in the mirror; `nbytes` were written in `seconds`. `resumed`: some of it had been there."""

    step: int
    nbytes: int
    seconds: float
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A step could not be copied. Unless `again`, it is given up. `step` is None if the mirror cannot be used."""

    step: int | None
    cause: str
    again: bool


Report = Owner | Begun | Done | Failed
