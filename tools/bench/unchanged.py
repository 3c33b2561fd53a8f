"""Saves of which 99 % do not change, as in fine-tuning with adapters, beside saves of which all does."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ckpt import Checkpointer, Staging, observe
from ckpt.events import Event, SavePublished
from tools.bench.workload import size_of, tensors

_ADAPTERS = 3 * 2 * 77  # two for each matrix, with their moments
_TRAINED = 0.01
_PAGE_BYTES = 4096
_ALL_CHANGE = (True, True, True, False, False, False, True)
_MEASURED = (2, 4, 5, 6)  # of these: before that memory is mapped, or files are written whose digest is not known


@dataclass(frozen=True)
class UnchangedSaves:
    """Means of saves of which all has changed, and of those of which 1 % has: seconds to write and sync, and bytes."""

    full_s: float
    unchanged_s: float
    full_bytes: float
    unchanged_bytes: float


def measure_unchanged(state: Any, folder: Path) -> UnchangedSaves:
    """Save `state`, with adapters beside it, to a root in `folder`."""
    own = [tensor for tensor in tensors(state) if tensor.dim()]
    count = int(_TRAINED * size_of(own)) // 4 // _ADAPTERS
    adapters = {f"adapter{number}": torch.zeros(count) for number in range(_ADAPTERS)}
    events: list[Event] = []
    staging = Staging(link_unchanged=True)
    with observe(events.append), Checkpointer(folder / "unchanged", keep=2, staging=staging) as checkpointer:
        for step, all_change in enumerate(_ALL_CHANGE):
            _change(adapters.values())
            if all_change:
                _change(own)
            checkpointer.save({"state": state, "adapters": adapters}, step)
    published = [event for event in events if isinstance(event, SavePublished)]
    full = [published[number] for number in _MEASURED if _ALL_CHANGE[number]]
    unchanged = [published[number] for number in _MEASURED if not _ALL_CHANGE[number]]
    return UnchangedSaves(
        mean(event.write_s + event.sync_s for event in full),
        mean(event.write_s + event.sync_s for event in unchanged),
        mean(event.bytes for event in full),
        mean(event.bytes for event in unchanged),
    )


def _change(changed: Iterable[torch.Tensor]) -> None:
    """Change a bit of each page."""
    for tensor in changed:
        tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].bitwise_xor_(1)
