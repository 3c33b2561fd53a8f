"""Steps for other readers, and the content that they must find.

The expected content is a mapping of paths to tensors. All ranks make the same values from the names.
"""

from __future__ import annotations

import enum
import hashlib
import io
from argparse import Namespace
from collections import deque
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID

import torch
from torch import nn

from ckpt import Checkpointer, PerRank, Staging, Unregistered
from ckpt.storage import dtypes
from tests.support import layouts
from tests.support.saves import save_here

DTYPES = dtypes.names()

_SHAPES: dict[str, tuple[int, ...]] = {"matrix": (37, 50), "cube": (3, 5, 41), "row": (1, 1301), "scalar": ()}
_SMALL = Staging(inner_bytes=700, file_bytes=10_000)


def bits(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits, also of nan. Arithmetic does not preserve all of them, a save must."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def many_dtypes() -> dict[str, Any]:
    """Return every dtype in every shape; ``empty`` has no elements, and ``odd names`` need escapes."""
    state: dict[str, Any] = {
        kind: {name: bits(f"{kind} {name}", getattr(torch, name), shape) for name in DTYPES}
        for kind, shape in _SHAPES.items()
    }
    state["empty"] = {name: torch.zeros((0, 4), dtype=torch.uint8).view(getattr(torch, name)) for name in _ONE_BYTE}
    state["empty"] |= {name: torch.zeros((4, 0), dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}
    odd: list[str | int] = ["a b", "zarr.json", "7", "ä/ö", "", ".", "..", "%", "c.0", "packed", "k" * 300, 7]
    state["odd names"] = {name: bits(f"odd {name}", torch.float32, (9, 8)) for name in odd}
    return state


_ONE_BYTE = ("uint8", "float8_e4m3fn", "float8_e5m2", "bits8")


def save_many_dtypes(rank: int, world_size: int, folder: Path) -> None:
    """Save ``plain`` and ``zstd``, with shards and several files for each rank, and ``large``, with large chunks."""
    state = {**many_dtypes(), "own": PerRank(torch.full((800,), rank)), "lr": 0.5}
    layouts = {"plain": _SMALL, "zstd": replace(_SMALL, compression="zstd"), "large": Staging()}
    for name, staging in layouts.items():
        with Checkpointer(folder / name, staging=staging) as checkpointer:
            save_here(checkpointer, state, 5)


def save_layouts(rank: int, world_size: int, folder: Path) -> dict[tuple[str | int, ...], tuple[str, list[int], bytes]]:
    """Save tensors divided over ranks in every way, and return the dtype, shape and bytes of each whole tensor.

    ``values`` has leaves that are not tensors.
    """
    state = layouts.build(world_size)
    tied = layouts.full_tensor("tied", (40, 30))
    state |= {"tied": tied, "again": tied, "own": PerRank(torch.full((rank + 5, 3), float(rank)))}
    state["values"] = values() | {name: value for name, (value, _) in of_types().items()}
    file = io.BytesIO(b"abc")
    file.seek(2)
    state["file"] = file
    with Checkpointer(folder / "layouts", staging=Staging(inner_bytes=512, file_bytes=8192)) as checkpointer:
        save_here(checkpointer, state, 12)
    return {path: _whole(tensor) for path, tensor in _tensors(state)}


def values() -> dict[str, Any]:
    """Return a value of each kind that JSON lacks."""
    return {
        "nan": float("nan"),
        "infinity": float("-inf"),
        "betas": (0.9, 0.999),
        "big": 2**70,
        "ids": {3: "three", "b": None},
        "nested": [{3: "three", "b": None, "a": True}, {"a": [], "b": {}}],
        "dtype": torch.bfloat16,
        "raw": b"\x00\xff",
        "complex": 1 - 2j,
        "half": "\ud800",
        "list": [1, [2.5, (None,)]],
        "set": {1, "a", frozenset({2})},
        "deque": deque([1, (2,)], 3),
        "args": Namespace(lr=0.1, paths=[Path("/a b"), PureWindowsPath("C:/x")]),
        "times": [
            date(2024, 2, 29),
            datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=timezone(timedelta(hours=1), "CET")),
            time(1, 2, tzinfo=UTC),
            timedelta(-1, 5, 6),
        ],
        "numbers": [Decimal("1.50"), Fraction(-1, 3), UUID(int=7), range(9, 0, -2), slice(1, None), bytearray(b"\xff")],
    }


class Kind(enum.Enum):
    ONE = 1


class Traits(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    first: int
    second: Any


def of_types() -> dict[str, tuple[Any, Any]]:
    """Return values of types that other programs may lack, each with its placeholder there."""
    here = __name__
    return {
        "device": (torch.device("cuda", 1), "cuda:1"),
        "size": (torch.Size((2, 3)), (2, 3)),
        "enum": (Kind.ONE, (f"{here}.Kind", "ONE")),
        "flag": (Traits.A | Traits.B, (f"{here}.Traits", 3)),
        "pair": (Pair(1, Kind.ONE), (f"{here}.Pair", (("first", 1), ("second", (f"{here}.Kind", "ONE"))))),
        "registered": (Unregistered("a.B", [1, (2,)]), ("a.B", [1, (2,)])),
    }


def _whole(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    from torch.distributed.tensor import DTensor

    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return dtypes.torch_dtype_name(whole.dtype), list(whole.shape), bytes_of(whole)


def _tensors(state: Any, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], torch.Tensor]]:
    if isinstance(state, nn.Module):
        state = state.state_dict()
    if isinstance(state, dict):
        return [found for key, item in state.items() for found in _tensors(item, (*path, key))]
    return [(path, state)] if isinstance(state, torch.Tensor) else []
