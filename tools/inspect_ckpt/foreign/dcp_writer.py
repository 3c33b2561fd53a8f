"""Write a step of ours as a directory of torch.distributed.checkpoint. Imports torch.

One data file as torch's own writer makes them: one archive of torch.save after the other. A tensor is written in
chunks of `_CHUNK_BYTES`, which a load on any number of ranks puts together.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import torch_dtype
from ckpt.storage.files import storage_errors

from ..blocks import boxes_of
from ..opening import CannotReadError
from .new_directory import NewDirectory
from .ours import Leaf, LeafReader

__all__ = ["write_dcp"]

_CHUNK_BYTES = 16 << 20
_DATA_NAME = "__0_0.distcp"
_METADATA_NAME = ".metadata"
_VERSION = "1.0.0"


def write_dcp(
    path: str,
    tensors: dict[str, Leaf],
    values: dict[str, tuple[tuple[str | int, ...], Any]],
    reader: LeafReader,
    progress: Callable[[int], None],
) -> None:
    """Write `tensors` by dotted name, and `values` by dotted name with their keys, into a new or empty directory.

    The metadata file appears last. `progress` is called with the bytes written since. CannotReadError, StorageError.
    """
    metadata = dcp.Metadata({}, planner_data={}, storage_data={}, storage_meta=dcp.StorageMeta())
    metadata.version = _VERSION
    with NewDirectory(path) as directory:
        with directory.create(_DATA_NAME) as stream, storage_errors("write", f"{path}/{_DATA_NAME}"):
            for name, (keys, value) in values.items():
                metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
                metadata.planner_data[name] = keys
                metadata.storage_data[dcp.MetadataIndex(name)] = _put(stream, value)
            for name, leaf in tensors.items():
                metadata.planner_data[name] = tuple(map(str, leaf.path)) if leaf.rank is None else (name,)
                _put_tensor(metadata, stream, name, leaf, reader, progress)
        with directory.create(_METADATA_NAME) as stream, storage_errors("write", f"{path}/{_METADATA_NAME}"):
            pickle.dump(metadata, stream)


def _put_tensor(
    metadata: dcp.Metadata,
    stream: BinaryIO,
    name: str,
    leaf: Leaf,
    reader: LeafReader,
    progress: Callable[[int], None],
) -> None:
    assert leaf.tensor is not None
    shape, dtype = leaf.tensor.shape, torch_dtype(leaf.tensor.dtype)
    chunks = []
    boxes = list(boxes_of(leaf.tensor, _CHUNK_BYTES)) if math.prod(shape) else [Box.whole(shape)]
    for number, box in enumerate(boxes):
        elements = reader.read(leaf, box) if box.elements else np.empty((0,), np.uint8)
        tensor = _tensor(elements, dtype, box.shape, name)
        index = dcp.MetadataIndex(name, torch.Size(box.offset), number)
        metadata.storage_data[index] = _put(stream, tensor)
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        progress(elements.nbytes)
    properties = dcp.TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _tensor(elements: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], name: str) -> torch.Tensor:
    data = torch.from_numpy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))
    try:
        return data.view(dtype).reshape(shape)
    except RuntimeError as error:
        raise CannotReadError(f"{name}: torch cannot hold {dtype} in memory as it is stored: {error}") from None


def _put(stream: BinaryIO, value: Any) -> _StorageInfo:
    offset = stream.tell()
    if isinstance(value, torch.Tensor):
        torch.save(value, stream)
    else:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        stream.write(buffer.getbuffer())
    return _StorageInfo(_DATA_NAME, offset, stream.tell() - offset)
