"""What a state may hold comes back as it was: every dtype, every memory layout, every name, every plain value."""

from __future__ import annotations

import os
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt import AsyncCallsQueue, Checkpointer, PerRank, StateError, StateMismatchError
from tests.support.saves import save_here
from tests.support.selection import FULL

DTYPES = sorted({str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}.items())
_STRANGE = ("q", "bits", "float4", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3")
_STRANGE += ("uint4", "uint5", "uint6", "uint7")
WITH_KERNELS = [
    dtype
    for name, dtype in DTYPES
    if name.removeprefix("torch.") in ("int16", "int32", "int64", "uint16", "uint32", "uint64")
    or not name.removeprefix("torch.").startswith(_STRANGE)
]

# torch warns of complex32 once, and of quantized tensors
pytestmark = [pytest.mark.filterwarnings("ignore:ComplexHalf"), pytest.mark.filterwarnings("ignore:.*quantized")]

_SIZES = ({"file_bytes": 1024}, {"file_bytes": 1 << 20}, {"file_bytes": 1024, "compression": "zstd"})

RoundTrip = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture
def round_trip(queue: AsyncCallsQueue, tmp_path: Path) -> RoundTrip:
    """Save one state, restore it into another; with sizes that make small tensors have several files."""

    def run(source: Any, target: Any, **options: Any) -> Any:
        staging = ckpt.Staging(**({"inner_bytes": 256, "file_bytes": 1024} | options))
        with Checkpointer(tempfile.mkdtemp(dir=tmp_path), queue=queue, staging=staging) as checkpointer:
            save_here(checkpointer, source, 1)
            assert checkpointer.restore(target) == 1
        return target

    return run


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """All bit patterns, so also every nan and denormal number; of bool only its two."""
    elements = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    data = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", WITH_KERNELS, ids=str)
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
def test_every_dtype_is_bit_exact(round_trip: RoundTrip, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    shapes = [(), (1,), (0,), (3, 0, 2), (5,), (40, 30), (3, 7, 41)]
    state = {str(shape): _random(dtype, *shape) for shape in shapes}
    state["strided"] = _random(dtype, 20, 60)[1::2, ::3]
    state["transposed"] = _random(dtype, 31, 17).t()
    target = {name: torch.zeros(tensor.shape, dtype=torch.uint8).to(dtype) for name, tensor in state.items()}
    target["transposed"] = _random(dtype, 31, 17).t()
    target["strided"] = _random(dtype, 20, 60)[1::2, ::3]
    before = {name: tensor.data_ptr() for name, tensor in target.items()}
    round_trip(state, target, **sizes)
    for name, tensor in state.items():
        assert target[name].dtype == dtype
        assert _bytes(target[name]) == _bytes(tensor), name
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == before


def test_every_dtype_is_known_or_refused_by_name(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, queue=queue) as checkpointer:
        for step, (name, dtype) in enumerate(DTYPES):
            if dtype in WITH_KERNELS:
                continue
            try:
                tensor = torch.empty(8, dtype=dtype)
            except RuntimeError:
                continue  # torch cannot make one either
            tensor.untyped_storage().fill_(37)
            if tensor.is_quantized:
                with pytest.raises(StateError, match="a/b: this tensor is quantized"):
                    save_here(checkpointer, {"a": {"b": tensor}}, step)
                continue
            save_here(checkpointer, {"a": {"b": tensor}}, step)
            other = torch.empty(8, dtype=dtype)
            checkpointer.restore({"a": {"b": other}}, step)
            assert bytes(other.untyped_storage().tolist()) == bytes(tensor.untyped_storage().tolist()), name


def test_sources_that_are_views(round_trip: RoundTrip) -> None:
    base = torch.randn(24, 36, dtype=torch.complex64)
    half = torch.randn(9, 8, dtype=torch.complex64).to(torch.complex32)
    state = {
        "expanded": torch.randn(1, 40).expand(30, 40),
        "expanded_number": torch.tensor(3.5).expand(700),
        "conjugate": base.conj(),
        "conjugate_part": base.conj()[3:20, 5:30],
        "negative": base.conj().imag,
        "conjugate_half": half.conj(),
        "flipped": torch.arange(600).reshape(20, 30).flip(0),
        "permuted": torch.randn(8, 9, 10).permute(2, 0, 1),
        "channels_last": torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.randn(50, 20)),
    }
    assert state["negative"].is_neg()
    assert state["conjugate"].is_conj()
    target = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    round_trip(state, target)
    for name, tensor in state.items():
        assert _bytes(target[name]) == _bytes(tensor), name


def test_targets_that_are_views(round_trip: RoundTrip) -> None:
    state = {
        "conjugate": torch.randn(24, 36, dtype=torch.complex64),
        "negative": torch.randn(24, 36),
        "every_second": torch.randn(30, 20),
        "leaf": torch.randn(40, 10),
        "small": torch.randn(3),
    }
    base = torch.zeros(24, 36, dtype=torch.complex64)
    parameter = nn.Parameter(torch.zeros(40, 10))
    memory = torch.zeros(60, 40)
    other = torch.zeros(9)
    target = {
        "conjugate": torch.zeros(24, 36, dtype=torch.complex64).conj(),
        "negative": base.conj().imag,
        "every_second": memory[::2, ::2],
        "leaf": parameter,
        "small": other[1::3],
    }
    round_trip(state, target)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name
    assert torch.equal(base.imag, -state["negative"])
    assert not memory[1::2].any()
    assert parameter.requires_grad
    assert not other[::3].any()


class _Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 20)
        self.head = nn.Linear(20, 60, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied_then", [True, False])
def test_tied_weights_are_stored_once(queue: AsyncCallsQueue, tmp_path: Path, tied_then: bool) -> None:
    source, target = _Tied(), _Tied(tied_then)
    with Checkpointer(tmp_path, queue=queue, staging=ckpt.Staging(inner_bytes=1000)) as checkpointer:
        save_here(checkpointer, {"model": source}, 1)
        with ckpt.open(tmp_path, 1) as checkpoint:
            assert checkpoint.summary["tensors"] == 1
        checkpointer.restore({"model": target})
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert torch.equal(target.head.weight, source.embed.weight)
    assert (target.head.weight is target.embed.weight) == tied_then


def test_untied_weights_are_not_taken_for_tied_ones(round_trip: RoundTrip) -> None:
    memory = torch.arange(100.0)
    state = {"a": memory[:50], "b": memory[:50].view(5, 10), "c": memory[1:51], "d": memory.view(torch.int32)[:50]}
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    round_trip(state, target)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name


def test_numpy_arrays(round_trip: RoundTrip) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((30, 40))
    readonly = rng.standard_normal((30, 10))
    readonly.flags.writeable = False
    state = {
        "plain": matrix,
        "fortran": np.asfortranarray(matrix),
        "strided": matrix[::3, 1::2],
        "reversed": matrix[::-1, ::-2],
        "readonly": readonly,
        "number": np.array(2.5),
        "empty": np.zeros((0, 3), np.int16),
        "bool": matrix > 0,
        "uint16": np.arange(300, dtype=np.uint16),
        "complex": matrix + 1j,
        "bfloat16": matrix.astype(ml_dtypes.bfloat16),
        "bfloat16_strided": matrix.astype(ml_dtypes.bfloat16)[:, ::2],
        "float8": matrix.astype(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": matrix.astype(ml_dtypes.float8_e5m2),
    }
    target = {name: np.zeros_like(array) for name, array in state.items()}
    target["reversed"] = np.zeros_like(matrix)[::-1, ::-2]
    target["bfloat16_strided"] = np.zeros(matrix.shape, ml_dtypes.bfloat16)[:, ::2]
    same = dict(target)
    round_trip(state, target)
    for name, array in state.items():
        assert target[name] is same[name], name
        assert target[name].dtype == array.dtype
        assert target[name].tobytes() == array.tobytes(), name


def test_an_array_that_cannot_be_written_is_refused_before_anything_is_restored(
    queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    frozen = np.zeros(5)
    frozen.flags.writeable = False
    target = {"a": torch.zeros(3), "b": frozen}
    with Checkpointer(tmp_path, queue=queue) as checkpointer:
        save_here(checkpointer, {"a": torch.ones(3), "b": np.ones(5)}, 1)
        with pytest.raises(StateMismatchError, match="read-only: b "):
            checkpointer.restore(target)
    assert not target["a"].any()


@pytest.mark.parametrize("array", [np.zeros(3, ">f4"), np.zeros(3, "U4"), np.array([None]), np.zeros(2, "M8[s]")])
def test_arrays_that_cannot_be_stored_are_refused_by_name(
    queue: AsyncCallsQueue, tmp_path: Path, array: np.ndarray[Any, Any]
) -> None:
    with (
        Checkpointer(tmp_path, queue=queue) as checkpointer,
        pytest.raises(StateError, match=r"data/1/x: .*numpy arrays of dtype"),
    ):
        checkpointer.save_request({"data": [0, {"x": array}]}, 1)


class _Stateful:
    """What `torch.distributed.checkpoint.stateful.Stateful` asks for."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.history = torch.full((5,), float(position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "history": self.history.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]
        self.history = state_dict["history"]


class _WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=True)
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": torch.tensor([1.5, 2.5]), "n": 3}, (1, "two", 3.0), 17])
def test_modules_with_buffers_and_extra_state(round_trip: RoundTrip, extra: Any) -> None:
    source = _WithExtraState(extra)
    source.norm(torch.randn(8, 6))
    source.mask[1] = False
    other = {"scale": torch.zeros(2), "n": 0} if isinstance(extra, dict) else None
    target = _WithExtraState(other)
    round_trip({"model": source}, {"model": target})
    assert str(target.state_dict()) == str(source.state_dict())
    assert str(target.extra) == str(extra)


def test_stateful_objects_and_plain_values(round_trip: RoundTrip) -> None:
    def state(number: int) -> dict[str, Any]:
        return {
            "loader": _Stateful(number),
            "list": [number, [number, (number, "x")], {"k": number}],
            "ordered": OrderedDict(b=number, a=None),
            "numbers": {"nan": float("nan"), "inf": -float("inf"), "big": 10**40 + number, "c": 1j * number},
            "scalar": np.float32(number),
            "bytes": bytes([number]),
            "dtype": torch.bfloat16 if number else torch.float32,
            3: "int key",
            "3": "str key",
            "empty": {},
            "mixed": [torch.full((2,), number), number],
            "own": PerRank(number),
        }

    source, target = state(5), state(0)
    mixed = target["mixed"][0]
    round_trip(source, target)
    assert (target["loader"].position, target["loader"].history.tolist()) == (5, [5.0] * 5)
    assert target["mixed"][0] is mixed
    for key in source.keys() - {"loader", "own"}:
        assert repr(target[key]) == repr(source[key]), key
    assert target["own"].value == 5


def test_random_number_generators_go_on_where_they_were(round_trip: RoundTrip) -> None:
    def state() -> dict[str, Any]:
        python = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "python": PerRank([python[0], list(python[1]), python[2]]),
            "numpy": np.random.default_rng(3).bit_generator.state,
        }

    torch.manual_seed(5)
    random.seed(5)
    saved = state()
    expected = torch.rand(3), random.random()
    target = round_trip(saved, state())
    torch.set_rng_state(target["torch"])
    version, numbers, last = target["python"].value
    random.setstate((version, tuple(numbers), last))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert target["numpy"] == saved["numpy"]


_KEYS = st.one_of(
    st.integers(-(2**40), 2**40),
    st.text(max_size=30),
    st.sampled_from(
        (
            *("..", ".", "", "/", "../../etc/passwd", "a/b", " ", "a b", "c", "c.0", "c.0.0", "parts", "packed"),
            *("zarr.json", "state.json", "intent.json", "__rank_00000", "__box_00000", "~root", "~long", "%2F"),
            *("x" * 300, "日本語" * 40, "0", "00", "-1", "rank_00000.json", "\x00", "\n", "A", "a"),
        )
    ),
    st.sampled_from([0, -1, 1]),
)
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=9),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
_TENSORS = st.builds(
    lambda shape, dtype, seed: torch.full(shape, seed, dtype=dtype),
    st.lists(st.integers(0, 6), max_size=3),
    st.sampled_from([torch.float32, torch.int8, torch.bfloat16, torch.complex64]),
    st.integers(0, 100),
)
_STATES = st.recursive(
    st.one_of(_VALUES, _TENSORS),
    lambda children: st.dictionaries(_KEYS, children, max_size=5) | st.lists(children, min_size=1, max_size=3),
    max_leaves=12,
)


def _cleared(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _cleared(item) for key, item in state.items()}
    if isinstance(state, list):
        return [_cleared(item) for item in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _all_paths(folder: Path) -> set[str]:
    return {os.path.join(top, name) for top, folders, files in os.walk(folder) for name in folders + files}


@given(st.dictionaries(_KEYS, _STATES, min_size=1, max_size=6))
@settings(max_examples=60 if FULL else 20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back_and_nothing_is_written_elsewhere(
    queue: AsyncCallsQueue, tmp_path: Path, state: dict[str | int, Any]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    root = folder / "outer" / "root"
    with Checkpointer(root, queue=queue) as checkpointer:
        save_here(checkpointer, state, 1)
        target = _cleared(state)
        assert checkpointer.restore(target) == 1
    assert _equal(target, state)
    above = {str(folder / "outer"), str(root)}
    assert {path for path in _all_paths(folder) if not path.startswith(f"{root}/")} == above
    assert set(os.listdir(root)) <= {"step_00000001", ".pending", ".abandoned", ".owner", ".readers"}


def test_a_tensor_whose_elements_share_memory_is_not_restored_into(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", queue=queue) as checkpointer:
        save_here(checkpointer, {"a": torch.ones(3, 4), "b": torch.zeros(2)}, 1)
        untouched = torch.full((2,), 7.0)
        with pytest.raises(StateMismatchError, match="a is read-only or expanded"):
            checkpointer.restore({"a": torch.zeros(3, 1).expand(3, 4), "b": untouched})
        assert untouched.tolist() == [7, 7]


def test_equal_content_has_equal_files_whatever_was_staged_before(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """The gaps between chunks are zero, also in a slot that held other data."""
    small = {"a": torch.ones(3), "b": torch.arange(5)}
    with Checkpointer(tmp_path / "fresh", queue=queue) as checkpointer:
        save_here(checkpointer, small, 1)
    with Checkpointer(tmp_path / "used", queue=queue) as checkpointer:
        for step in (1, 2):
            save_here(checkpointer, {"other": torch.full((2000,), 0x55, dtype=torch.uint8)}, step)
        for step in (3, 4):
            save_here(checkpointer, small, step)
    pack = Path("packs", "000", "rank_00000_000")
    expected = (tmp_path / "fresh" / "step_00000001" / pack).read_bytes()
    for step in (3, 4):
        assert (tmp_path / "used" / f"step_{step:08d}" / pack).read_bytes() == expected


def test_a_key_that_is_not_unicode_is_refused_by_name(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path / "root", queue=queue) as checkpointer,
        pytest.raises(StateError, match=r"layer: the key '\\ud800' is not valid Unicode"),
    ):
        checkpointer.save_request({"layer": {"\ud800": torch.ones(2)}}, 1)
