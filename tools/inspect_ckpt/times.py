"""When what happened in a save, as its parts recorded it. Used by `ls` and `timeline`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.loading.index import ILL_FORMED, whole_number
from ckpt.native import crc32c
from ckpt.storage.documents import decode_document
from ckpt.storage.names import part_name
from ckpt.validation import read_document

__all__ = ["PartTimes", "part_times"]

_RECORDED = ("begin", "wait_s", "stage_s", "stall_s", "write_begin", "write_s", "sync_s")


@dataclass(frozen=True, slots=True)
class PartTimes:
    """One rank's times. `begin` and `write_begin` are seconds since 1970, the others durations in seconds.

    The trainer waits for `stall_s`: `wait_s` for a free slot, `stage_s` to copy. The writer writes for `write_s`, makes
    durable for `sync_s`.
    """

    rank: int
    begin: float
    wait_s: float
    stage_s: float
    stall_s: float
    write_begin: float
    write_s: float
    sync_s: float
    bytes: int

    @property
    def written(self) -> float:
        """When the part was durable."""
        return self.write_begin + self.write_s + self.sync_s


def part_times(path: str, summary: Mapping[str, Any]) -> list[PartTimes]:
    """The times of all ranks. CheckpointCorruptError if a part is not the one that the root knows."""
    return [_read(path, rank, checksum) for rank, checksum in enumerate(summary["parts"])]


def _read(path: str, rank: int, checksum: int) -> PartTimes:
    name = part_name(rank)
    data = read_document(path, name)
    if crc32c(data) != checksum:
        raise CheckpointCorruptError(f"{os.path.join(path, name)} is not the one that belongs to this step")
    part = decode_document(data, os.path.join(path, name))
    try:
        written = sum(whole_number(file_bytes) for chunks in part["chunks"].values() for _, file_bytes, _ in chunks)
        times = {name: float(part["times"].get(name, 0.0)) for name in _RECORDED}
        if not all(map(math.isfinite, times.values())):
            raise ValueError("a time is not finite")
    except ILL_FORMED as error:
        raise CheckpointCorruptError(f"{os.path.join(path, name)} is not a part: {error!r:.200}") from None
    return PartTimes(rank=rank, bytes=written, **times)
