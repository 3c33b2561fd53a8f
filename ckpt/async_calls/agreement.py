"""What ranks agree on about their background calls: which are settled on all of them, and why one failed."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from ckpt.async_calls.messages import clip
from ckpt.distributed import collective_device
from ckpt.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Agreement", "Failure", "exchange_failures", "smallest"]

_MESSAGE_BYTES = 1024
_TRACEBACK_BYTES = 2560


@dataclass(frozen=True)
class Failure:
    """Why a call failed on one rank."""

    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an error."""
        return cls(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


class Agreement:
    """The calls that are known to be settled on all ranks of `group` (None: all ranks).

    All methods are for when torch.distributed is initialized. Ranks count their calls from the last `restart`, not from
    the first call of a process: one that replaced another during the job has a new queue.
    """

    def __init__(self, group: ProcessGroup | None, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._first = 0
        self._agreed = 0

    def restart(self, first: int) -> None:
        """Count from the call with the index `first`: none is scheduled on any rank."""
        self._first = self._agreed = first

    def count_left(self, end: int) -> int:
        """Return how many calls below this index are not known to be settled on all ranks.

        It is the same on all ranks that schedule the same calls, also if some ranks have finalized their own calls
        alone, and others have not.
        """
        return end - self._agreed

    def decide(self, settled: int, failed: int) -> tuple[int, int]:
        """Return the index up to which calls are settled on all ranks, and the first that failed on one of them.

        One all_reduce. Follow it by `note`.
        """
        least = smallest(self._group, settled - self._first, failed - self._first)
        return least[0] + self._first, least[1] + self._first

    def note(self, end: int) -> None:
        """Remember that all calls below this index are settled on all ranks, and all ranks know of their failures."""
        self._agreed = end

    def exchange(self, failure: Failure | None) -> dict[int, Failure]:
        """Return the failures of a call on all ranks, by global rank. Collective."""
        return exchange_failures(failure, self._group, self._timeout_s)


def smallest(group: ProcessGroup | None, *numbers: int) -> list[int]:
    """Return the smallest of each number over all ranks: one all_reduce."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(numbers, dtype=torch.int64, device=collective_device(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return [int(number) for number in tensor.tolist()]


def exchange_failures(failure: Failure | None, group: ProcessGroup | None, timeout_s: float) -> dict[int, Failure]:
    """Return the failures of all ranks, by global rank: a few KB of each that has one.

    Collective. CheckpointTimeoutError, naming the missing ranks, if not all arrive in time.
    """
    import torch.distributed as dist

    ranks = Ranks(group, timeout_s)
    ranks.doing = "a background call, which some of them may have failed"
    texts = ranks(b"" if failure is None else json.dumps(asdict(_shortened(failure))).encode())
    members = group if group is not None else dist.group.WORLD
    return {dist.get_global_rank(members, i): Failure(**json.loads(text)) for i, text in enumerate(texts) if text}  # type: ignore[arg-type]


def _shortened(failure: Failure) -> Failure:
    return Failure(clip(failure.message, _MESSAGE_BYTES), clip(failure.traceback, _TRACEBACK_BYTES))
