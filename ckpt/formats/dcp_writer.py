"""Write a torch.distributed.checkpoint (DCP) directory. Imports torch.

There is one data file, as torch's own writer writes it: one archive of torch.save after the other. A tensor is written
in its blocks, each a chunk, which a load on any number of ranks assembles.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt.errors import ConversionError
from ckpt.formats.foreign_files import NewDirectory
from ckpt.formats.lazy_state import NewTensor
from ckpt.paths import Path
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import torch_dtype
from ckpt.storage.files import storage_errors

_DATA_NAME = "__0_0.distcp"
_METADATA_NAME = ".metadata"
DCP_VERSION = "1.0.0"
"""The version of the metadata, as torch writes it."""

Values = dict[str, tuple[Path, Any]]
"""Values that are not tensors by dotted name, with the keys that lead to each."""


def write_dcp(path: str, tensors: list[NewTensor], values: Values, progress: Callable[[int], None]) -> list[str]:
    """Write tensors and values by dotted name into a new or empty directory. Return the names of the files.

    `progress` is called with the bytes written since its last call. ConversionError, StorageError, and what the blocks
    raise.
    """
    metadata = dcp.Metadata({}, planner_data={}, storage_data={}, storage_meta=dcp.StorageMeta())
    metadata.version = DCP_VERSION
    with NewDirectory(path) as directory:
        with directory.create(_DATA_NAME) as stream, storage_errors("write", f"{path}/{_DATA_NAME}"):
            for name, (keys, value) in values.items():
                metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
                metadata.planner_data[name] = keys
                metadata.storage_data[dcp.MetadataIndex(name)] = _write_object(stream, value)
            for tensor in tensors:
                metadata.planner_data[tensor.name] = tuple(map(str, tensor.keys))
                _write_tensor(metadata, stream, tensor, progress)
        with directory.create(_METADATA_NAME) as stream, storage_errors("write", f"{path}/{_METADATA_NAME}"):
            pickle.dump(metadata, stream)
    return [_DATA_NAME, _METADATA_NAME]


def flat_values(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Flatten a value as torch.distributed.checkpoint does: dicts are nodes, and so are lists that contain dicts.

    An empty dict has no leaf.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat_values((*path, str(key)), item)
    elif type(value) is list and not _is_leaf(value):
        for number, item in enumerate(value):
            yield from flat_values((*path, number), item)
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or all(_is_leaf(item) for item in value)


def _write_tensor(metadata: dcp.Metadata, stream: BinaryIO, tensor: NewTensor, progress: Callable[[int], None]) -> None:
    dtype, shape = torch_dtype(tensor.dtype), torch.Size(tensor.shape)
    chunks = []
    blocks = tensor.blocks() if math.prod(shape) else iter([(Box.whole(tensor.shape), np.empty((0,), np.uint8))])
    for number, (box, elements) in enumerate(blocks):
        index = dcp.MetadataIndex(tensor.name, torch.Size(box.offset), number)
        metadata.storage_data[index] = _write_object(stream, _as_torch(elements, dtype, box.shape, tensor.label))
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        progress(elements.nbytes)
    properties = dcp.TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[tensor.name] = dcp.TensorStorageMetadata(properties, shape, chunks)


def _as_torch(elements: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], name: str) -> torch.Tensor:
    data = torch.from_numpy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))
    try:
        return data.view(dtype).reshape(shape)
    except RuntimeError as error:
        raise ConversionError(f"{name}: torch cannot hold {dtype} in memory as it is stored: {error}") from None


def _write_object(stream: BinaryIO, value: Any) -> _StorageInfo:
    offset = stream.tell()
    if isinstance(value, torch.Tensor):
        torch.save(value, stream)
    else:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        stream.write(buffer.getbuffer())
    return _StorageInfo(_DATA_NAME, offset, stream.tell() - offset)
