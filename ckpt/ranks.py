"""The ranks of the job, and the one collective that checkpoints need: everybody's bytes to everybody.

Used when a state is planned and when one is restored; never in a training step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Ranks"]


class Ranks:
    """This rank among all ranks of a process group (the default one if None). Without torch.distributed: one rank."""

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self._group = process_group
        self._last_rank: int | None = None

    @property
    def rank(self) -> int:
        """0, 1, ..."""
        distributed = _distributed()
        self._last_rank = rank = int(distributed.get_rank(self._group)) if distributed is not None else 0
        return rank

    @property
    def last_rank(self) -> int | None:
        """The last rank this process had, also when the group is destroyed; None if `rank` was not asked since
        `forget`."""
        return self._last_rank if _distributed() is None else self.rank

    def forget(self) -> None:
        """The process group is gone; in the next one this process may have another rank."""
        self._last_rank = None

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        distributed = _distributed()
        return int(distributed.get_world_size(self._group)) if distributed is not None else 1

    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective; raw bytes, nothing is unpickled."""
        distributed = _distributed()
        if distributed is None or self.world_size == 1:
            return [payload]
        import torch

        device = self._device(distributed)
        own = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        sizes = [torch.zeros_like(own) for _ in range(self.world_size)]
        distributed.all_gather(sizes, own, group=self._group)
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [b""] * self.world_size
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        distributed.all_gather(received, padded, group=self._group)
        return [data.cpu().numpy().tobytes()[: int(size)] for data, size in zip(received, sizes, strict=True)]

    def _device(self, distributed: Any) -> torch.device:
        """Where the backend of the group wants its tensors."""
        import torch

        has_cpu_backend = "cpu" in str(distributed.get_backend_config(self._group))
        return torch.device("cpu") if has_cpu_backend else torch.device("cuda", torch.cuda.current_device())


def _distributed() -> Any:
    """torch.distributed if this process uses it; None otherwise, and torch is not imported for that."""
    torch_module = sys.modules.get("torch")
    distributed = getattr(torch_module, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
