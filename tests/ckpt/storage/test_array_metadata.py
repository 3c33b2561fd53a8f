from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ckpt.errors import StateError
from ckpt.storage import dtypes
from ckpt.storage.array_metadata import ArrayMeta, root_document
from ckpt.storage.compression import Compression
from tests.ckpt.storage.chunks import CASES, Case

TORCH_DTYPES = sorted({dtypes.torch_dtype_name(d) for d in vars(torch).values() if isinstance(d, torch.dtype)})


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_of_torch_is_known(name: str) -> None:
    how = dtypes.stored(name)
    assert dtypes.torch_dtype_name(dtypes.torch_dtype(name)) == name
    assert how.itemsize == dtypes.torch_dtype(name).itemsize
    assert how.numpy_dtype.itemsize * (how.trailing or (1,))[0] == how.itemsize


def test_unknown_dtypes() -> None:
    with pytest.raises(StateError, match="float7"):
        dtypes.stored("float7")
    with pytest.raises(StateError, match="float7"):
        dtypes.torch_dtype("float7")


@pytest.mark.parametrize(
    "arguments",
    [
        ((2,), (1, 1)),
        ((2,), (0,)),
        ((-1,), (1,)),
        ((4,), (4,), (3,)),
        ((4,), (4,), (2, 2)),
        ((1 << 28,), (1 << 28,), None, Compression()),
    ],
)
def test_impossible_arrays(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk|compression"):
        ArrayMeta(arguments[0], "float32", *arguments[1:])


@st.composite
def metas(draw: st.DrawFn) -> ArrayMeta:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    inner = tuple(draw(st.integers(1, 4)) for _ in shape)
    chunk = tuple(size * draw(st.integers(1, 3)) for size in inner)
    return ArrayMeta(
        shape, draw(st.sampled_from(["int8", "float64", "complex32"])), chunk, draw(st.sampled_from([None, inner]))
    )


@given(metas())
def test_pieces_cover_the_array_once_and_do_not_overlap_in_the_file(meta: ArrayMeta) -> None:
    covered = []
    for index in meta.chunk_indices():
        layout = meta.layout(index)
        ends = [0]
        for piece in layout.inner_chunks:
            assert piece.offset >= ends[-1]
            ends.append(piece.offset + layout.inner_chunk_bytes + 4)
            grid: list[list[int]] = [[]]
            for origin, size in zip(piece.origin, piece.shape, strict=True):
                assert size > 0
                grid = [[*p, i] for p in grid for i in range(origin, origin + size)]
            covered += [tuple(p) for p in grid]
        assert ends[-1] == layout.index_offset <= layout.encoded_bytes
    everything = [()]
    for size in meta.shape:
        everything = [(*p, i) for p in everything for i in range(size)]  # type: ignore[misc]
    assert sorted(covered) == everything


def test_chunks_outside_the_grid() -> None:
    meta = ArrayMeta((4,), "int8", (2,))
    for index in ((2,), (-1,), (0, 0), ()):
        with pytest.raises(ValueError, match="outside"):
            meta.layout(index)


def test_the_root_has_the_summary() -> None:
    assert root_document({"step": 1})["attributes"] == {"ckpt": {"step": 1}}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_size_of_a_file_is_known_without_its_layout(case: Case) -> None:
    for index in case.meta.chunk_indices():
        size = case.meta.layout(index).encoded_bytes
        assert case.meta.encoded_bytes(index) == size
        assert case.meta.size_problem(index, size) is None


@pytest.mark.parametrize("size", [True, 4.0, -1, 1 << 63, "4", None])
def test_sizes_are_whole_numbers(size: Any) -> None:
    for sizes in ({"shape": (size, 6)}, {"chunk_shape": (size, 6)}, {"inner_chunk_shape": (size, 6)}):
        with pytest.raises((ValueError, TypeError)):
            ArrayMeta(**{"shape": (8, 6), "dtype": "float32", "chunk_shape": (4, 6)} | sizes)
    with pytest.raises(ValueError, match="dimensions"):
        ArrayMeta((8, 6), "float32", (4, 6), ())
