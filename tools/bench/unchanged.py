"""Saves of which 99 % do not change, as in fine-tuning with adapters, beside saves of which all does."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from ckpt import Checkpointer, Staging, observe
from ckpt.events import Event, SavePublished
from ckpt.staging.runs import checksums_of
from tools.bench.workload import size_of, tensors

_ADAPTERS = 3 * 2 * 77  # two for each matrix, with their moments
_TRAINED = 0.01
_PAGE_BYTES = 4096
_ALL_CHANGE = (True, True, True, *[False] * 7, True)
_FULL, _LINKED = (2, 10), (6, 7, 8, 9)  # before that memory is mapped, or links replace the files of full saves


@dataclass(frozen=True)
class UnchangedSaves:
    """Means of saves of which all has changed, and of those of which 1 % has: seconds from the call, and bytes.

    `read_s` are the seconds that all threads take to read all bytes once, for their checksums.
    """

    full_s: float
    unchanged_s: float
    full_bytes: float
    unchanged_bytes: float
    read_s: float


def measure_unchanged(state: Any, folder: Path) -> UnchangedSaves:
    """Save `state`, with adapters beside it, to a root in `folder`."""
    own = [tensor for tensor in tensors(state) if tensor.dim()]
    count = int(_TRAINED * size_of(own)) // 4 // _ADAPTERS
    adapters = {f"adapter{number}": torch.zeros(count) for number in range(_ADAPTERS)}
    events: list[Event] = []
    reads: list[float] = []
    staging = Staging(link_unchanged=True)
    with observe(events.append), Checkpointer(folder / "unchanged", keep=2, staging=staging) as checkpointer:
        for step, all_change in enumerate(_ALL_CHANGE):
            _change(adapters.values())
            if all_change:
                _change(own)
            checkpointer.save({"state": state, "adapters": adapters}, step)
            reads.append(_read(own))
    published = [event for event in events if isinstance(event, SavePublished)]
    full, unchanged = [published[number] for number in _FULL], [published[number] for number in _LINKED]
    return UnchangedSaves(
        mean(event.seconds for event in full),
        mean(event.seconds for event in unchanged),
        mean(event.bytes for event in full),
        mean(event.bytes for event in unchanged),
        mean(reads),
    )


def _read(own: Iterable[torch.Tensor]) -> float:
    """Return how long all threads take to read tensors once."""
    parts = [part for tensor in own for part in tensor.view(-1).split(1 << 20)]
    addresses = np.array([part.data_ptr() for part in parts], np.uint64)
    begin = time.perf_counter()
    checksums_of(addresses, np.array([part.nbytes for part in parts], np.uint64))
    return time.perf_counter() - begin


def _change(changed: Iterable[torch.Tensor]) -> None:
    """Change a bit of each page."""
    for tensor in changed:
        tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].bitwise_xor_(1)
