"""Write a file that `torch.load` reads with ``weights_only=True``, tensors in blocks. Imports torch.

It is what torch.save writes: a zip archive that is not compressed, with the nested state as a pickle, in which a tensor
is a view of a numbered storage, and the bytes of each storage. `torch.save` needs a whole tensor in memory, this does
not.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch

from ckpt.errors import ConversionError
from ckpt.formats.foreign_files import new_file
from ckpt.formats.lazy_state import NewTensor
from ckpt.paths import Path, display
from ckpt.storage.dtypes import stored, torch_dtype
from ckpt.values.containers import Container, rebuild

_PROTOCOL = 2  # of pickle, as torch.save uses it
_ALIGNMENT = 64
_ZIP64_BYTES = 1 << 30
_FOLDER = "archive"
_STORAGES = MappingProxyType(
    {"float32": torch.FloatStorage, "float64": torch.DoubleStorage, "float16": torch.HalfStorage}
    | {"bfloat16": torch.BFloat16Storage, "bool": torch.BoolStorage, "uint8": torch.ByteStorage}
    | {"int8": torch.CharStorage, "int16": torch.ShortStorage, "int32": torch.IntStorage, "int64": torch.LongStorage}
    | {"complex64": torch.ComplexFloatStorage, "complex128": torch.ComplexDoubleStorage}
)
"""Types of storages that torch's oldest readers know, by dtype; others are untyped."""


def write_torch_file(
    path: str,
    tensors: list[NewTensor],
    values: Mapping[Path, Any],
    containers: Mapping[Path, Container],
    progress: Callable[[int], None],
) -> None:
    """Write the state with these leaves, in these containers, as a new file. Names of the same tensor share its bytes.

    The containers are those that `loadable` returns. In lists, None replaces items that are not among the leaves.
    `progress` is called with the bytes written since its last call. ConversionError, StorageError, and what the blocks
    raise.
    """
    storages: dict[object, _Storage] = {}
    leaves: dict[Path, Any] = {}
    for tensor in tensors:
        if tensor.data in storages:
            progress(tensor.nbytes)  # written under another name
        storage = storages.setdefault(tensor.data, _Storage(str(len(storages)), tensor))
        if tensor.keys in leaves:
            raise ConversionError(f"two leaves would both be at {display(tensor.keys)}; exclude one")
        leaves[tensor.keys] = _View(storage)
    if both := leaves.keys() & values.keys():
        raise ConversionError(f"two leaves would both be at {display(next(iter(both)))}; exclude one")
    leaves |= values
    try:
        state = rebuild(_without_gaps(leaves, containers), containers)
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from None
    pickled = io.BytesIO()
    _Pickler(pickled, _PROTOCOL).dump(state)
    with new_file(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with _record(archive, stream, name, len(content)) as record:
                record.write(content)
        for storage in storages.values():
            with _record(archive, stream, f"data/{storage.key}", storage.tensor.nbytes) as record:
                for _, block in storage.tensor.blocks():
                    data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                    record.write(data.data)
                    progress(data.nbytes)


def loadable(containers: Mapping[Path, Container]) -> dict[Path, Container]:
    """Return the containers with those replaced that ``torch.load(weights_only=True)`` does not load.

    Named tuples become tuples, deques lists, and namespaces dicts.
    """
    replaced = {"namedtuple": Container("tuple"), "deque": Container("list"), "Namespace": None}
    found = {path: replaced.get(container.kind, container) for path, container in containers.items()}
    return {path: container for path, container in found.items() if container is not None}


def _without_gaps(leaves: dict[Path, Any], containers: Mapping[Path, Container]) -> dict[Path, Any]:
    """Return the leaves, with None where a sequence would have no item before another one."""
    present: dict[Path, set[int]] = {path: set() for path, each in containers.items() if each.kind in ("list", "tuple")}
    for path in leaves:
        for number, key in enumerate(path):
            if path[:number] in present and isinstance(key, int):
                present[path[:number]].add(key)
    gaps = {
        (*path, number): None
        for path, items in present.items()
        for number in range(max(items, default=-1))
        if number not in items
    }
    return leaves | gaps


@dataclass(frozen=True, eq=False)
class _Storage:
    """The bytes of a tensor, as the record ``data/<key>``."""

    key: str
    tensor: NewTensor


@dataclass(frozen=True, eq=False)
class _View:
    """Stands in the state for a tensor, all of a storage."""

    storage: _Storage


class _Pickler(pickle.Pickler):
    """Pickles a state as torch.save does, with `_View` in the place of tensors."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        tensor = value.tensor
        kind = _STORAGES.get(tensor.dtype, torch.UntypedStorage)
        size = tensor.nbytes // (stored(tensor.dtype).itemsize if tensor.dtype in _STORAGES else 1)
        return ("storage", kind, value.key, "cpu", size)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _View):
            return NotImplemented
        tensor = value.storage.tensor
        shape = tensor.shape
        strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        about = (value.storage, 0, shape, strides, False, hooks)
        if tensor.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, about
        return torch._utils._rebuild_tensor_v3, (*about, torch_dtype(tensor.dtype))


@contextlib.contextmanager
def _record(archive: zipfile.ZipFile, stream: BinaryIO, name: str, nbytes: int) -> Iterator[Any]:
    """Give a record of the archive to write. Its bytes are aligned in the file, for readers that map it."""
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    is_large = nbytes > _ZIP64_BYTES
    begin = stream.tell() + 30 + len(info.filename) + (20 if is_large else 0) + 4
    padding = -begin % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=is_large) as record:
        yield record
