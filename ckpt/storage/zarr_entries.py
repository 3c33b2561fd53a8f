"""All keys of the Zarr hierarchy of a step, with their metadata or the places of their chunks. Free of torch.

The columns are gathered by numpy from those of the regions, and from the keys of a chunk grid, which all arrays with
this grid have in common: there is a loop over arrays, and none over chunks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.storage.array_metadata import ArrayMeta, group_document
from ckpt.storage.documents import canonical_json
from ckpt.storage.names import pack_file
from ckpt.storage.ocdbt import Bytes, Entries, Front, common_length, ends_of, front_coded
from ckpt.storage.pack_index import PackIndex, StoredArray
from ckpt.storage.regions import Numbers, chunk_sizes
from ckpt.storage.zarr_names import array_names, array_texts, group_documents

_METADATA = "zarr.json"
_MAX_FILES = 1 << 20  # of a rank
_NO_ROWS = np.zeros((0, 5), np.int64)


def chunk_count(index: PackIndex) -> int:
    """Return the number of chunks of all arrays."""
    return sum(len(index.regions[array.region].ranks) for array in index.arrays if array.region is not None)


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """The keys of a step, and the texts that are its metadata."""

    index: PackIndex
    _blocks: _Blocks
    _metadata: list[bytes]

    @classmethod
    def of(cls, index: PackIndex, texts: Mapping[str, bytes] | None = None) -> Hierarchy:
        """Return the hierarchy of an index; `texts` are what `array_texts` returns, if that was made before."""
        arrays = array_names(index)
        texts = array_texts(arrays) if texts is None else texts
        groups = {_METADATA: group_document()}
        groups |= {f"{name}/{_METADATA}": document for name, document in group_documents(arrays).items()}
        blocks = _Blocks.of({f"{name}/": array for name, array in arrays.items()} | dict.fromkeys(groups))
        metadata = [
            canonical_json(groups[prefix]) if array is None else texts[prefix[:-1]]
            for prefix, array in zip(blocks.prefixes, blocks.arrays, strict=True)
        ]
        return cls(index, blocks, metadata)

    def entries(self, compressed: Numbers | None = None) -> Entries:
        """Return all keys and values, sorted.

        `compressed` has a row for each chunk that is compressed: numbers of the array, the chunk and the file, offset,
        bytes. ValueError unless these are the chunks that the index has.
        """
        blocks = self._blocks
        places = _Places.of(self.index, blocks)
        if self.index.compressed:
            places = places.with_compressed(self.index, blocks, _NO_ROWS if compressed is None else compressed)
        codes, file = np.unique(places.ranks * _MAX_FILES + places.files, return_inverse=True)
        is_chunk = blocks.copies >= 0
        number, offset, nbytes = np.full((3, len(is_chunk)), -1, np.int64)
        number[is_chunk], offset[is_chunk], nbytes[is_chunk] = file, places.starts, places.nbytes
        nbytes[~is_chunk] = [len(text) for text in self._metadata]
        files = [pack_file(*divmod(code, _MAX_FILES)) for code in codes.tolist()]
        return Entries(blocks.keys, files, number, offset, nbytes, self._metadata, blocks.key_of)


@dataclass(frozen=True, eq=False)
class _Grid:
    """The keys of arrays with one chunk grid, below their names, sorted; `copies` has the numbers of the chunks.

    The last key is that of the metadata, without a number: -1.
    """

    keys: Front
    copies: Numbers


def _grid(shape: tuple[int, ...], trailing: int) -> _Grid:
    copies = np.zeros((1,) * len(shape), np.int64)
    columns = [np.full((*copies.shape, 1), ord("c"), np.uint8)]
    for dim, size in enumerate(shape):
        digits = np.arange(size).astype(f"S{len(str(size - 1))}")
        order = np.argsort(digits)
        fields = np.insert(digits[order].view(np.uint8).reshape(size, digits.itemsize), 0, ord("."), axis=1)
        along = [1] * len(shape)
        along[dim] = size
        copies = copies * size + order.reshape(along)
        columns.append(fields.reshape(*along, fields.shape[-1]))
    columns += [np.frombuffer(b".0", np.uint8).reshape(*[1] * len(shape), 2)] * trailing
    width = sum(column.shape[-1] for column in columns)
    rows = np.concatenate([np.broadcast_to(column, (*copies.shape, column.shape[-1])) for column in columns], axis=-1)
    keys, last = front_coded(rows.reshape(-1, width)), np.frombuffer(_METADATA.encode(), np.uint8)
    return _Grid(
        Front(np.append(keys.shared, 0), np.append(keys.lengths, len(last)), np.append(keys.rest, last)),
        np.append(copies.reshape(-1), -1),
    )


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The entries of each array, or of one group, are a block: their keys begin with its prefix.

    `starts` says where each block begins, and where the last one ends; `copies` has, by entry, the numbers of chunks.
    """

    prefixes: list[str]
    arrays: list[StoredArray | None]
    starts: Numbers
    copies: Numbers
    keys: Front

    @classmethod
    def of(cls, members: Mapping[str, StoredArray | None]) -> _Blocks:
        """Sort the members by their prefixes, of which none begins with another; None is a group."""
        prefixes = sorted(members)
        arrays = [members[prefix] for prefix in prefixes]
        alone = _Grid(Front(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(0, np.uint8)), np.array([-1]))
        grid_of = functools.cache(_grid)
        of_block, grids = _numbered(
            [alone if a is None else grid_of(a.meta.grid_shape, len(a.meta.stored.trailing)) for a in arrays]
        )
        counts = np.array([len(grid.copies) for grid in grids])[of_block]
        starts = ends_of(counts)
        first = ends_of([len(grid.copies) for grid in grids])[of_block]
        entries = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        coded = [prefix.encode() for prefix in prefixes]
        common = [0, *itertools.starmap(common_length, itertools.pairwise(coded))]
        heads = [prefix[length:] for prefix, length in zip(coded, common, strict=True)]
        shared = np.concatenate([grid.keys.shared for grid in grids])[entries]
        shared += np.repeat([len(prefix) for prefix in coded], counts)
        shared[starts[:-1]] = common
        lengths = np.concatenate([grid.keys.lengths for grid in grids])
        rests = np.concatenate([grid.keys.rest for grid in grids])
        rest = _gathered(rests, ends_of(lengths)[entries], lengths[entries], heads, starts[:-1])
        lengths = lengths[entries]
        lengths[starts[:-1]] += [len(head) for head in heads]
        copies = np.concatenate([grid.copies for grid in grids])[entries]
        return cls(prefixes, arrays, starts, copies, Front(shared, lengths, rest))

    def key_of(self, entry: int) -> bytes:
        """Return the key of an entry."""
        block, copy = int(np.searchsorted(self.starts, entry, "right")) - 1, int(self.copies[entry])
        array, key = self.arrays[block], self.prefixes[block]
        if array is not None and copy >= 0:
            key += array.meta.chunk_key(tuple(map(int, np.unravel_index(copy, array.meta.grid_shape))))
        elif array is not None:
            key += _METADATA
        return key.encode()

    def of_chunks(self, values: Sequence[int] | Numbers) -> Numbers:
        """Return the value of a block for each of its chunks."""
        chunks = np.diff(self.starts) - 1  # the last entry of each is metadata
        return np.repeat(np.asarray(values, np.int64), chunks)


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the chunks are, by entry without those of metadata."""

    ranks: Numbers
    files: Numbers
    starts: Numbers
    nbytes: Numbers

    @classmethod
    def of(cls, index: PackIndex, blocks: _Blocks) -> _Places:
        """Return the places of chunks, before compression."""
        copies = blocks.copies[blocks.copies >= 0]
        first = ends_of([len(region.ranks) for region in index.regions])
        chosen = blocks.of_chunks([0 if a is None or a.region is None else int(first[a.region]) for a in blocks.arrays])
        chosen += copies
        ranks, files, starts = (
            np.concatenate([np.zeros(0, np.int64), *(getattr(region, name) for region in index.regions)])[chosen]
            for name in ("ranks", "files", "starts")
        )
        starts = starts + blocks.of_chunks([0 if a is None else a.offset for a in blocks.arrays])
        sizes_of, none = functools.cache(_chunk_sizes), np.zeros(0, np.int64)  # layers have tensors of equal shapes
        metas = [None if array is None or array.region is None else array.meta for array in blocks.arrays]
        of_block, sizes = _numbered(
            [none if m is None else sizes_of(m.shape, m.chunk_shape, m.inner_chunk_shape, m.dtype) for m in metas]
        )
        first_size = ends_of([len(each) for each in sizes])
        nbytes = np.concatenate(sizes)[blocks.of_chunks(first_size[of_block]) + copies]
        return cls(ranks, files, starts, nbytes)

    def with_compressed(self, index: PackIndex, blocks: _Blocks, rows: Numbers) -> _Places:
        """Return the places with those of compressed chunks. ValueError if one is missing."""
        chunks = [0 if array.region is None else len(index.regions[array.region].ranks) for array in index.arrays]
        first = ends_of(chunks)
        array, copy = rows[:, 0], rows[:, 1]
        if (array < 0).any() or (array >= len(chunks)).any() or (copy < 0).any() or (rows[:, 2:] < 0).any():
            raise ValueError("a part lists a chunk that the index does not have")
        if (copy >= np.asarray(chunks)[array]).any():
            raise ValueError("a part lists a chunk that the index does not have")
        known = np.full((3, first[-1]), -1, np.int64)
        known[:, first[array] + copy] = rows[:, 2:].T
        number = [0 if a is None else int(first[a.number]) for a in blocks.arrays]
        found = known[:, blocks.of_chunks(number) + blocks.copies[blocks.copies >= 0]]
        is_compressed = blocks.of_chunks([a is not None and a.meta.compression is not None for a in blocks.arrays]) > 0
        if (found[:, is_compressed] < 0).any():
            raise ValueError("no part says where a compressed chunk is")
        files, starts, nbytes = np.where(is_compressed, found, [self.files, self.starts, self.nbytes])
        return _Places(self.ranks, files, starts, nbytes)


def _chunk_sizes(shape: tuple[int, ...], chunk: tuple[int, ...], inner: tuple[int, ...] | None, dtype: str) -> Numbers:
    return chunk_sizes(ArrayMeta(shape, dtype, chunk, inner))


def _numbered(members: Sequence[Any]) -> tuple[Numbers, list[Any]]:
    """Return the number of each object, and all different objects by number."""
    different = {id(member): member for member in members}
    numbers = {key: number for number, key in enumerate(different)}
    return np.array([numbers[id(member)] for member in members]), list(different.values())


def _gathered(data: Bytes, first: Numbers, lengths: Numbers, heads: Sequence[bytes], at: Numbers) -> Bytes:
    """Return pieces of `data`, one behind the other, with a head before each piece whose number is in `at`."""
    source = np.concatenate([data, np.frombuffer(b"".join(heads), np.uint8)])
    head_lengths = [len(head) for head in heads]
    first = np.insert(first, at, len(data) + ends_of(head_lengths)[:-1])
    lengths = np.insert(lengths, at, head_lengths)
    ends = ends_of(lengths)
    gathered: Bytes = source[np.arange(ends[-1]) + np.repeat(first - ends[:-1], lengths)]
    return gathered
