"""What this process knows of torch.distributed. Nothing here imports torch in a process that does not use it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["collective_device", "own_rank", "torch_distributed"]


def torch_distributed() -> Any:
    """Return the module torch.distributed if it is initialized in this process, else None."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def own_rank() -> int | None:
    """Return the global rank; None when torch.distributed is not initialized."""
    distributed = torch_distributed()
    return None if distributed is None else int(distributed.get_rank())


def collective_device(group: ProcessGroup | None) -> torch.device:
    """Return the device on which the backend of a group (None: the default group) wants its tensors."""
    import torch
    import torch.distributed as dist

    has_cpu_backend = "cpu" in str(dist.get_backend_config(group))
    return torch.device("cpu") if has_cpu_backend else torch.device("cuda", torch.cuda.current_device())
