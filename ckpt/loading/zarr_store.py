"""A published step as a store of zarr-python 3: every tensor by its name, read where it lies. Does not import torch.

The keys are those of a Zarr hierarchy (`ckpt.storage.zarr_names`). A chunk of an array is a range of a pack file, which
zarr-python decodes and checks itself. A tensor that is not one array on disk is shown as one array, whose chunks are
put together from the boxes when they are read. Its boxes have names, too, but are not listed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from ckpt.loading.fetch import Fetch
from ckpt.loading.index import CheckpointIndex, StoredTensor
from ckpt.loading.lazy import Checkpoint, block_shape, open_checkpoint
from ckpt.native import crc32c
from ckpt.paths import Path, display
from ckpt.planning.boxes import Box
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.chunk_layout import checksum_to_bytes
from ckpt.storage.documents import canonical_json
from ckpt.storage.files import storage_errors
from ckpt.storage.pack_index import ChunkPlace, StoredArray
from ckpt.storage.regular_files import DamagedFileError
from ckpt.storage.roots import is_object_url
from ckpt.storage.zarr_names import (
    array_document,
    array_names,
    chunk_index,
    group_documents,
    named_document,
    tensor_name,
)

try:
    from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

    from ckpt.storage.zarr_plugin import register
except ImportError as error:
    raise ImportError("ckpt.zarr_store needs zarr-python 3: pip install 'ckpt-inprocess[zarr]'") from error


def open_store(
    path: str | os.PathLike[str], step: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> ZarrStore:
    """Open a published step: see `ckpt.zarr_store`."""
    register()
    return ZarrStore(open_checkpoint(path, step, storage_options=storage_options), storage_options)


@dataclass(frozen=True)
class _Assembled:
    """A tensor that is not one array on disk, as an array of blocks of rows."""

    name: str
    tensor: StoredTensor
    meta: ArrayMeta

    @classmethod
    def of(cls, path: Path, rank: int | None, tensor: StoredTensor) -> _Assembled:
        about = {"name": list(path), **({} if rank is None else {"rank": rank})}
        meta = ArrayMeta(tensor.shape, tensor.dtype, block_shape(tensor), attributes={"ckpt": about})
        return cls(display(path), tensor, meta)

    def chunk(self, index: CheckpointIndex, position: tuple[int, ...]) -> bytes:
        """Return an encoded chunk. CheckpointCorruptError if bytes of a box are damaged."""
        first, last = self.meta.box_of(position)
        box = Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))
        elements = Fetch(index).array(self.name, self.tensor, box)
        missing = self.meta.chunk_shape[0] - len(elements)
        data = np.pad(elements.view(np.uint8), [(0, missing)] + [(0, 0)] * (elements.ndim - 1)).tobytes()
        return data + checksum_to_bytes(crc32c(data))


class ZarrStore(Store):
    """A step as a read-only store. Of any thread and event loop; a copy made by pickle opens the same step again.

    While it is open, retention does not remove the step, as far as leases and locks reach. Each read checks that the
    step is still the one that was opened: CheckpointNotFoundError if it was removed or replaced since, so an array
    never has chunks of two steps. A pack file that is missing or too short is a CheckpointCorruptError, not a missing
    chunk, which zarr-python would read as zeros; checksums are checked by zarr-python.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, checkpoint: Checkpoint, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(read_only=True)
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._is_open = True
        self._checkpoint = checkpoint
        arrays = array_names(checkpoint.index.packs)
        self._arrays: dict[str, StoredArray | _Assembled] = dict(arrays)
        nodes = {name: array_document(name, array) for name, array in arrays.items()}
        unlisted = {name for name, array in arrays.items() if not array.is_whole}
        for path, rank, tensor in checkpoint.index.stored_tensors():
            name = tensor_name(path, rank)
            if name not in nodes:
                self._arrays[name] = assembled = _Assembled.of(path, rank, tensor)
                nodes[name] = named_document(name, assembled.meta)
        listed = {name: node for name, node in nodes.items() if name not in unlisted}
        listed |= group_documents(listed)
        root = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {"ckpt": checkpoint.summary},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": listed},
        }
        documents = {name: canonical_json(node) for name, node in (nodes | listed).items()}
        self._documents = {"zarr.json": canonical_json(root)}
        self._documents |= {f"{name}/zarr.json": document for name, document in documents.items()}
        self._listed = sorted(listed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrStore) and self.__reduce__() == other.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        path = self._checkpoint.path
        place = path if is_object_url(path) else os.path.abspath(path)
        return _open_again, (place, self._checkpoint.summary["save"], self._storage_options)

    def __repr__(self) -> str:
        return f"ZarrStore({self._checkpoint.path!r})"

    def with_read_only(self, read_only: bool = False) -> ZarrStore:
        """Return this store; ValueError for one that could be written to."""
        if not read_only:
            raise ValueError("a published checkpoint cannot be written to; open it with mode='r'")
        return self

    def close(self) -> None:
        """Release the step, which may be removed then. Idempotent."""
        super().close()
        self._checkpoint.close()

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the value of `key`, or a part of it; None if there is no such key."""
        data = self._document(key, byte_range)
        if data is None:
            data = self._chunk(key, byte_range)
        buffer = (prototype or default_buffer_prototype()).buffer
        return None if data is None else buffer.from_bytes(data)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the value of `key` as `get_sync` does. Files are read in another thread."""
        if key in self._documents:
            return self.get_sync(key, prototype=prototype, byte_range=byte_range)
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges))

    async def exists(self, key: str) -> bool:
        return key in self._documents or self._find(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the bytes of a value, without reading it. FileNotFoundError if there is no such key."""
        if key in self._documents:
            return len(self._documents[key])
        found = self._find(key)
        if found is None:
            raise FileNotFoundError(key)
        array, position = found
        if isinstance(array, _Assembled):
            return array.meta.encoded_bytes(position)
        return self._checkpoint.index.packs.place(array, position).nbytes

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        for key in self._keys(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self._keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        below = f"{prefix.rstrip('/')}/".lstrip("/")
        children = {name[len(below) :].partition("/")[0] for name in self._listed if name.startswith(below)}
        for child in sorted(children):
            yield child
        for key in self._own_keys(below.rstrip("/")):
            yield key[len(below) :]

    def _keys(self, prefix: str) -> Iterator[str]:
        for name in ("", *self._listed):
            if f"{name}/".startswith(prefix) or prefix.startswith(name):
                yield from (key for key in self._own_keys(name) if key.startswith(prefix))

    def _own_keys(self, name: str) -> Iterator[str]:
        """Yield the keys of a group or array, without those of its members."""
        below = f"{name}/".lstrip("/")
        if f"{below}zarr.json" in self._documents:
            yield f"{below}zarr.json"
        if (array := self._arrays.get(name)) is not None:
            for position in array.meta.chunk_indices():
                yield below + array.meta.chunk_key(position)

    def _find(self, key: str) -> tuple[StoredArray | _Assembled, tuple[int, ...]] | None:
        """Return the array and the index of the chunk under `key`."""
        name, _, chunk = key.rpartition("/")
        array = self._arrays.get(name)
        position = None if array is None else chunk_index(array.meta, chunk)
        return None if array is None or position is None else (array, position)

    def _document(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        document = self._documents.get(key)
        return None if document is None else document[slice(*_bounds(byte_range, len(document)))]

    def _chunk(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        found = self._find(key)
        if found is None:
            return None
        array, position = found
        try:
            if isinstance(array, _Assembled):
                data = array.chunk(self._checkpoint.index, position)
                data = data[slice(*_bounds(byte_range, len(data)))]
            else:
                data = self._read(display(array.path), self._checkpoint.index.packs.place(array, position), byte_range)
        except CheckpointError:
            self._checkpoint.check()  # raises if the step was removed: then nothing is damaged
            raise
        self._checkpoint.check()
        return data

    def _read(self, tensor: str, place: ChunkPlace, byte_range: ByteRequest | None) -> bytes:
        start, stop = _bounds(byte_range, place.nbytes)
        path = os.path.join(self._checkpoint.path, place.file)
        try:
            with storage_errors("read", path), closing(self._checkpoint.index.source.open(place.file)) as file:
                data = bytes(file.read(place.offset + start, stop - start))
            if len(data) != stop - start:
                raise DamagedFileError(f"ends at offset {place.offset + start + len(data)}")
        except DamagedFileError as damage:
            raise CheckpointCorruptError(f"tensor {tensor}: {path} {damage}; restore from another step") from None
        return data


def _bounds(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    """Return the first and the last byte (excluded) of a value of `size` that zarr-python asks for."""
    match byte_range:
        case None:
            return 0, size
        case RangeByteRequest(start, end):
            return min(start, size), max(min(start, size), min(end, size))
        case OffsetByteRequest(offset):
            return min(offset, size), size
        case SuffixByteRequest(suffix):
            return max(0, size - suffix), size
    raise ValueError(f"Unexpected byte_range, got {byte_range}.")


def _open_again(path: str, save: str, storage_options: Mapping[str, Any] | None = None) -> ZarrStore:
    store = open_store(path, storage_options=storage_options)
    found = store._checkpoint.summary["save"]
    if found != save:
        store.close()
        raise CheckpointNotFoundError(f"{path} was replaced: it is the save {found}, not {save}; open it again")
    return store
