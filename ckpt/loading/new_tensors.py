"""Read tensors of a step into new torch tensors, or boxes of them into given ones. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch

from ckpt.collection import without_collection
from ckpt.errors import CheckpointError
from ckpt.loading.bounce_buffer import BouncedRead, as_numpy, read_bounced
from ckpt.loading.fetch import BoxRead, Fetch
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.direct_reads import WholeReads
from ckpt.storage.dtypes import torch_dtype

_MIN_THREADS, _MAX_THREADS = 4, 16
_K = TypeVar("_K")


def read_tensors(
    index: CheckpointIndex,
    stored: Mapping[_K, tuple[Path, StoredTensor]],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> dict[_K, torch.Tensor]:
    """Read whole tensors, which have paths for messages, into new ones with the keys given."""
    made: dict[_K, torch.Tensor] = {}
    numbers: list[int] = []
    addresses: list[int] = []
    direct: list[BoxRead] = []
    bounced: list[BouncedRead] = []
    with without_collection():
        for key, (path, tensor) in stored.items():
            target = made[key] = _new(path, tensor, dtype, device)
            if not target.is_cpu or target.dtype != torch_dtype(tensor.dtype):
                bounced.append(BouncedRead(display(path), tensor, Box.whole(tensor.shape), target))
            elif tensor.boxes[0].is_one_block:
                numbers.append(tensor.boxes[0].number)
                addresses.append(target.data_ptr())
            else:
                direct.append(BoxRead(display(path), tensor, Box.whole(tensor.shape), as_numpy(target)))
    fetch = _fetch(index)
    fetch.read(direct, WholeReads(np.array(numbers, np.int64), np.array(addresses, np.int64)))
    read_bounced(fetch, bounced)
    return made


def _new(
    path: Path, stored: StoredTensor, dtype: torch.dtype | None, device: torch.device | str | None
) -> torch.Tensor:
    as_stored = torch_dtype(stored.dtype)
    convert = dtype is not None and as_stored.is_floating_point and as_stored.itemsize > 1
    try:
        target = torch.empty(stored.shape, dtype=dtype if convert else as_stored, device=device)
    except RuntimeError as error:  # more bytes than there is memory, or a device that is not there
        raise CheckpointError(f"{display(path)}: no memory for {stored.dtype}{list(stored.shape)}: {error}") from error
    if target.is_meta:
        raise ValueError("a tensor on the meta device has no elements to read")
    return target


def read_tensor(
    index: CheckpointIndex,
    name: str,
    tensor: StoredTensor,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> torch.Tensor:
    """Read a whole tensor; a floating-point one as `dtype`, except float8."""
    return read_tensors(index, {name: ((name,), tensor)}, dtype, device)[name]


def read_into(index: CheckpointIndex, wanted: Iterable[tuple[str, StoredTensor, Box, torch.Tensor]]) -> None:
    """Read boxes of tensors, which have names for messages, into tensors of their shapes on any device."""
    fetch = _fetch(index)
    direct: list[BoxRead] = []
    bounced: list[BouncedRead] = []
    for name, tensor, box, given in wanted:
        target = given.detach()
        plain = target.is_cpu and not target.is_conj() and not target.is_neg()
        if plain and target.dtype == torch_dtype(tensor.dtype):
            direct.append(BoxRead(name, tensor, box, as_numpy(target)))
        else:
            bounced.append(BouncedRead(name, tensor, box, target))
    fetch.read(direct)
    read_bounced(fetch, bounced)


def _fetch(index: CheckpointIndex) -> Fetch:
    return Fetch(index, threads=min(max(_MIN_THREADS, torch.get_num_threads()), _MAX_THREADS))
