"""Copies of what is at its place already are left out, and no others."""

from collections.abc import Iterator

import numpy as np
import pytest

from ckpt import native
from tests.ckpt.native.test_native import LEVELS

_KEY = np.random.default_rng(7).integers(0, 256, native.DIGEST_KEY_BYTES, np.uint8).tobytes()


@pytest.fixture(params=LEVELS, ids=LEVELS.values())
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    used = native.choose(request.param)
    if used == request.param:
        yield used
    native.choose(max(LEVELS))
    if used != request.param:
        pytest.skip(f"this processor cannot work with {LEVELS[request.param]}")


def test_copies_of_what_is_there_are_left_out(level: int) -> None:
    """Whatever changes, the targets hold the sources afterwards, and the same number of a content is the same bytes."""
    draw, sizes = np.random.default_rng(level + 1), [1, 63, 64, 8191, 8192, 8193, 16384, 70_001, 500]
    starts = np.cumsum([0, *sizes])
    source = draw.integers(0, 256, starts[-1], np.uint8)
    seen: dict[tuple[int, int], bytes] = {}
    slots = []
    for _ in range(2):
        held, room = np.zeros(len(sizes), native.HELD), np.zeros((len(sizes), 10 * native.HASH_BYTES), np.uint8)
        held["hashes"] = room.ctypes.data + np.arange(len(sizes)) * room.shape[1]
        slots.append((np.zeros(starts[-1] + 4 * len(sizes), np.uint8), held, room))
    last, left_out = slots[0][1], 0
    for number in range(1, 200):
        target, held, _ = slots[number % 2 if number % 50 > 20 else 0]
        for run in np.flatnonzero(draw.random(len(sizes)) < 0.1):
            source[draw.integers(starts[run], starts[run + 1])] ^= 1 << draw.integers(8)
        runs = np.zeros(len(sizes), native.RUN)
        runs["from"], runs["bytes"] = source.ctypes.data + starts[:-1], sizes
        runs["to"] = target.ctypes.data + starts[:-1] + 4 * np.arange(len(sizes))
        runs["checksum_at"] = runs["to"] + runs["bytes"]
        runs["continues"][8] = 1  # with the run before
        runs["checksum_at"][7] = 0
        if number % 17 == 0:
            runs["bytes"][2] = 0  # something else copies there
            target[starts[2] + 8 : starts[3] + 8] = 0
        native.update_runs(runs, held.ctypes.data, last.ctypes.data, _KEY, number)
        left_out, last = left_out + int(held["is_same"].sum()), held
        for run in range(len(sizes)):
            if not runs["bytes"][run]:
                assert held["state"][run] == 0
                continue
            at, content = starts[run] + 4 * run, source[starts[run] : starts[run + 1]].tobytes()
            assert target[at : at + sizes[run]].tobytes() == content
            if held["state"][run]:
                assert seen.setdefault((run, int(held["content"][run])), content) == content
            if run != 7:
                checksum = native.crc32c(source[starts[7] :].data if run == 8 else content)
                assert target[at + sizes[run] :][:4].tobytes() == checksum.to_bytes(4, "little")
                assert runs["crc32c"][run] == checksum
    assert left_out > 300 if level >= 0 else left_out == 0, left_out


def test_equal_checksums_are_not_taken_for_the_same_bytes(level: int) -> None:
    source, target = np.arange(9000, dtype=np.uint8), np.zeros(9000, np.uint8)
    held, room = np.zeros(1, native.HELD), np.zeros(2 * native.HASH_BYTES, np.uint8)
    held["hashes"] = room.ctypes.data
    for number in range(1, 5):
        runs = np.zeros(1, native.RUN)
        runs["from"], runs["to"], runs["bytes"] = source.ctypes.data, target.ctypes.data, len(source)
        native.update_runs(runs, held.ctypes.data, held.ctypes.data, _KEY, number)
    before = int(held["content"][0])
    assert held["state"][0] == (2 if level >= 0 else 0)
    # In a reflected CRC the lowest bit of a byte is its first one, and the highest power of the polynomial.
    for at, byte in enumerate(int(f"{0x11EDC6F41:033b}"[::-1], 2).to_bytes(5, "little")):
        source[8300 + at] ^= byte
    checksum = runs["crc32c"][0]
    native.update_runs(runs, held.ctypes.data, held.ctypes.data, _KEY, 5)
    assert runs["crc32c"][0] == checksum
    assert (target == source).all()
    assert held["content"][0] != before or level < 0
