"""Read directories of torch.distributed.checkpoint (DCP): tensors in blocks, however large their chunks are.

Objects that are not tensors are small archives of torch.save. Torch loads them, with ``weights_only=True``.

The file ``.metadata`` is read without torch and without running code. It is a pickle of torch's dataclass Metadata. It
describes the tensors, with dtype, size and chunks; the objects, which are bytes; where in which file each of them is;
and the nested keys of the dotted names.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from reprlib import repr as short  # bounded: the full repr of nested lists can be exponentially large
from types import MappingProxyType
from typing import Any

from ckpt.errors import CheckpointCorruptError, ConversionError
from ckpt.formats.foreign_files import file_in, file_size, read_box, read_bytes
from ckpt.formats.lazy_state import (
    Bytes,
    FileTensor,
    LazyState,
    ReadBox,
    UnsafeError,
    check_dtype,
    nested_state,
    read_parts,
)
from ckpt.formats.pickles import Function, StandIn, find_tensor, load
from ckpt.paths import Path
from ckpt.planning.boxes import Box, tile_exactly
from ckpt.storage.dtypes import names as dtype_names


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
        (_METADATA, "TensorProperties"): _Dataclass,
        (_SHARDED, "TensorProperties"): _Dataclass,
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


# -- the directory -----------------------------------------------------------------------------------------------------

_METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 2 << 30


@dataclass(frozen=True)
class OpenDcp:
    """A DCP directory whose metadata were read: tensors by dotted name, and file and range of the other objects."""

    path: str
    metadata: Metadata
    tensors: dict[str, FileTensor]
    objects: dict[str, tuple[str, Span]]

    def load_object(self, name: str) -> Any:
        """Load the object of this name. UnsafeError if that would run code, CheckpointCorruptError."""
        from ckpt.formats.torch_file import load_object

        file, span = self.objects[name]
        return load_object(read_bytes(file, span.offset, span.length), f"{file}: {name}")


def open_dcp(path: str, follow_links: bool) -> OpenDcp:
    """Read the metadata, and find the bytes of each tensor. UnsafeError, CheckpointCorruptError, ConversionError."""
    where = file_in(path, _METADATA_NAME, follow_links)
    size = file_size(where)
    if size > _MAX_METADATA_BYTES:
        raise CheckpointCorruptError(f"{where} is larger than {_MAX_METADATA_BYTES} bytes")
    metadata = read_metadata(read_bytes(where, 0, size), where)
    files: dict[str, str] = {}

    def file_of(span: Span) -> str:
        if span.file not in files:
            files[span.file] = file_in(path, span.file, follow_links)
        if span.offset + span.length > file_size(files[span.file]):
            raise CheckpointCorruptError(f"{files[span.file]} is truncated: it is shorter than {where} says")
        return files[span.file]

    tensors = {}
    for name, tensor in metadata.tensors.items():
        check_dtype(tensor.dtype, (name,), path)
        parts = [(chunk.box, _chunk_reader(tensor, chunk, file_of(chunk.span), name)) for chunk in tensor.chunks]
        tensors[name] = FileTensor(tensor.dtype, tensor.shape, partial(read_parts, parts))
    objects = {name: (file_of(span), span) for name, span in metadata.objects.items()}
    return OpenDcp(path, metadata, tensors, objects)


def state_of_dcp(opened: OpenDcp, *, string_keys: bool, skip_unsafe: bool) -> LazyState:
    """Return the state that was saved, with nested keys.

    With `string_keys`, keys that read like numbers stay strings. UnsafeError if loading an object would run code,
    unless `skip_unsafe`.
    """
    from ckpt.formats.torch_file import placeholder, state_of

    leaves: dict[str, Any] = {}
    readers: dict[int, ReadBox] = {}
    for name, tensor in opened.tensors.items():
        leaves[name] = placeholder(tensor.dtype, tensor.shape)
        readers[id(leaves[name])] = tensor.read
    objects, notes = _load_objects(opened, skip_unsafe)
    leaves |= objects
    named: dict[Path, Any] = {}
    for name, leaf in leaves.items():
        keys = opened.metadata.keys.get(name, (name,))
        if keys in named:
            raise CheckpointCorruptError(f"{opened.path}: the keys {keys} belong to {name} and to another leaf")
        named[keys] = leaf
    nested = nested_state(named, opened.path, numbers=not string_keys)
    state = state_of("torch.distributed.checkpoint", nested, readers, opened.path, skip_unsafe, notes)
    if len(state.tensors) < len(opened.tensors):
        raise CheckpointCorruptError(f"{opened.path}: some tensors have the same keys")
    return state


def _load_objects(opened: OpenDcp, skip_unsafe: bool) -> tuple[dict[str, Any], list[str]]:
    """Load the objects that are not tensors. Return them, and notes about those that were left out."""
    loaded, unsafe = {}, []
    for name in opened.objects:
        try:
            loaded[name] = opened.load_object(name)
        except UnsafeError as error:
            unsafe.append(f"{name}: {error}")
    if not unsafe:
        return loaded, []
    shown = "; ".join(unsafe[:3]) + (f"; and {len(unsafe) - 3} more" if len(unsafe) > 3 else "")
    if not skip_unsafe:
        raise UnsafeError(f"{opened.path}: {shown}; --skip-unsafe leaves such leaves out")
    return loaded, [f"left out, because it cannot be loaded without running code: {shown}"]


def _chunk_reader(tensor: ChunkedTensor, chunk: Chunk, file: str, name: str) -> ReadBox:
    """Return a reader of a chunk, whose own coordinates begin at 0."""
    found = find_tensor(file, chunk.span.offset, chunk.span.length)
    if found is None:
        return _LoadedChunk(tensor.dtype, chunk, file, name).read
    if (found.dtype, found.shape) != (tensor.dtype, chunk.box.shape):
        expected = f"{tensor.dtype} {list(chunk.box.shape)}"
        raise CheckpointCorruptError(f"{file}: a chunk of {name} is {found.dtype} {list(found.shape)}, not {expected}")
    return partial(read_box, file, found.offset, found.shape)


class _LoadedChunk:
    """A chunk that only torch can read. It is loaded as a whole for its first box and released after its last."""

    def __init__(self, dtype: str, chunk: Chunk, file: str, name: str) -> None:
        self._dtype, self._chunk, self._file, self._name = dtype, chunk, file, name
        self._reader: ReadBox | None = None

    def read(self, box: Box, out: Bytes) -> None:
        if self._reader is None:
            self._reader = self._load()
        self._reader(box, out)
        if all(o + n == size for o, n, size in zip(box.offset, box.shape, self._chunk.box.shape, strict=True)):
            self._reader = None

    def _load(self) -> ReadBox:
        import torch

        from ckpt.formats.torch_file import load_object, memory_reader

        where = f"{self._file}: {self._name}"
        tensor = load_object(read_bytes(self._file, self._chunk.span.offset, self._chunk.span.length), where)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self._chunk.box.shape:
            raise CheckpointCorruptError(f"{where} is not the tensor that the metadata describe")
        if str(tensor.dtype).removeprefix("torch.") != self._dtype:
            raise CheckpointCorruptError(f"{where} is {tensor.dtype}, not {self._dtype}")
        return memory_reader(tensor)
