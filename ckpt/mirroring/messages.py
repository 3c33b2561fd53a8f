"""The messages of a trainer and its mirror worker.

trainer --- Setup + policy in a memory file, then Due for each step ---▶ worker
trainer ◀-- Begun, Done, Failed --------------------------------------- worker
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ckpt.saving.recover import Branch
from ckpt.storage.names import SaveId
from ckpt.storage.options import StorageOptions
from inprocess.ipc.packets import Codec

__all__ = ["CODEC", "Begun", "Done", "Due", "Failed", "Message", "Report", "Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The roots to copy from and to. `before` is the token that an earlier worker of this job had there.

    That of rank 0 owns the mirror and publishes; the others copy the shares of their ranks. With `node_local`, the
    directory of this node with pack files of the root, each can copy only what is on its node.

    The policy of the mirror, which may be a class of the user, is pickled in the memory file sent with this. It is
    imported by `import_path`, that of the trainer.
    """

    rank: int
    root: str
    root_options: StorageOptions | None
    mirror: str
    mirror_options: StorageOptions
    bandwidth: float | None
    close_s: float
    before: int
    node_local: str | None
    import_path: list[str]


@dataclass(frozen=True, slots=True)
class Due:
    """A published save whose step is to be copied. `branch` is what the steps of its job continue.

    `token` is that of the job in the first root that wants it: not the one that saved it, if an earlier job began the
    copy. `is_helped`: the workers of other ranks were told, too. Without `is_due` the worker reads from the step
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
class Begun:
    """The worker copies. That of rank 0 owns the mirror with this token; that of another rank copies its share."""

    token: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """A step is in the mirror; `nbytes` were written in `seconds`. Unless `is_due`, rank 0 does not want it there."""

    save: SaveId
    nbytes: int = 0
    seconds: float = 0.0
    is_due: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """A step could not be copied. Unless `again`, it is given up.

    `save` is None if the mirror cannot be used; a worker says that of itself with its last words.
    """

    save: SaveId | None
    cause: str
    again: bool


Report = Begun | Done | Failed
Message = Setup | Due | Report
CODEC: Codec[Message] = Codec(*get_args(Message))
