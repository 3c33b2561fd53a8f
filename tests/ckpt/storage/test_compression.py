"""Frames of Blosc: what comes out is what went in, and anything but one whole frame is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import native
from ckpt.storage.compression import Compression, Compressor, decompressed
from ckpt.storage.regular_files import DamagedFileError
from tests.ckpt.storage.refused_frames import assert_refused
from tests.ckpt.validation.forgery import reseal_index
from tests.support.saves import save_here
from tests.support.seeds import random_bytes

_NOISE = random_bytes(300_000)

_NORMAL = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32).tobytes()

_HOW = st.builds(
    Compression,
    st.sampled_from(["zstd", "lz4"]),
    level=st.integers(1, 9),
    shuffle=st.sampled_from(["byte", "bit", "none", None]),
)


@pytest.fixture(params=[2, -1], ids=["compiled", "portable"], scope="module")
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    native.choose(request.param)
    yield
    native.choose(2)


def compressed(content: memoryview, itemsize: int, how: Compression) -> bytes:
    compressor = Compressor(how)
    frame = bytearray(compressor.room(len(content)))
    size = compressor.compress(content, itemsize, memoryview(frame))
    return bytes(frame[:size])


@pytest.mark.usefixtures("_engine")
@given(noise=st.integers(0, 20_000), zeros=st.integers(0, 20_000), itemsize=st.sampled_from([1, 2, 4, 8, 16]), how=_HOW)
def test_frames_come_back(noise: int, zeros: int, itemsize: int, how: Compression) -> None:
    data = _NOISE[: (noise + 1) * itemsize] + bytes(zeros * itemsize)
    frame = compressed(memoryview(data), itemsize, how)
    assert decompressed(memoryview(frame), len(data)).tobytes() == data
    assert len(frame) <= len(data) + 16


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_a_compressor_makes_frames_of_any_size(itemsize: int) -> None:
    """One after the other, in memory that it keeps."""
    compressor, frame = Compressor(Compression()), memoryview(bytearray(500_000))
    for nbytes in (itemsize, 400_000, 8, 16, 24, 32, 200_000):
        for data in (_NORMAL[:nbytes], bytes(nbytes), (_NOISE + _NOISE)[:nbytes]):
            size = compressor.compress(memoryview(data), itemsize, frame)
            assert decompressed(frame[:size], nbytes).tobytes() == data


def test_floats_become_smaller_by_the_shuffle() -> None:
    data = memoryview(_NORMAL)
    sizes = {how: len(compressed(data, 4, Compression("zstd", shuffle=how))) for how in ("byte", "none")}
    assert sizes["byte"] < 0.86 * len(data)
    assert sizes["none"] > 0.9 * len(data)


def test_frames_made_by_the_own_code_are_smaller() -> None:
    """So it is the own code that made them, not Blosc. It is half as slow, too, which no test can tell."""
    if native.choose(2) == -1:
        pytest.skip("without the compiled part of ckpt Blosc makes them")
    data = memoryview(_NORMAL)
    own = len(compressed(data, 4, Compression()))
    native.choose(-1)
    try:
        assert own < 0.995 * len(compressed(data, 4, Compression()))
    finally:
        native.choose(2)


def test_frames_of_a_step_are_large_enough_for_the_shuffle(tmp_path: Path) -> None:
    state = {
        f"{number}": torch.randn(1024, 1024, generator=torch.Generator().manual_seed(number)) for number in range(3)
    }
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(compression="zstd")) as checkpointer:
        save_here(checkpointer, state, 1)
    nbytes = sum(file.stat().st_size for file in tmp_path.glob("step_*/packs/*/*"))
    assert nbytes < 0.86 * sum(tensor.nbytes for tensor in state.values())


_DATA = bytes(2048) + _NOISE[:2048]
_FRAME = compressed(memoryview(_DATA), 4, Compression())
_WRONG = {
    "nothing": b"",
    "no frame": _DATA,
    "a frame that is cut": _FRAME[:-1],
    "half a frame": _FRAME[: len(_FRAME) // 2],
    "a byte more": _FRAME + b"\0",
    "a frame of fewer bytes": compressed(memoryview(_DATA[:-4]), 4, Compression()),
    "a frame of more bytes": compressed(memoryview(_DATA + b"more"), 4, Compression()),
    "a frame of gigabytes": _FRAME[:4] + (1 << 31).to_bytes(4, "little") + _FRAME[8:],
    "blocks of gigabytes": _FRAME[:8] + (1 << 30).to_bytes(4, "little") + _FRAME[12:],
    "blocks of nothing": _FRAME[:8] + bytes(4) + _FRAME[12:],
    "a block beyond its end": _FRAME[:16] + (1 << 20).to_bytes(4, "little") + _FRAME[20:],
    "a codec that is not there": _FRAME[:2] + bytes([_FRAME[2] & 0x1F | 0x40]) + _FRAME[3:],
    "a format of the future": b"\x7f" + _FRAME[1:],
}


@pytest.mark.parametrize("name", _WRONG)
def test_anything_else_is_refused(name: str) -> None:
    assert_refused(decompressed, _FRAME, _WRONG[name], 4096)


@given(where=st.integers(0, len(_FRAME) - 1), value=st.integers(0, 255))
def test_any_byte_may_be_wrong(where: int, value: int) -> None:
    """It has a checksum of its own in a step; here it is enough that nothing else is harmed."""
    frame = _FRAME[:where] + bytes([value]) + _FRAME[where + 1 :]
    with contextlib.suppress(DamagedFileError):
        assert len(decompressed(frame, 4096)) == 4096


def test_chunks_of_earlier_builds_are_no_damage(tmp_path: Path) -> None:
    """Else a restore would take an older step, and move this one aside."""
    with ckpt.Checkpointer(tmp_path, staging=ckpt.Staging(compression="zstd")) as checkpointer:
        save_here(checkpointer, {"w": torch.ones(1000)}, 2)

    def as_earlier(index: dict[str, Any]) -> None:
        index["arrays"][0]["compression"] = "zstd"

    reseal_index(tmp_path / "step_00000002", as_earlier)
    with (
        ckpt.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(ckpt.FormatVersionError, match=r"before the release"),
    ):
        checkpointer.restore({"w": torch.zeros(1000)})
    assert (tmp_path / "step_00000002").is_dir()
