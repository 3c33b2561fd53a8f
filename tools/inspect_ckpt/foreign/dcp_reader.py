"""Open a directory of torch.distributed.checkpoint. Tensors are read in blocks, whatever the size of their chunks.

Only the objects that are not tensors need torch: each is a small file of torch.save, and is loaded with
``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.paths import Path
from ckpt.planning.boxes import Box

from .dcp_metadata import Chunk, Item, Metadata, Span, read_metadata
from .nesting import nest
from .raw import file_in, file_size, read_box, read_bytes
from .state import Bytes, ForeignState, ForeignTensor, ReadBox, UnsafeError, check_dtype
from .zip_tensors import check_archive, find_tensor

__all__ = ["METADATA_NAME", "OpenDcp", "open_dcp", "state_of_dcp"]

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 2 << 30


@dataclass(frozen=True)
class OpenDcp:
    """A directory with its metadata read: all tensors by dotted name, and the bytes of all other items."""

    path: str
    metadata: Metadata
    tensors: dict[str, ForeignTensor]
    objects: dict[str, tuple[str, Span]]

    def load_object(self, name: str) -> Any:
        """The object of this name. UnsafeError if that would need to run code, CheckpointCorruptError."""
        file, span = self.objects[name]
        return _load(read_bytes(file, span.offset, span.length), f"{file}: {name}")


def open_dcp(path: str, follow_links: bool) -> OpenDcp:
    """Read the metadata and look where the bytes of each tensor are. UnsafeError, CheckpointCorruptError."""
    where = file_in(path, METADATA_NAME, follow_links)
    size = file_size(where)
    if size > _MAX_METADATA_BYTES:
        raise CheckpointCorruptError(f"{where} is larger than any metadata")
    metadata = read_metadata(read_bytes(where, 0, size), where)
    files: dict[str, str] = {}

    def file_of(span: Span) -> str:
        if span.file not in files:
            files[span.file] = file_in(path, span.file, follow_links)
        if span.offset + span.length > file_size(files[span.file]):
            raise CheckpointCorruptError(f"{files[span.file]} is truncated: {where} says that more is in it")
        return files[span.file]

    tensors, objects = {}, {}
    for name, item in metadata.items.items():
        if item.span is not None:
            objects[name] = (file_of(item.span), item.span)
            continue
        assert item.dtype is not None
        check_dtype(item.dtype, (name,), path)
        parts = [(chunk.box, _chunk_reader(item, chunk, file_of(chunk.span), name)) for chunk in item.chunks]
        tensors[name] = ForeignTensor(item.dtype, item.shape, partial(_read_parts, parts))
    return OpenDcp(path, metadata, tensors, objects)


def state_of_dcp(opened: OpenDcp, *, string_keys: bool, skip_unsafe: bool) -> ForeignState:
    """The state that was saved. UnsafeError if an object in it could only be loaded by running code and is not to be
    skipped."""
    from .torch_state import placeholder, state_of

    leaves: dict[str, Any] = {}
    readers: dict[int, ReadBox] = {}
    for name, tensor in opened.tensors.items():
        leaves[name] = placeholder(tensor.dtype, tensor.shape)
        readers[id(leaves[name])] = tensor.read
    notes: list[str] = []
    unsafe = []
    for name in opened.objects:
        try:
            leaves[name] = opened.load_object(name)
        except UnsafeError as error:
            unsafe.append(f"{name}: {error}")
    if unsafe:
        shown = "; ".join(unsafe[:3]) + (f"; and {len(unsafe) - 3} more" if len(unsafe) > 3 else "")
        if not skip_unsafe:
            raise UnsafeError(f"{opened.path}: {shown}; --skip-unsafe leaves such leaves out")
        notes.append(f"left out, because it cannot be loaded without running code: {shown}")
    named: dict[Path, Any] = {}
    for name, leaf in leaves.items():
        keys = opened.metadata.keys.get(name, (name,))
        if keys in named:
            raise CheckpointCorruptError(f"{opened.path}: the keys {keys} lead to {name} and to another leaf")
        named[keys] = leaf
    nested = nest(named, opened.path, numbers=not string_keys)
    state = state_of("torch.distributed.checkpoint", nested, readers, opened.path, skip_unsafe, notes)
    if len(state.tensors) < len(opened.tensors):
        raise CheckpointCorruptError(f"{opened.path}: the keys of some tensors lead to the same place")
    return state


def _chunk_reader(item: Item, chunk: Chunk, file: str, name: str) -> ReadBox:
    """Reads boxes of a chunk, whose own coordinates begin at 0."""
    place = find_tensor(file, chunk.span.offset, chunk.span.length)
    if place is None:
        return _LoadedChunk(item, chunk, file, name).read
    if (place.dtype, place.shape) != (item.dtype, chunk.box.shape):
        raise CheckpointCorruptError(
            f"{file}: a chunk of {name} is {place.dtype} {list(place.shape)}, not {item.dtype} {list(chunk.box.shape)}"
        )
    return partial(read_box, file, place.offset, place.shape)


class _LoadedChunk:
    """A chunk that only torch can read: it is loaded as a whole, when first needed, and let go after its last byte."""

    def __init__(self, item: Item, chunk: Chunk, file: str, name: str) -> None:
        self._item, self._chunk, self._file, self._name = item, chunk, file, name
        self._reader: ReadBox | None = None

    def read(self, box: Box, out: Bytes) -> None:
        if self._reader is None:
            self._reader = self._load()
        self._reader(box, out)
        if all(o + n == size for o, n, size in zip(box.offset, box.shape, self._chunk.box.shape, strict=True)):
            self._reader = None

    def _load(self) -> ReadBox:
        import torch

        from .torch_state import memory_reader

        where = f"{self._file}: {self._name}"
        tensor = _load(read_bytes(self._file, self._chunk.span.offset, self._chunk.span.length), where)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self._chunk.box.shape:
            raise CheckpointCorruptError(f"{where} is not the tensor that the metadata describe")
        if str(tensor.dtype).removeprefix("torch.") != self._item.dtype:
            raise CheckpointCorruptError(f"{where} is {tensor.dtype}, not {self._item.dtype}")
        return memory_reader(tensor)


def _read_parts(parts: list[tuple[Box, ReadBox]], box: Box, out: Bytes) -> None:
    for place, read in parts:
        overlap = box.intersection(place)
        if overlap is not None:
            inner = Box(tuple(o - p for o, p in zip(overlap.offset, place.offset, strict=True)), overlap.shape)
            read(inner, out[tuple(overlap.slices(box.offset))])


def _load(data: bytes, where: str) -> Any:
    import torch

    check_archive(io.BytesIO(data), len(data), where)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeError(f"needs {_named(error)}, which weights_only does not load") from None
    except MemoryError:
        raise
    except Exception as error:  # torch raises whatever a damaged archive leads to
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointCorruptError(f"{where} cannot be loaded: {type(error).__name__}: {text}") from None


def _named(error: Exception) -> str:
    """The name that torch complains about, from its long message."""
    words = str(error).replace("\n", " ").split()
    if "GLOBAL" in words:
        after = words[words.index("GLOBAL") + 1 :]
        return after[0].strip("`'\",") if after else "something"
    return "something that it refuses"
