"""Copies and checksums by several threads are those of one."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
import torch

from ckpt.native import RUN
from ckpt.staging.runs import checksums_of, copy_together

_MIB = 1 << 20


def some_runs(sizes: list[int], continues: list[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs that lie one behind the other, and the memory they are from and go to."""
    source = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
    target = np.zeros_like(source)
    runs = np.zeros(len(sizes), RUN)
    starts = np.cumsum([0, *sizes[:-1]])
    runs["from"], runs["to"] = starts + source.ctypes.data, starts + target.ctypes.data
    runs["bytes"], runs["continues"] = sizes, continues
    return runs, source, target


@pytest.mark.parametrize("threads", [1, 2, 7, 64])
@pytest.mark.parametrize(
    "sizes",
    [
        [_MIB] * 70,
        [40 * _MIB, 1, 0, 30 * _MIB],
        [3, 5 * _MIB, 7] * 10,
        [4 * _MIB - 1] * 3,
        [1],
    ],
)
def test_every_run_is_done_once(threads: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    continues = [number % 3 > 0 for number in range(len(sizes))]
    runs, source, target = some_runs(sizes, continues)
    copy_together(runs)
    assert np.array_equal(source, target)
    checksum, at = 0, 0
    for size, goes_on, found in zip(sizes, continues, runs["crc32c"].tolist(), strict=True):
        checksum = google_crc32c.extend(checksum if goes_on else 0, source[at : at + size].tobytes())
        assert found == checksum
        at += size


def test_checksums_alone() -> None:
    runs, source, target = some_runs([5, 0, 20 * _MIB, 20 * _MIB], [False] * 4)
    expected = [google_crc32c.value(part.tobytes()) for part in np.split(source, np.cumsum(runs["bytes"])[:-1])]
    assert checksums_of(runs["from"], runs["bytes"]).tolist() == expected
    assert not target.any()
    assert not len(checksums_of(runs["from"][:0], runs["bytes"][:0]))
