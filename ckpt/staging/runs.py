"""Copies runs of memory by as many threads as PyTorch uses, with checksums made on the way.

The threads take batches of runs until none is left, and meet once, at the end: PyTorch's own copies split each tensor
evenly and meet after each, so that a single busy core (a data loader's) makes them several times as slow.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from ckpt.native import RUN, copy_runs, crc32c_joined
from ckpt.threads import JoinableThread, join_all

__all__ = ["Runs"]

_BATCH_BYTES = 4 << 20


class Runs:
    """Copies to be done together."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, int, int]] = []
        self._batches: list[int] = [0]  # where each begins, in `_runs`
        self._batch_bytes = 0
        self._nbytes = 0
        self._pieces: list[tuple[int, int, int]] = []  # key, first run, and the one behind the last

    def add(self, to: int, source: int, nbytes: int, piece: int | None = None) -> None:
        """Copy from one address to another. The checksum of all of it is wanted under the key `piece`, if given."""
        first = len(self._runs)
        for at in range(0, nbytes, _BATCH_BYTES):
            part = min(_BATCH_BYTES, nbytes - at)
            if self._batch_bytes + part > _BATCH_BYTES:
                self._batches.append(len(self._runs))
                self._batch_bytes = 0
            self._runs.append((to + at, source + at, part, 0))
            self._batch_bytes += part
        self._nbytes += nbytes
        if piece is not None:
            self._pieces.append((piece, first, len(self._runs)))

    def copy(self, alone: bool = False) -> dict[int, int]:
        """Do it, with `alone` by this thread only; returns the checksums by key.

        This thread takes its part, and is not held up by helpers that get no core. After an interrupt nobody touches
        the memory any more.
        """
        if not self._runs:
            return dict.fromkeys((piece for piece, _, _ in self._pieces), 0)
        runs = np.array(self._runs, np.uint64).view(RUN).reshape(-1)
        ends = [*self._batches[1:], len(runs)]
        batches = deque(zip(self._batches, ends, strict=True))

        def work() -> None:
            while True:
                try:
                    first, end = batches.popleft()
                except IndexError:
                    return
                copy_runs(runs[first:end])

        helpers = [JoinableThread(work, "ckpt-stage") for _ in range(0 if alone else self._helpers())]
        try:
            for helper in helpers:
                helper.start()
            work()
        finally:
            batches.clear()
            join_all(helpers)
        return self._checksums(runs["bytes"].tolist(), runs["crc32c"].tolist())

    def _helpers(self) -> int:
        """A thread costs more than it gains for less than a few batches."""
        return min(torch.get_num_threads() - 1, self._nbytes // (4 * _BATCH_BYTES))

    def _checksums(self, nbytes: list[int], crcs: list[int]) -> dict[int, int]:
        checksums = {}
        for piece, first, end in self._pieces:
            joined = crcs[first] if first < end else 0
            for n in range(first + 1, end):
                joined = crc32c_joined(joined, crcs[n], nbytes[n])
            checksums[piece] = joined
        return checksums
