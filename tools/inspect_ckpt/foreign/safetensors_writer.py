"""Write safetensors as Hugging Face lays them out: one file, or shards and an index."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.storage.dtypes import stored
from ckpt.storage.files import storage_errors

from ..opening import CannotReadError
from .new_directory import NewDirectory
from .safetensors_format import DTYPES, INDEX_NAME, MAX_HEADER_BYTES, METADATA, SINGLE_NAME

__all__ = ["NewTensor", "write_safetensors"]

_ALIGNMENT = 8

Blocks = Iterator[np.ndarray[Any, np.dtype[Any]]]


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write. `blocks` gives its elements in C order, some at a time, in the dtype they are written in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * stored(self.dtype).itemsize


def write_safetensors(
    path: str, tensors: list[NewTensor], max_shard_bytes: int, tick: Callable[[int], None]
) -> list[str]:
    """Write `tensors`, in this order, into directory `path`, which must not exist or be empty; returns the file names.

    Each shard has at most `max_shard_bytes` of data, or one tensor. All files appear together, the index last. `tick`
    is called with the bytes written since. CannotReadError, StorageError, and what the blocks raise.
    """
    shards = _shards(tensors, max_shard_bytes)
    headers = [_header(shard) for shard in shards]
    with NewDirectory(path) as directory:
        names = [SINGLE_NAME]
        if len(shards) > 1:
            names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        for name, header, shard in zip(names, headers, shards, strict=True):
            with storage_errors("write", os.path.join(path, name)):
                _write_shard(directory, name, header, shard, tick)
        if len(shards) > 1:
            weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(tensor.nbytes for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            with directory.create(INDEX_NAME) as stream:
                stream.write(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
            names = [*names, INDEX_NAME]
    return names


def _shards(tensors: list[NewTensor], max_bytes: int) -> list[list[NewTensor]]:
    """Cut where the next tensor would not fit. In a shard, dtypes with big elements come first, so all are aligned."""
    shards: list[list[NewTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return [sorted(shard, key=lambda tensor: -stored(tensor.dtype).itemsize) for shard in shards]


def _header(shard: list[NewTensor]) -> bytes:
    """The length and the header, padded with spaces such that the data are aligned."""
    document: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for tensor in shard:
        offsets = [at, at := at + tensor.nbytes]
        document[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CannotReadError(f"a header of {len(text)} bytes is more than readers take; lower --max-shard-size")
    return len(text).to_bytes(8, "little") + text


def _write_shard(
    directory: NewDirectory, name: str, header: bytes, shard: list[NewTensor], tick: Callable[[int], None]
) -> None:
    with directory.create(name) as stream:
        stream.write(header)
        for tensor in shard:
            written = 0
            for block in tensor.blocks():
                data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                stream.write(data.data)
                written += data.nbytes
                tick(data.nbytes)
            assert written == tensor.nbytes, f"{tensor.name}: {written} bytes for {tensor.nbytes}"
