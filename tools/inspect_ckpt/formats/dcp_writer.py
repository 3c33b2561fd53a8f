"""Write a torch.distributed.checkpoint (DCP) directory. Imports torch.

There is one data file, as torch's own writer writes it: one archive of torch.save after the other. A tensor is written
in chunks of at most `_CHUNK_BYTES`, which a load on any number of ranks assembles.
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

from ckpt.loading.fetch import Fetch
from ckpt.paths import Path
from ckpt.planning.boxes import Box
from ckpt.storage.dtypes import torch_dtype
from ckpt.storage.files import storage_errors

from ..output import CannotReadError
from ..step import block_boxes
from .ckpt_step import TensorLeaf
from .files import NewDirectory

__all__ = ["Values", "flat_values", "write_dcp"]

_CHUNK_BYTES = 16 << 20
_DATA_NAME = "__0_0.distcp"
_METADATA_NAME = ".metadata"
_VERSION = "1.0.0"

Values = dict[str, tuple[Path, Any]]
"""Values that are not tensors by dotted name, with the keys that lead to each."""


def write_dcp(
    path: str, tensors: dict[str, TensorLeaf], values: Values, fetch: Fetch, progress: Callable[[int], None]
) -> None:
    """Write tensors and values by dotted name into a new or empty directory. The metadata file appears last.

    `fetch` reads the tensors. `progress` is called with the bytes written since its last call. CannotReadError,
    StorageError, and what reading raises.
    """
    metadata = dcp.Metadata({}, planner_data={}, storage_data={}, storage_meta=dcp.StorageMeta())
    metadata.version = _VERSION
    with NewDirectory(path) as directory:
        with directory.create(_DATA_NAME) as stream, storage_errors("write", f"{path}/{_DATA_NAME}"):
            for name, (keys, value) in values.items():
                metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
                metadata.planner_data[name] = keys
                metadata.storage_data[dcp.MetadataIndex(name)] = _write_object(stream, value)
            for name, leaf in tensors.items():
                metadata.planner_data[name] = tuple(map(str, leaf.path)) if leaf.rank is None else (name,)
                _write_tensor(metadata, stream, name, leaf, fetch, progress)
        with directory.create(_METADATA_NAME) as stream, storage_errors("write", f"{path}/{_METADATA_NAME}"):
            pickle.dump(metadata, stream)


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


def _write_tensor(
    metadata: dcp.Metadata,
    stream: BinaryIO,
    name: str,
    leaf: TensorLeaf,
    fetch: Fetch,
    progress: Callable[[int], None],
) -> None:
    shape, dtype = leaf.tensor.shape, torch_dtype(leaf.tensor.dtype)
    chunks = []
    boxes = list(block_boxes(leaf.tensor, _CHUNK_BYTES)) if math.prod(shape) else [Box.whole(shape)]
    for number, box in enumerate(boxes):
        elements = fetch.array(leaf.label, leaf.tensor, box) if box.elements else np.empty((0,), np.uint8)
        tensor = _as_torch(elements, dtype, box.shape, name)
        index = dcp.MetadataIndex(name, torch.Size(box.offset), number)
        metadata.storage_data[index] = _write_object(stream, tensor)
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        progress(elements.nbytes)
    properties = dcp.TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _as_torch(elements: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], name: str) -> torch.Tensor:
    data = torch.from_numpy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))
    try:
        return data.view(dtype).reshape(shape)
    except RuntimeError as error:
        raise CannotReadError(f"{name}: torch cannot hold {dtype} in memory as it is stored: {error}") from None


def _write_object(stream: BinaryIO, value: Any) -> _StorageInfo:
    offset = stream.tell()
    if isinstance(value, torch.Tensor):
        torch.save(value, stream)
    else:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        stream.write(buffer.getbuffer())
    return _StorageInfo(_DATA_NAME, offset, stream.tell() - offset)
