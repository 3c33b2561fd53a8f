"""The file ``.metadata`` of a torch.distributed.checkpoint directory, without torch and without running what is in it.

It is a pickle of torch's dataclass Metadata. Read here are: the tensors with dtype, size and chunks; the items that are
bytes; where in which file each is; and how the dotted names come out of nested keys.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from reprlib import repr as short  # bounded: lists that hold each other twice, again and again, have endless forms
from types import MappingProxyType
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.planning.boxes import Box, tile_exactly
from ckpt.storage.dtypes import names

from ..opening import CannotReadError
from .restricted import Function, StandIn, load

__all__ = ["Chunk", "Item", "Metadata", "Span", "read_metadata"]


@dataclass(frozen=True)
class Span:
    """Bytes of a file, relative to the directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the bytes that torch.save made of it."""

    box: Box
    span: Span


@dataclass(frozen=True)
class Item:
    """A tensor with its chunks, which make it up without gap or overlap; or, without `dtype`, an object that torch.save
    made the bytes at `span` of."""

    dtype: str | None
    shape: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    span: Span | None = None


@dataclass(frozen=True)
class Metadata:
    """The items by dotted name, and the nested keys of each name that has some."""

    items: dict[str, Item]
    keys: dict[str, tuple[str | int, ...]]


class _Dataclass(StandIn):
    """Any of torch's dataclasses: its pickle sets a dict of fields."""

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
    """A key of the table that says where things are: name and, for chunks, offset."""

    __slots__ = ()

    @property
    def key(self) -> tuple[Any, Any]:
        return self.fields["fqn"], self.fields.get("offset")

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.key == other.key


def _nothing(*_: Any) -> None:
    """Stands in for what is of no interest: layouts, memory formats, the path where it was saved."""


def _sizes(numbers: Any = ()) -> tuple[int, ...]:
    result = tuple(itertools.islice(numbers, 65))
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in result) or len(result) > 64:
        raise ValueError("a size is no list of whole numbers")
    return result


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where some classes were in older versions
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
        **{("torch", name): name for name in names()},
    }
)


def read_metadata(data: bytes, where: str) -> Metadata:
    """Read the bytes of ``.metadata``; `where` is their path, for messages.

    UnsafeError if they name anything that does not belong there, CheckpointCorruptError if they make no sense.
    """
    document = load(data, _KNOWN, where)
    if not isinstance(document, _Metadata):
        raise CheckpointCorruptError(f"{where} is no metadata of torch.distributed.checkpoint")
    try:
        fields = document.fields
        places = {index.key: _span(info.fields) for index, info in (fields.get("storage_data") or {}).items()}
        items = {_text(name): _item(name, about, places) for name, about in fields["state_dict_metadata"].items()}
        return Metadata(items, _keys(fields.get("planner_data"), items))
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{where}: {error}") from None
    except CannotReadError:
        raise
    except Exception as error:  # the stand-ins hold whatever the pickle says
        raise CheckpointCorruptError(f"{where} is damaged: {type(error).__name__}: {error}") from None


def _item(name: str, about: Any, places: dict[tuple[Any, Any], Span]) -> Item:
    if isinstance(about, _BytesItem):
        return Item(None, span=_place(places, name, None))
    if not isinstance(about, _Tensor):
        raise CheckpointCorruptError(f"{name} is neither a tensor nor bytes")
    dtype = about.fields["properties"].fields[0]
    if not isinstance(dtype, str):
        raise CheckpointCorruptError(f"{name} has no dtype")
    shape = _sizes(about.fields["size"])
    boxes = [Box(_sizes(c.fields["offsets"]), _sizes(c.fields["sizes"])) for c in about.fields["chunks"]]
    _check_cover(name, shape, boxes)
    return Item(dtype, shape, tuple(Chunk(box, _place(places, name, box.offset)) for box in boxes if box.elements))


def _place(places: dict[tuple[Any, Any], Span], name: str, offset: tuple[int, ...] | None) -> Span:
    try:
        return places[name, offset]
    except KeyError:
        at = "" if offset is None else f" at {list(offset)}"
        raise CheckpointCorruptError(f"it does not say where {name}{at} is stored") from None


def _span(fields: dict[str, Any]) -> Span:
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if fields.get("transform_descriptors"):
        raise CannotReadError(
            f"{_text(file)} was written through the extensions {short(fields['transform_descriptors'])}; only torch "
            "with these can read it: load it there and save it again without"
        )
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CheckpointCorruptError(f"{_text(file)} holds something from {short(offset)}, {short(length)} bytes long")
    return Span(_text(file), offset, length)


def _check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """The boxes make up the tensor: they lie inside, no two overlap, and their sizes add up."""
    for box in boxes:
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            raise CheckpointCorruptError(f"{name} {list(shape)} has a chunk of other dimensions")
        if any(o + n > size for o, n, size in zip(box.offset, box.shape, shape, strict=True)):
            raise CheckpointCorruptError(f"{name} {list(shape)} has a chunk outside, at {list(box.offset)}")
    if not tile_exactly(shape, boxes):
        covered = sum(box.elements for box in boxes)
        raise CheckpointCorruptError(
            f"{name} has {covered} of {math.prod(shape)} elements, or some twice, in its chunks"
        )


def _keys(planner_data: Any, items: dict[str, Item]) -> dict[str, tuple[str | int, ...]]:
    """Metadata of other planners than the default one have other data, or none: then names are keys."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: tuple(keys)
        for name, keys in planner_data.items()
        if name in items and keys and isinstance(keys, tuple | list) and all(type(key) in (str, int) for key in keys)
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointCorruptError(f"{short(value)} is no name")
    return value
