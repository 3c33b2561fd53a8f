"""The messages of a trainer and its mirror worker.

trainer --- Run + pickled arguments, then Due for each step ---------------▶ worker
trainer ◀-- CopyEnded, Notice; Finished, if the worker failed -------------- worker
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ckpt.async_calls.messages import Run
from ckpt.keeper.messages import Finished, Notice
from ckpt.saving.recover import Branch
from ckpt.storage.names import SaveId
from inprocess.ipc.packets import Codec

__all__ = ["CODEC", "MIRROR", "CopyEnded", "Due", "MirrorMessage", "Report"]

MIRROR = 0
"""The number of the order that begins the work. Notices about it are

* ``{"owner": token}``: the worker of rank 0 owns the mirror with this token;
* ``{"begun": save}``: the worker of another rank copies its share of this save;
* ``{"not_due": save}``: rank 0 does not want this save to be copied.
"""


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
class CopyEnded:
    """A copy has ended: the step is in the mirror, or `error` says why not; with `again` it is tried again.

    In these seconds so many bytes were copied.
    """

    save: SaveId
    nbytes: int
    seconds: float
    error: str = ""
    again: bool = False


Report = Notice | CopyEnded | Finished
MirrorMessage = Run | Due | Notice | CopyEnded | Finished
CODEC: Codec[MirrorMessage] = Codec(*get_args(MirrorMessage))
