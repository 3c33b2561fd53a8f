"""Frames of zstd: what comes out is what went in, and anything but one whole frame is refused, in little memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd

from ckpt.storage.ocdbt import compressed, decompressed
from tests.ckpt.storage.refused_frames import assert_refused
from tests.support.seeds import random_bytes

_NOISE = random_bytes(300_000)


@given(noise=st.integers(1, 300_000), zeros=st.integers(0, 300_000), level=st.integers(-5, 9), checksum=st.booleans())
def test_frames_come_back(noise: int, zeros: int, level: int, checksum: bool) -> None:
    data = _NOISE[:noise] + bytes(zeros)
    frame = zstd.compress(data, level, checksum)
    assert decompressed(memoryview(frame), len(data)).tobytes() == data


@given(noise=st.integers(0, 300_000), zeros=st.integers(1, 300_000))
def test_others_read_what_is_compressed(noise: int, zeros: int) -> None:
    data = _NOISE[:noise] + bytes(zeros)
    frame = compressed(data)
    assert zstd.decompress(frame) == data == decompressed(frame, len(data)).tobytes()


def _long_frame(blocks: int) -> bytes:
    """Return a frame of 4,096 bytes, as it says, with blocks of 128 KiB of zeros, each in four bytes."""
    block, last = ((1 << 17 << 3 | 1 << 1 | is_last).to_bytes(3, "little") + b"\0" for is_last in (0, 1))
    return b"\x28\xb5\x2f\xfd\x60" + (4096 - 256).to_bytes(2, "little") + block * (blocks - 1) + last


_DATA = _NOISE[:4096]
_FRAME = zstd.compress(_DATA, 1)
_WRONG = {
    "nothing": b"",
    "no frame": _DATA,
    "a frame that is cut": _FRAME[:-1],
    "half a frame": _FRAME[: len(_FRAME) // 2],
    "a byte more": _FRAME + b"\0",
    "two frames": _FRAME + _FRAME,
    "a frame of fewer bytes": zstd.compress(_DATA[:-1], 1),
    "a frame of more bytes": zstd.compress(_DATA + b"x", 1),
    "another size in the header": _FRAME[:5] + zstd.compress(_DATA[:-1], 1)[5:7] + _FRAME[7:],
    "a frame of gigabytes": _long_frame(100_000),
}


@pytest.mark.parametrize("name", _WRONG)
def test_anything_else_is_refused(name: str) -> None:
    assert_refused(decompressed, _FRAME, _WRONG[name], 4096)
