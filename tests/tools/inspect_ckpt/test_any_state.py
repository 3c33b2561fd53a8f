"""Any state that can be saved makes a whole step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt import AsyncCallsQueue, Checkpointer, Staging
from ckpt.validation import validate
from tests.support.selection import FULL

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 7, 16, 33)), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 1000))
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).reshape(shape)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.tuples(st.integers(), st.floats()),
)
KEYS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(("parts", "packs", "c.0", "zarr.json", "__box_00000", "..", "a/b")),
    st.integers(),
)
STATES = st.recursive(
    st.one_of(tensors(), VALUES),
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=4), st.lists(inner, max_size=3)),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue() as queue:
        yield queue


@settings(max_examples=200 if FULL else 25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    state=st.dictionaries(KEYS, STATES, max_size=4),
    compression=st.sampled_from((None, "zstd")),
    file_bytes=st.sampled_from((1, 512, 64 << 20)),
    inner_bytes=st.sampled_from((64, 4 << 20)),
)
def test_what_is_saved_is_whole(queue: AsyncCallsQueue, state: dict[Any, Any], **staging: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        with Checkpointer(root, queue=queue, staging=Staging(**staging)) as checkpointer:
            checkpointer.save(state, 7)
        report = validate(f"{root}/step_00000007")
        assert report.whole, report.problems
        assert validate(f"{root}/step_00000007", quick=True).whole
