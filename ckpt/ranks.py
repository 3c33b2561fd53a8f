"""The ranks of the job, and the one collective that checkpoints need: everybody's bytes to everybody.

Used when a state is planned and when one is restored; never in a training step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckpt.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Ranks"]


class Ranks:
    """This rank among all ranks of a process group (the default one if None). Without torch.distributed: one rank.

    Who had a group keeps his rank when it is destroyed, until `forget`: the abort of a restart destroys it on another
    thread, while this one may be anywhere.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self._group = process_group
        self._last: tuple[int, int] | None = None  # rank and world size, when `rank` was asked for

    @property
    def rank(self) -> int:
        """0, 1, ..."""
        self._last = self._now()
        return self._last[0]

    @property
    def last_rank(self) -> int | None:
        """The rank of this process; None without a process group if `rank` was not asked for since `forget`."""
        return None if _distributed() is None and self._last is None else self.rank

    def forget(self) -> None:
        """The process group is gone; in the next one this process may have another rank."""
        self._last = None

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._now()[1]

    def _now(self) -> tuple[int, int]:
        distributed = _distributed()
        try:
            if distributed is not None:
                return int(distributed.get_rank(self._group)), int(distributed.get_world_size(self._group))
        except ValueError:  # destroyed since then
            if self._last is None:
                raise
        return self._last or (0, 1)

    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective; raw bytes, nothing is unpickled.

        CheckpointError if the process group is gone.
        """
        distributed = _distributed()
        if self.world_size == 1:
            return [payload]
        if distributed is None:
            raise CheckpointError(
                f"rank {self.rank} of {self.world_size} has no process group any more to agree with the others: save "
                "and restore before it is destroyed, or after it is made again",
                rank=self.rank,
            )
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
