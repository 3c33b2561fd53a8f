"""Copy runs of memory with as many threads as PyTorch uses, and compute their checksums on the way.

The threads take batches of runs until none is left, and are joined once, at the end. PyTorch splits each tensor evenly
and joins its threads after each, so that a single busy core (a data loader's) makes its copies several times as slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ckpt.native import RUN, copy_runs
from ckpt.staging.held_runs import HeldRuns
from inprocess.ipc.threads import JoinableThread, join_all

Array = np.ndarray[Any, np.dtype[Any]]
_LEAST_BATCH_BYTES = 4 << 20
_THREAD_BYTES = 16 << 20  # a thread costs more than it gains for less
_BATCHES = 4  # for each thread


def copy_together(runs: Array, held: HeldRuns | None = None) -> None:
    """Do all copies of an array of RUN; not of what is at its place already, as far as `held` knows that.

    This thread works, too, so it does not wait for helpers that get no core. After an interrupt no thread uses the
    memory any more.
    """
    nbytes = int(runs["bytes"].sum())
    if not nbytes:
        return
    threads = min(torch.get_num_threads(), 1 + nbytes // _THREAD_BYTES)
    batches = deque(_batches(runs, _batch_bytes(nbytes, threads)))

    def work() -> None:
        while True:
            try:
                first, end = batches.popleft()
            except IndexError:
                return
            copy_runs(runs[first:end]) if held is None else held.update(runs, first, end)

    helpers = [JoinableThread(work, "ckpt-stage") for _ in range(min(threads, len(batches)) - 1)]
    try:
        for helper in helpers:
            helper.start()
        work()
    finally:
        batches.clear()
        join_all(helpers)


def checksums_of(addresses: Array, nbytes: Array) -> Array:
    """Return the checksums of runs of memory, computed by the same threads."""
    runs = np.zeros(len(addresses), RUN)
    runs["from"], runs["bytes"] = addresses, nbytes
    copy_together(runs)
    return runs["crc32c"]


def _batch_bytes(nbytes: int, threads: int) -> int:
    """Return the size of a batch: larger with more threads.

    A thread needs the interpreter's lock to take a batch, and many threads would wait for it more than for memory: 16
    of them copied 1 GB in 12 ms in batches of 16 MiB, in 23 ms in batches of 4 MiB.
    """
    return max(_LEAST_BATCH_BYTES, min(threads << 20, nbytes // (threads * _BATCHES)))


def _batches(runs: Array, nbytes: int) -> Iterable[tuple[int, int]]:
    """Cut into batches of about so many bytes: the first run of each, and the one behind its last."""
    begins = np.flatnonzero(runs["continues"] == 0)  # the others need what the run before them leaves
    before = np.cumsum(runs["bytes"])[begins] - runs["bytes"][begins]
    firsts = begins[np.flatnonzero(np.diff(before // np.uint64(nbytes), prepend=np.uint64(2**63)))].tolist()
    return zip(firsts, [*firsts[1:], len(runs)], strict=True)
