"""Safetensors: one file, or a directory of shards with an index, as Hugging Face writes it.

A file has 8 bytes with the length of the header (little-endian), the header in JSON, and the data:

    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"format": "pt"}}

Offsets count from the first byte of the data, which are little-endian, in C order, without gaps. A header is trusted
only if it fits the file: every byte of the data must belong to exactly one tensor.

The format is described at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from reprlib import repr as short  # bounded, however deep or long the value is
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import CheckpointCorruptError, ConversionError
from ckpt.formats.foreign_files import NewDirectory, file_in, file_size, foreign_file, read_box, read_bytes
from ckpt.formats.lazy_state import FileTensor, LazyState, NewTensor
from ckpt.storage.array_metadata import MAX_DIMENSIONS
from ckpt.storage.dtypes import stored
from ckpt.storage.files import storage_errors

METADATA = "__metadata__"
SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of other readers
_MAX_INDEX_BYTES = 1 << 30
_ALIGNMENT = 8

DTYPES = MappingProxyType(
    {f"{kind}int{bits}": f"{letter}{bits}" for kind, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)}
    | {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
    | {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
"""Names in a header, by torch's name of a dtype. Other dtypes have none."""

_TORCH_NAMES = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file that begins with `start` may be safetensors: after the length there must be a JSON object."""
    return len(start) > _LENGTH_BYTES and start[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def looks_like_torch(start: bytes) -> bool:
    """Whether a file that begins with `start` may be one of torch.save: a zip archive, or a pickle of protocol 2."""
    return start[:4] == b"PK\3\4" or start[:2] == b"\x80\2"


def is_safetensors_directory(path: str) -> bool:
    """Whether a directory contains safetensors files, or an index of them."""
    return any(name.endswith((SUFFIX, _INDEX_SUFFIX)) for name in os.listdir(path))


def open_file(path: str) -> LazyState:
    """Open one file. CheckpointCorruptError if the header contradicts itself or the file, ConversionError."""
    return LazyState("safetensors", {(name,): tensor for name, tensor in _tensors(path).items()})


def open_directory(path: str, follow_links: bool) -> LazyState:
    """Open the files that the index in a directory names, or its only file if there is no index.

    CheckpointCorruptError if index and files contradict each other; ConversionError if it is ambiguous what to read.
    """
    names = sorted(os.listdir(path))
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    chosen = [_INDEX_NAME] if _INDEX_NAME in indexes else indexes
    if len(chosen) > 1:
        raise ConversionError(f"{path} has several indexes: {', '.join(chosen)}; remove all but one")
    if chosen:
        return _indexed(path, chosen[0], follow_links)
    files = [name for name in names if name.endswith(SUFFIX)]
    single = [_SINGLE_NAME] if _SINGLE_NAME in files else files
    if len(single) != 1:
        raise ConversionError(f"{path} has {len(files)} {SUFFIX} files and no {_INDEX_NAME}; give one of the files")
    return open_file(file_in(path, single[0], follow_links))


def _indexed(directory: str, index_name: str, follow_links: bool) -> LazyState:
    weight_map = _weight_map(file_in(directory, index_name, follow_links))
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    found: dict[str, FileTensor] = {}
    notes = []
    for file, names in sorted(by_file.items()):
        tensors = _tensors(file_in(directory, file, follow_links))
        for name in names:
            if name not in tensors:
                raise CheckpointCorruptError(
                    f"{os.path.join(directory, file)} does not contain {name!r}, which the index names"
                )
            found[name] = tensors[name]
        left = [name for name in tensors if weight_map.get(name) != file]
        if left:
            notes.append(f"{file} holds {len(left)} more tensors that the index does not name: left out")
    return LazyState("safetensors", {(name,): found[name] for name in weight_map}, notes=notes)


def _weight_map(path: str) -> dict[str, str]:
    if file_size(path) > _MAX_INDEX_BYTES:
        raise CheckpointCorruptError(f"{path} is larger than any index")
    document = _json(read_bytes(path, 0, file_size(path)), path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointCorruptError(f"{path} does not contain a weight_map from names to files")
    for name in weight_map:
        _check_name(name, path)
    return weight_map


def _tensors(path: str) -> dict[str, FileTensor]:
    total = file_size(path)
    begin = read_bytes(path, 0, min(total, 16))
    if not looks_like_safetensors(begin):
        what = "a file of torch.save; give it by itself" if looks_like_torch(begin) else foreign_file(path)
        if what is not None:
            raise ConversionError(f"{path} is {what}")
    if total < _LENGTH_BYTES:
        _damaged(path, f"it has {total} bytes")
    length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES:
        _damaged(path, f"its header has a length of {length} bytes, more than the allowed {_MAX_HEADER_BYTES}")
    if length > total - _LENGTH_BYTES:
        _damaged(path, f"its header has a length of {length} bytes, the file has {total}: truncated")
    header = _json(read_bytes(path, _LENGTH_BYTES, length), path)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict):
        _damaged(path, f"its {METADATA} is not an object")
    start = _LENGTH_BYTES + length
    tensors, spans = {}, []
    for name, entry in header.items():
        _check_name(name, path)
        dtype, shape, first, last = _entry(path, name, entry)
        spans.append((first, last, name))
        tensors[name] = FileTensor(dtype, shape, partial(read_box, path, start + first, shape))
    _check_spans(path, spans, total - start)
    return tensors


def _entry(path: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return torch's dtype, the shape, and the first and the last byte (excluded) of a tensor."""
    if not isinstance(entry, dict):
        _damaged(path, f"its entry of {name!r} is not an object")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape):
        _damaged(path, f"{name!r} has the shape {short(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(path, f"{name!r} has the data_offsets {short(offsets)}")
    code = entry.get("dtype")
    dtype = _TORCH_NAMES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise ConversionError(f"{path}: {name!r} is of dtype {short(code)}; known dtypes are {', '.join(_TORCH_NAMES)}")
    expected = math.prod(shape) * stored(dtype).itemsize
    if offsets[1] - offsets[0] != expected:
        _damaged(path, f"{name!r} is {code} {shape}, which is {expected} bytes, but has the data_offsets {offsets}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )


def _check_spans(path: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """CheckpointCorruptError if not every byte of the data belongs to exactly one tensor."""
    at, before = 0, ""
    for first, last, name in sorted(spans):
        if last > data_bytes:
            _damaged(path, f"{name!r} ends at byte {last} of the data, the file has {data_bytes}: truncated")
        if first < at:
            _damaged(path, f"{name!r} and {before!r} overlap")
        if first > at:
            _damaged(path, f"there are {first - at} bytes before {name!r} that belong to no tensor")
        at, before = last, name
    if at != data_bytes:
        _damaged(path, f"there are {data_bytes - at} bytes after the last tensor")


def _json(data: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    try:
        document = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"its header is not JSON: {error}" if path.endswith(SUFFIX) else f"it is not JSON: {error}")
    if not isinstance(document, dict):
        _damaged(path, "its header is not a JSON object")
    return document


def _check_name(name: str, path: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in name):
        _damaged(path, f"the name {name!r} is not valid Unicode")


def _damaged(path: str, why: str) -> NoReturn:
    raise CheckpointCorruptError(f"{path} is damaged: {why}")


# -- writing -----------------------------------------------------------------------------------------------------------


def write_safetensors(
    path: str,
    tensors: list[NewTensor],
    max_shard_bytes: int,
    progress: Callable[[int], None],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> list[str]:
    """Write `tensors`, in this order, into the new or empty directory `path`. Return the names of the files.

    Each shard has at most `max_shard_bytes` of data, or one tensor. `beside` are further files, by name. All files
    appear together.
    `progress` is called with the bytes written since its last call. ConversionError, StorageError, and what the blocks
    raise.
    """
    shards = _shards(tensors, max_shard_bytes)
    headers = [_header(shard) for shard in shards]
    with NewDirectory(path) as directory:
        for name, content in beside.items():
            with directory.create(name) as stream, storage_errors("write", os.path.join(path, name)):
                stream.write(content)
        names = [_SINGLE_NAME]
        if len(shards) > 1:
            names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        for name, header, shard in zip(names, headers, shards, strict=True):
            with storage_errors("write", os.path.join(path, name)):
                _write_shard(directory, name, header, shard, progress)
        if len(shards) > 1:
            weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(tensor.nbytes for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            with directory.create(_INDEX_NAME) as stream:
                stream.write(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
            names = [*names, _INDEX_NAME]
    return [*names, *beside]


def _shards(tensors: list[NewTensor], max_bytes: int) -> list[list[NewTensor]]:
    """Begin a shard where the next tensor would not fit. In a shard, large elements come first, so all are aligned."""
    shards: list[list[NewTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return [sorted(shard, key=lambda tensor: -stored(tensor.dtype).itemsize) for shard in shards]


def _header(shard: list[NewTensor]) -> bytes:
    """Return the length and the header, padded with spaces so that the data are aligned."""
    document: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for tensor in shard:
        offsets = [at, at := at + tensor.nbytes]
        document[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise ConversionError(
            f"a header of {len(text)} bytes is more than other readers accept; lower the maximum size of a shard"
        )
    return len(text).to_bytes(8, "little") + text


def _write_shard(
    directory: NewDirectory, name: str, header: bytes, shard: list[NewTensor], progress: Callable[[int], None]
) -> None:
    with directory.create(name) as stream:
        stream.write(header)
        for tensor in shard:
            written = 0
            for _, block in tensor.blocks():
                data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                stream.write(data.data)
                written += data.nbytes
                progress(data.nbytes)
            assert written == tensor.nbytes, f"{tensor.name}: {written} bytes for {tensor.nbytes}"
