"""Open safetensors: one file, or a directory of them with an index, as Hugging Face writes it.

A header is believed only where it fits the file: every byte of the data belongs to exactly one tensor.
"""

from __future__ import annotations

import json
import math
import os
from functools import partial
from reprlib import repr as short  # bounded, however deep or long
from typing import Any, NoReturn

from ckpt.errors import CheckpointCorruptError
from ckpt.paths import Path
from ckpt.storage.dtypes import stored

from ..opening import CannotReadError
from .raw import file_in, file_size, read_box, read_bytes
from .safetensors_format import DTYPES, INDEX_NAME, MAX_HEADER_BYTES, METADATA, SINGLE_NAME, SUFFIX
from .state import ForeignState, ForeignTensor

__all__ = ["is_safetensors_directory", "looks_like_safetensors", "open_directory", "open_file"]

_TORCH_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_MAX_INDEX_BYTES = 1 << 30
_LENGTH_BYTES = 8


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file that begins with `start` may be one: a plausible length, then a JSON object."""
    return len(start) > _LENGTH_BYTES and start[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def is_safetensors_directory(path: str) -> bool:
    """Whether there are safetensors files, or an index of such, in a directory."""
    return any(name.endswith((SUFFIX, SUFFIX + ".index.json")) for name in os.listdir(path))


def open_file(path: str) -> ForeignState:
    """Read the header of one file. CheckpointCorruptError if it contradicts itself or the file, CannotReadError."""
    return ForeignState("safetensors", {(name,): tensor for name, tensor in _tensors(path).items()})


def open_directory(path: str, follow_links: bool) -> ForeignState:
    """The files that the index in a directory names, or the one file if there is no index.

    CheckpointCorruptError if index and files contradict each other; CannotReadError where it is not clear what to read.
    """
    names = sorted(os.listdir(path))
    indexes = [name for name in names if name.endswith(SUFFIX + ".index.json")]
    chosen = [INDEX_NAME] if INDEX_NAME in indexes else indexes
    if len(chosen) > 1:
        raise CannotReadError(f"{path} has several indexes: {', '.join(chosen)}; move all but one away")
    if chosen:
        return _indexed(path, chosen[0], follow_links)
    files = [name for name in names if name.endswith(SUFFIX)]
    single = [SINGLE_NAME] if SINGLE_NAME in files else files
    if len(single) != 1:
        raise CannotReadError(f"{path} has {len(files)} {SUFFIX} files and no {INDEX_NAME}; give one of the files")
    return open_file(file_in(path, single[0], follow_links))


def _indexed(directory: str, index_name: str, follow_links: bool) -> ForeignState:
    weight_map = _weight_map(file_in(directory, index_name, follow_links))
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    found: dict[str, ForeignTensor] = {}
    notes = []
    for file, names in sorted(by_file.items()):
        tensors = _tensors(file_in(directory, file, follow_links))
        for name in names:
            if name not in tensors:
                raise CheckpointCorruptError(f"{os.path.join(directory, file)} has no {name!r}, which the index says")
            found[name] = tensors[name]
        left = [name for name in tensors if weight_map.get(name) != file]
        if left:
            notes.append(f"{file} holds {len(left)} more tensors that the index does not give it: left out")
    return ForeignState("safetensors", {(name,): found[name] for name in weight_map}, notes=notes)


def _weight_map(path: str) -> dict[str, str]:
    if file_size(path) > _MAX_INDEX_BYTES:
        raise CheckpointCorruptError(f"{path} is larger than any index")
    document = _json(read_bytes(path, 0, file_size(path)), path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointCorruptError(f"{path} has no weight_map from names to files")
    for name in weight_map:
        _check_name(name, path)
    return weight_map


def _tensors(path: str) -> dict[str, ForeignTensor]:
    total = file_size(path)
    if total < _LENGTH_BYTES:
        _damaged(path, f"it has {total} bytes")
    length = int.from_bytes(read_bytes(path, 0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        _damaged(path, f"its header claims to have {length} bytes, {MAX_HEADER_BYTES} are allowed")
    if length > total - _LENGTH_BYTES:
        _damaged(path, f"its header claims to have {length} bytes, the file has {total}: truncated")
    header = _json(read_bytes(path, _LENGTH_BYTES, length), path)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict):
        _damaged(path, f"its {METADATA} is no object")
    start = _LENGTH_BYTES + length
    tensors, spans = {}, []
    for name, entry in header.items():
        _check_name(name, path)
        dtype, shape, first, last = _entry(path, name, entry)
        spans.append((first, last, name))
        tensors[name] = ForeignTensor(dtype, shape, partial(read_box, path, start + first, shape))
    _check_spans(path, spans, total - start)
    return tensors


def _entry(path: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Torch's dtype, the shape, and the first and the last byte (excluded) of a tensor."""
    if not isinstance(entry, dict):
        _damaged(path, f"its entry of {name!r} is no object")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape):
        _damaged(path, f"{name!r} has the shape {short(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(path, f"{name!r} has the data_offsets {short(offsets)}")
    code = entry.get("dtype")
    dtype = _TORCH_NAMES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise CannotReadError(f"{path}: {name!r} is of dtype {short(code)}; known are {', '.join(_TORCH_NAMES)}")
    expected = math.prod(shape) * stored(dtype).itemsize
    if offsets[1] - offsets[0] != expected:
        _damaged(path, f"{name!r} is {code} {shape}, that is {expected} bytes, but has the data_offsets {offsets}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_spans(path: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Every byte of the data is in exactly one tensor."""
    at, before = 0, ""
    for first, last, name in sorted(spans):
        if last > data_bytes:
            _damaged(path, f"{name!r} reaches to byte {last} of its data, the file has {data_bytes}: truncated")
        if first < at:
            _damaged(path, f"{name!r} and {before!r} overlap")
        if first > at:
            _damaged(path, f"there are {first - at} bytes before {name!r} that belong to no tensor")
        at, before = last, name
    if at != data_bytes:
        _damaged(path, f"there are {data_bytes - at} bytes behind the last tensor")


def _json(data: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name is there twice")
        return result

    try:
        document = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"its header is not JSON: {error}" if path.endswith(SUFFIX) else f"it is not JSON: {error}")
    if not isinstance(document, dict):
        _damaged(path, "its header is no JSON object")
    return document


def _check_name(name: str, path: str) -> Path:
    if any("\ud800" <= character <= "\udfff" for character in name):
        _damaged(path, f"the name {name!r} is not valid Unicode")
    return (name,)


def _damaged(path: str, why: str) -> NoReturn:
    raise CheckpointCorruptError(f"{path} is damaged: {why}")
