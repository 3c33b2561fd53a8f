"""The ranks of an iteration that has no process group yet: their collectives through a store of torch.

    each rank: set N/RANK  -->  rank 0: reads all, sets N/all  -->  each rank: reads N/all

For a restore before the wrapped function runs. Waits by polling, so that exceptions thrown into this thread reach it.
"""

from __future__ import annotations

import struct
import time
from typing import Any

from ckpt.errors import CheckpointError, CheckpointTimeoutError
from ckpt.ranks.group import Group
from ckpt.ranks.rounds import named

__all__ = ["StoreRanks"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_SIZE = struct.Struct("<Q")


class StoreRanks(Group):
    """Rank `rank` of `world_size`, with a part of a `store` for these collectives alone. One thread."""

    def __init__(self, rank: int, world_size: int, store: Any, timeout_s: float) -> None:
        super().__init__(rank, world_size)
        self._store = store
        self._timeout_s = timeout_s
        self._number = 0

    def __call__(self, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all ranks, by rank. Collective.

        CheckpointTimeoutError if not all ranks arrive in time; CheckpointError if the store fails.
        """
        if self.world_size == 1:
            return [payload]
        try:
            return self._gather(payload)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank}: the store of the iteration failed, so the ranks cannot agree on what to restore: "
                f"{error}",
                rank=self.rank,
            ) from error

    def _gather(self, payload: bytes) -> list[bytes]:
        number, self._number = self._number, self._number + 1
        together = f"{number}/all"
        deadline = time.monotonic() + self._timeout_s
        if self.rank != 0:
            self._store.set(f"{number}/{self.rank}", payload)
            self._wait([together], deadline)
            return _split(self._store.get(together))
        keys = [f"{number}/{rank}" for rank in range(1, self.world_size)]
        self._wait(keys, deadline)
        payloads = [payload, *map(bytes, self._store.multi_get(keys))]
        self._store.set(together, b"".join(_SIZE.pack(len(each)) + each for each in payloads))
        for key in (*keys, f"{number - 1}/all"):  # of which all have read: they have come to this one
            self._store.delete_key(key)
        return payloads

    def _wait(self, keys: list[str], deadline: float) -> None:
        """Wait until these keys exist."""
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                missing = [
                    int(key.partition("/")[2]) for key in keys if self.rank == 0 and not self._store.check([key])
                ]
                raise CheckpointTimeoutError(
                    f"rank {self.rank} waited {self._timeout_s:g} s for {named(missing or [0])}, to agree on what to "
                    "restore after a restart: has every process registered its state before the wrapper is called?",
                    rank=self.rank,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _split(data: bytes) -> list[bytes]:
    payloads, at = [], 0
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        payloads.append(bytes(data[at : at + size]))
        at += size
    return payloads
