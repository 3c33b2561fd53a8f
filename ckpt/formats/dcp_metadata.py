"""The file ``.metadata`` of torch.distributed.checkpoint (DCP), read without torch and without running code.

It is a pickle of torch's dataclass Metadata. It describes the tensors, with dtype, size and chunks; the objects, which
are bytes; where in which file each of them is; and the nested keys of the dotted names.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from reprlib import repr as short  # bounded: the full repr of nested lists can be exponentially large
from types import MappingProxyType
from typing import Any

from ckpt.errors import CheckpointCorruptError, ConversionError
from ckpt.formats.pickles import Function, StandIn, load
from ckpt.planning.boxes import Box, tile_exactly
from ckpt.storage.dtypes import names as dtype_names

__all__ = ["Chunk", "ChunkedTensor", "Metadata", "Span", "read_metadata"]


@dataclass(frozen=True)
class Span:
    """A range of bytes of a file in the directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the range that torch.save wrote it to."""

    box: Box
    span: Span


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor with chunks that cover it without gap or overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Metadata:
    """Tensors, and the ranges of other objects, by dotted name; and the nested keys of the names that have some."""

    tensors: dict[str, ChunkedTensor]
    objects: dict[str, Span]
    keys: dict[str, tuple[str | int, ...]]


class _Dataclass(StandIn):
    """Stands in for a dataclass of torch, whose pickle sets a dict of fields."""

    __slots__ = ()


class _Metadata(_Dataclass):
    __slots__ = ()


class _Tensor(_Dataclass):
    __slots__ = ()


class _BytesItem(_Dataclass):
    __slots__ = ()


class _Properties(_Dataclass):
    __slots__ = ()


class _Index(_Dataclass):
    """A key of the table of storage locations: a name and, for chunks, an offset."""

    __slots__ = ()

    @property
    def key(self) -> tuple[Any, Any]:
        return self.fields["fqn"], self.fields.get("offset")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.key == other.key


def _nothing(*_: Any) -> None:
    """Stands in for what is ignored: layouts, memory formats, and the path of the checkpoint."""


def _sizes(numbers: Any = ()) -> tuple[int, ...]:
    result = tuple(itertools.islice(numbers, 65))
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in result) or len(result) > 64:
        raise ValueError("a size is not a list of whole numbers")
    return result


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # the module of some classes in older versions
_KNOWN = MappingProxyType(
    {
        (_METADATA, "Metadata"): _Metadata,
        (_METADATA, "TensorStorageMetadata"): _Tensor,
        (_METADATA, "BytesStorageMetadata"): _BytesItem,
        (_METADATA, "ChunkStorageMetadata"): _Dataclass,
        (_METADATA, "MetadataIndex"): _Index,
        (_METADATA, "StorageMeta"): _Dataclass,
        (_METADATA, "TensorProperties"): _Properties,
        (_SHARDED, "TensorProperties"): _Properties,
        (_METADATA, "_MEM_FORMAT_ENCODING"): Function(_nothing),
        (_SHARDED, "MEM_FORMAT_ENCODING"): Function(_nothing),
        (_FILES, "_StorageInfo"): _Dataclass,
        ("torch", "Size"): Function(_sizes),
        ("torch.serialization", "_get_layout"): Function(_nothing),
        ("collections", "OrderedDict"): Function(OrderedDict),
        **{
            (module, kind): Function(_nothing)
            for module in ("pathlib", "pathlib._local")
            for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
        },
        **{("torch", name): name for name in dtype_names()},
    }
)


def read_metadata(data: bytes, where: str) -> Metadata:
    """Read the bytes of ``.metadata``; `where` is their path, for messages.

    UnsafeError if they name anything that does not belong there, CheckpointCorruptError if they are inconsistent.
    """
    document = load(data, _KNOWN, where)
    if not isinstance(document, _Metadata):
        raise CheckpointCorruptError(f"{where} is not metadata of torch.distributed.checkpoint")
    try:
        fields = document.fields
        spans = {index.key: _span(info.fields) for index, info in (fields.get("storage_data") or {}).items()}
        tensors, objects = {}, {}
        for key, entry in fields["state_dict_metadata"].items():
            name = _text(key)
            if isinstance(entry, _BytesItem):
                objects[name] = _span_of(spans, name, None)
            else:
                tensors[name] = _tensor(name, entry, spans)
        return Metadata(tensors, objects, _keys(fields.get("planner_data"), {*tensors, *objects}))
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{where}: {error}") from None
    except ConversionError:
        raise
    except Exception as error:  # the fields are whatever the pickle contains
        raise CheckpointCorruptError(f"{where} is damaged: {type(error).__name__}: {error}") from None


def _tensor(name: str, entry: Any, spans: dict[tuple[Any, Any], Span]) -> ChunkedTensor:
    if not isinstance(entry, _Tensor):
        raise CheckpointCorruptError(f"{name} is neither a tensor nor bytes")
    dtype = entry.fields["properties"].fields[0]
    if not isinstance(dtype, str):
        raise CheckpointCorruptError(f"{name} has no dtype")
    shape = _sizes(entry.fields["size"])
    boxes = [Box(_sizes(c.fields["offsets"]), _sizes(c.fields["sizes"])) for c in entry.fields["chunks"]]
    _check_cover(name, shape, boxes)
    chunks = tuple(Chunk(box, _span_of(spans, name, box.offset)) for box in boxes if box.elements)
    return ChunkedTensor(dtype, shape, chunks)


def _span_of(spans: dict[tuple[Any, Any], Span], name: str, offset: tuple[int, ...] | None) -> Span:
    try:
        return spans[name, offset]
    except KeyError:
        at = "" if offset is None else f" at {list(offset)}"
        raise CheckpointCorruptError(f"it does not contain the location of {name}{at}") from None


def _span(fields: dict[str, Any]) -> Span:
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if fields.get("transform_descriptors"):
        raise ConversionError(
            f"{_text(file)} was written with the extensions {short(fields['transform_descriptors'])}; only torch "
            "with these extensions can read it: load it there and save it again without them"
        )
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CheckpointCorruptError(f"{_text(file)} has the invalid range {short(offset)}, {short(length)}")
    return Span(_text(file), offset, length)


def _check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """CheckpointCorruptError if the boxes do not cover the tensor, or overlap, or lie outside of it."""
    for box in boxes:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            raise CheckpointCorruptError(f"{name} {list(shape)} has a chunk with another number of dimensions")
        if any(o + n > size for o, n, size in zip(box.offset, box.shape, shape, strict=True)):
            raise CheckpointCorruptError(f"{name} {list(shape)} has a chunk outside of it, at {list(box.offset)}")
    if not tile_exactly(shape, boxes):
        covered = sum(box.elements for box in boxes)
        raise CheckpointCorruptError(
            f"{name} has {covered} of {math.prod(shape)} elements in its chunks, or some of them twice"
        )


def _keys(planner_data: Any, names: set[str]) -> dict[str, tuple[str | int, ...]]:
    """Return the nested keys of names. Planners other than the default one have other data, or none: names are keys."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: tuple(keys)
        for name, keys in planner_data.items()
        if name in names and keys and isinstance(keys, tuple | list) and all(type(key) in (str, int) for key in keys)
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointCorruptError(f"{short(value)} is not a name")
    return value
