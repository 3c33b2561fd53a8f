"""Read directories of torch.distributed.checkpoint (DCP): tensors in blocks, however large their chunks are.

Objects that are not tensors are small archives of torch.save. Torch loads them, with ``weights_only=True``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpt.errors import CheckpointCorruptError
from ckpt.formats.dcp_metadata import Chunk, ChunkedTensor, Metadata, Span, read_metadata
from ckpt.formats.foreign_files import file_in, file_size, read_box, read_bytes
from ckpt.formats.lazy_state import Bytes, FileTensor, LazyState, ReadBox, UnsafeError, check_dtype, read_parts
from ckpt.formats.nesting import nested_state
from ckpt.formats.pickles import find_tensor
from ckpt.paths import Path
from ckpt.planning.boxes import Box

__all__ = ["OpenDcp", "open_dcp", "state_of_dcp"]

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
