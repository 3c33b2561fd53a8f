"""The arrays of a step as a Zarr hierarchy: the name and the metadata of each, and where a chunk key lies.

On disk there are only pack files and their index (`ckpt.storage.pack_index`). Each array in them has a place in a
hierarchy nevertheless, in which every other reader of Zarr finds it: see `ckpt.loading.zarr_store`. Free
of torch.

    model/weight                  a tensor
    model/bias/__box_00000        a box of a tensor that is not one array: its number among them, as in the index
    rng/__rank_00003              the tensor of one rank

`references` says where each Zarr chunk lies, in a form that fsspec reads without this package: a reference manifest of
kerchunk, version 1 (https://fsspec.github.io/kerchunk/spec.html). Chunks whose places follow a rule are one entry of
"gen": a range for each loop variable, and formulas in jinja. So it grows with the number of arrays, not with that of
chunks. URLs begin with the template "step", which a reader sets to the directory or the URL of the step. Keys begin
with "step", too: zarr-python lists a group in a reference file system only if it has a name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES
from ckpt.paths import Path
from ckpt.storage.array_metadata import ArrayMeta, group_document, groups
from ckpt.storage.compression import Compression
from ckpt.storage.documents import canonical_json
from ckpt.storage.names import RANKS_PER_DIRECTORY, directory
from ckpt.storage.pack_index import PackIndex, Region, StoredArray


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


# -- references --------------------------------------------------------------------------------------------------------

_STEP = "{{step}}"
_GROUP = "step/"
_VARIABLES = "ijklmn"
_FEW_COPIES = 2  # listed instead of generated

Place = tuple[int, int, int]
"""The rank, the number of the file, and the byte where a copy of a region starts; or a step of these."""

Expression = int | str
"""A number, or a formula in jinja that has at least one variable."""


@dataclass(frozen=True)
class _Loops:
    """Copies of a region, from number `copy` on, whose places are linear in nested loop counters.

    `loops` has the count and the step of each loop, the innermost first.
    """

    copy: int
    first: Place
    loops: tuple[tuple[int, Place], ...]

    @property
    def copies(self) -> int:
        return math.prod(count for count, _ in self.loops)


def references(index: PackIndex, texts: Mapping[str, bytes] | None = None) -> bytes:
    """Return the reference manifest of a step; `texts` are what `array_texts` returns, if that was made before.

    Compressed arrays are left out: it is made from the plan of a save, before the sizes of their chunks are known.
    The root group is generated, too, so that a reader that skips "gen" finds no group at all, instead of arrays with
    missing chunks, which Zarr would read as zeros.
    """
    names = {name: array for name, array in array_names(index).items() if array.meta.compression is None}
    texts = array_texts(names) if texts is None else texts
    nodes = {name: canonical_json(node) for name, node in group_documents(names).items()}
    nodes |= {name: texts[name] for name in names}
    refs: dict[str, Any] = {f"{_GROUP}{name}/zarr.json": node.decode() for name, node in nodes.items()}
    gen: list[dict[str, Any]] = [
        {"key": f"{_GROUP}zarr.json", "url": f"{_STEP}/zarr.json", "dimensions": {"i": {"stop": 1}}},
    ]
    regions = [_loops_of(region) for region in index.regions]
    for name, array in names.items():
        for loops in regions[array.region] if array.region is not None else ():
            if loops.copies <= _FEW_COPIES:
                refs |= _listed(index, name, array, loops)
            else:
                gen.append(_generated(name, array, loops))
    return canonical_json({"version": 1, "templates": {"step": "."}, "gen": gen, "refs": refs})


def _listed(index: PackIndex, name: str, array: StoredArray, loops: _Loops) -> Iterator[tuple[str, list[Any]]]:
    for copy in range(loops.copy, loops.copy + loops.copies):
        chunk = tuple(map(int, np.unravel_index(copy, array.meta.grid_shape)))
        file, offset, nbytes = index.place(array, chunk)
        yield f"{_GROUP}{name}/{array.meta.chunk_key(chunk)}", [f"{_STEP}/{file}", offset, nbytes]


def _generated(name: str, array: StoredArray, loops: _Loops) -> dict[str, Any]:
    meta, counts = array.meta, [count for count, _ in loops.loops]
    variables = _VARIABLES[: len(counts)][::-1]  # that of the innermost loop first, so that the outermost is "i"
    weights = [math.prod(counts[:number]) for number in range(len(counts))]
    chunk = _grid_position(meta, _sum(loops.copy, weights, variables))
    rank, file, start = (
        _sum(loops.first[part] + offset, [step[part] for _, step in loops.loops], variables)
        for part, offset in enumerate((0, 0, array.offset))
    )
    shown = [_shown(position) for position in chunk] + ["0" for _ in meta.stored.trailing]
    return {
        "key": f"{_GROUP}{name}/{'.'.join(['c', *shown])}",
        "url": f"{_STEP}/packs/{_directory(loops, rank)}/rank_{_shown(rank, 5)}_{_shown(file, 3)}",
        "offset": _shown(start),
        "length": _shown(_length(meta, chunk)),
        "dimensions": {v: {"stop": count} for v, count in reversed(list(zip(variables, counts, strict=True)))},
    }


def _sum(constant: int, factors: Sequence[int], variables: str) -> Expression:
    """Return ``constant + factor * variable + ...``."""
    terms = [v if factor == 1 else f"{factor}*{v}" for factor, v in zip(factors, variables, strict=True) if factor]
    if not terms:
        return constant
    total = "+".join([*reversed(terms), *([str(constant)] if constant else ())]).replace("+-", "-")
    return total if total.isidentifier() else f"({total})"


def _grid_position(meta: ArrayMeta, number: Expression) -> list[Expression]:
    """Return the index of the chunk with this number."""
    grid, position = meta.grid_shape, list[Expression]()
    for dim, size in enumerate(grid):
        behind = math.prod(grid[dim + 1 :])
        quotient = f"{number}//{behind}" if behind > 1 else number
        leading = math.prod(grid[:dim]) == 1
        position.append(0 if size == 1 else quotient if leading else f"{quotient}%{size}")
    return position


def _length(meta: ArrayMeta, chunk: Sequence[Expression]) -> Expression:
    """Return the bytes of an encoded chunk: a shard at the edge has fewer inner chunks."""
    factor, varying = meta.inner_chunk_bytes + CHECKSUM_BYTES, ""
    inner = meta.inner_chunk_shape or meta.chunk_shape
    for at, n, grid, size, part in zip(chunk, meta.shape, meta.grid_shape, meta.chunk_shape, inner, strict=True):
        full, last = size // part, -(-(n - (grid - 1) * size) // part)
        if grid == 1 or full == last:
            factor *= last
        else:
            varying += f"*({last} if {at}=={grid - 1} else {full})"
    return f"{meta.index_bytes}+{factor}{varying}" if varying else meta.index_bytes + factor


def _directory(loops: _Loops, rank: Expression) -> str:
    """Return the directory of a rank's pack files."""
    reach = [(count - 1) * step[0] for count, step in loops.loops]
    first = (loops.first[0] + sum(min(0, n) for n in reach)) // RANKS_PER_DIRECTORY
    last = (loops.first[0] + sum(max(0, n) for n in reach)) // RANKS_PER_DIRECTORY
    return _shown(first if first == last else f"({rank}//{RANKS_PER_DIRECTORY})", 3)


def _shown(value: Expression, digits: int = 1) -> str:
    """Return the value as part of a template, with at least so many digits."""
    if isinstance(value, int):
        return f"{value:0{digits}d}"
    return f"{{{{{value}}}}}" if digits == 1 else f"{{{{'%0{digits}d'%{value}}}}}"


def _loops_of(region: Region) -> list[_Loops]:
    """Return the copies of a region as few nested loops, in order."""
    places = np.stack([region.ranks, region.files, region.starts], axis=1)
    loops = [_Loops(copy, first, _loop(count, step)) for copy, first, count, step in _runs(places)]
    for _ in _VARIABLES[1:]:
        outer = _nested(loops)
        if len(outer) == len(loops):
            break
        loops = outer
    return loops


def _nested(loops: list[_Loops]) -> list[_Loops]:
    """Join neighbours that differ only in where they start, by a constant step."""
    joined: list[_Loops] = []
    for _, alike in groupby(loops, key=lambda one: one.loops):
        inner = list(alike)
        for number, first, count, step in _runs(np.array([one.first for one in inner])):
            joined.append(_Loops(inner[number].copy, first, inner[number].loops + _loop(count, step)))
    return joined


def _loop(count: int, step: Place) -> tuple[tuple[int, Place], ...]:
    return ((count, step),) if count > 1 else ()


def _runs(places: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[tuple[int, Place, int, Place]]:
    """Yield the places as runs with a constant step: the number of the first one, its place, the count, the step."""
    steps = np.diff(places, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    first = 0
    for last in changes.tolist():
        if last > first:  # else it is the step from the run before to this one that changes
            yield first, _place(places[first]), last - first + 1, _place(steps[first])
            first = last + 1
    if first == len(places) - 1:
        yield first, _place(places[first]), 1, (0, 0, 0)
    elif first < len(places):
        yield first, _place(places[first]), len(places) - first, _place(steps[first])


def _place(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Place:
    rank, file, start = numbers.tolist()
    return rank, file, start
