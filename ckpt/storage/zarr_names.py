"""The arrays of a step as a Zarr hierarchy: the name and the metadata of each, and where a chunk key lies.

On disk there are only pack files and their index (`ckpt.storage.pack_index`). Each array in them has a place in a
hierarchy nevertheless, in which every other reader of Zarr finds it: see `ckpt.loading.zarr_store` and
`ckpt.storage.references`. Free of torch.

    model/weight                  a tensor
    model/bias/__box_00000        a box of a tensor that is not one array: its number among them, as in the index
    rng/__rank_00003              the tensor of one rank
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.paths import Path
from ckpt.storage.array_metadata import ArrayMeta, group_document, groups
from ckpt.storage.compression import Compression
from ckpt.storage.documents import canonical_json
from ckpt.storage.names import directory
from ckpt.storage.pack_index import PackIndex, StoredArray

__all__ = [
    "array_document",
    "array_names",
    "array_texts",
    "chunk_index",
    "group_documents",
    "named_document",
    "tensor_name",
]


def tensor_name(path: Path, rank: int | None = None) -> str:
    """Return the name of the tensor at `path`, or of the one that `rank` has there."""
    name = directory(path)
    return name if rank is None else f"{name}/__rank_{rank:05d}"


def array_names(index: PackIndex) -> dict[str, StoredArray]:
    """Return all arrays by their names, in the order of the index. Each name belongs to one array."""
    boxes: Counter[str] = Counter()
    names: dict[str, StoredArray] = {}
    for array in index.arrays:
        name = tensor_name(array.path, array.rank)
        if not array.is_whole:
            boxes[name] += 1
            name = f"{name}/__box_{boxes[name] - 1:05d}"
        names[name] = array
    return names


def array_document(name: str, array: StoredArray) -> dict[str, Any]:
    """Return the ``zarr.json`` of the array with this name.

    Its attribute ``ckpt`` has the path, and which part of the tensor it is. The names of its dimensions, which xarray
    needs, are those of no other array in its group, and of no key.
    """
    return named_document(name, dataclasses.replace(array.meta, attributes={"ckpt": _part(array)}))


def named_document(name: str, meta: ArrayMeta) -> dict[str, Any]:
    """Return the ``zarr.json`` of an array with the names of its dimensions."""
    document = meta.array_document()
    return document | {"dimension_names": _dimensions(name, len(document["shape"]))}


def array_texts(names: Mapping[str, StoredArray]) -> dict[str, bytes]:
    """Return `array_document` of all arrays by their names, as JSON: fast where many are alike."""
    texts = {}
    for name, array in names.items():
        meta = array.meta
        before, between, behind = _template(
            meta.shape, meta.dtype, meta.chunk_shape, meta.inner_chunk_shape, meta.compression
        )
        dimensions = canonical_json(_dimensions(name, len(meta.shape) + len(meta.stored.trailing)))
        texts[name] = b"".join((before, canonical_json(_part(array)), between, dimensions, behind))
    return texts


@functools.lru_cache(maxsize=1 << 10)
def _template(
    shape: tuple[int, ...],
    dtype: str,
    chunk: tuple[int, ...],
    inner: tuple[int, ...] | None,
    compression: Compression | None,
) -> tuple[bytes, bytes, bytes]:
    """Return the document of an array as JSON: before its path, up to the names of its dimensions, and behind them."""
    document = ArrayMeta(shape, dtype, chunk, inner, compression, {"ckpt": "?"}).array_document()
    before, _, rest = canonical_json(document | {"dimension_names": "?"}).partition(b'"?"')
    between, _, behind = rest.partition(b'"?"')
    return before, between, behind


def _part(array: StoredArray) -> dict[str, Any]:
    """Return the path of an array, and which part of the tensor it is."""
    about: dict[str, Any] = {"name": list(array.path)}
    if array.rank is not None:
        about["rank"] = array.rank
    if not array.is_whole:
        about |= {"box_offset": list(array.box_offset), "tensor_shape": list(array.tensor_shape)}
    return about


def _dimensions(name: str, count: int) -> list[str]:
    key = name.rpartition("/")[2]
    return [f"{key}[{dim}]" for dim in range(count)]


def group_documents(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the ``zarr.json`` of each group that contains one of `names`, without the root."""
    return {name: group_document() for name in groups(names)}


def chunk_index(meta: ArrayMeta, key: str) -> tuple[int, ...] | None:
    """Return the index of the chunk that an array has under `key`, such as ``c.0.3``; None if it has none."""
    try:
        index = tuple(map(int, key.split(".")[1 : 1 + len(meta.shape)]))
    except ValueError:
        return None
    inside = len(index) == len(meta.shape) and all(0 <= i < n for i, n in zip(index, meta.grid_shape, strict=True))
    return index if inside and meta.chunk_key(index) == key else None
