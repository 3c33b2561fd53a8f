"""What ranks exchange about their background calls: two numbers, and texts only if a call failed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ckpt.async_calls.messages import clip
from ckpt.ranks.distributed import collective_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Agreement", "Failure"]

_FAILURE_BYTES = 4096
_MESSAGE_BYTES = 1024
_TRACEBACK_BYTES = 2560


@dataclass(frozen=True)
class Failure:
    """Why a call failed on one rank."""

    message: str
    traceback: str


class Agreement:
    """Collectives over `group` (None: all ranks). Only for use when torch.distributed is initialized."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def minimum(self, *numbers: int) -> list[int]:
        """Return the smallest of each number over all ranks: one all_reduce."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.int64, device=collective_device(self._group))
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def exchange(self, failure: Failure | None) -> dict[int, Failure]:
        """Return the failures of all ranks, by global rank: one all_gather of a few KB per rank."""
        import torch
        import torch.distributed as dist

        own = bytearray(json.dumps(failure and asdict(_shortened(failure))).encode().ljust(_FAILURE_BYTES))
        tensor = torch.frombuffer(own, dtype=torch.uint8).to(collective_device(self._group))
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, tensor, group=self._group)
        texts: list[Any] = [json.loads(bytes(each.cpu().numpy())) for each in gathered]
        group = self._group if self._group is not None else dist.group.WORLD
        return {dist.get_global_rank(group, i): Failure(**text) for i, text in enumerate(texts) if text is not None}  # type: ignore[arg-type]


def _shortened(failure: Failure) -> Failure:
    return Failure(clip(failure.message, _MESSAGE_BYTES), clip(failure.traceback, _TRACEBACK_BYTES))
