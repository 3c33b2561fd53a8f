"""Copies runs of memory by as many threads as PyTorch uses, with checksums made on the way.

The threads take batches of runs until none is left, and meet once, at the end: PyTorch's own copies split each tensor
evenly and meet after each, so that a single busy core (a data loader's) makes them several times as slow.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from ckpt.native import copy_runs
from ckpt.threads import JoinableThread, join_all

__all__ = ["copy_together"]

_BATCH_BYTES = 4 << 20


def copy_together(runs: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Do all copies of an array of RUN.

    This thread takes its part, and is not held up by helpers that get no core. After an interrupt nobody touches the
    memory any more.
    """
    if not runs["bytes"].any():
        return
    begins = np.flatnonzero(runs["continues"] == 0)  # the others need what the run before them leaves
    before = np.cumsum(runs["bytes"])[begins] - runs["bytes"][begins]
    firsts = begins[np.flatnonzero(np.diff(before // _BATCH_BYTES, prepend=np.uint64(2**63)))].tolist()
    batches = deque(zip(firsts, [*firsts[1:], len(runs)], strict=True))

    def work() -> None:
        while True:
            try:
                first, end = batches.popleft()
            except IndexError:
                return
            copy_runs(runs[first:end])

    # a thread costs more than it gains for less than a few batches
    most = min(torch.get_num_threads() - 1, len(batches) // 4)
    helpers = [JoinableThread(work, "ckpt-stage") for _ in range(most)]
    try:
        for helper in helpers:
            helper.start()
        work()
    finally:
        batches.clear()
        join_all(helpers)
