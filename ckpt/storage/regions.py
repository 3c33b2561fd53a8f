"""Regions: runs of bytes that several packs have, each somewhere. See `pack_index`. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ckpt.native import CHECKSUM_BYTES
from ckpt.storage.array_metadata import ArrayMeta

ALIGNMENT = 16
"""Chunks begin at multiples of this in a file."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_COLUMNS = ("ranks", "files", "starts")
_MAX_COPIES = 1 << 24  # of all regions together; these take 3 GB of memory while they are checked
_FREE_COPIES = 1 << 18  # so many need no file that justifies them
_MAX_FILES = 1 << 20  # of a rank
_MAX_BYTES = 1 << 60


@dataclass(frozen=True, eq=False)
class Region:
    """The copies of a region: `ranks`, `files` and `starts`, by number of the copy. All int64, 1-d, of one length."""

    ranks: Numbers
    files: Numbers
    starts: Numbers

    def to_document(self) -> dict[str, Any]:
        """Return the region as JSON: each column as runs of [first, count, step]."""
        return {"ranks": _runs(self.ranks), "files": _runs(self.files), "starts": _runs(self.starts)}


def regions_from_documents(
    documents: Sequence[Any], world_size: int, stored_bytes: Callable[[], int] | None = None
) -> tuple[Region, ...]:
    """Return the regions that documents describe, all made at once.

    ValueError, or another error of a wrong structure, unless each has copies, which are in packs of ranks below
    `world_size` and start at multiples of `ALIGNMENT`. A few bytes can describe millions of copies: `stored_bytes`
    returns the size of the files that have them, and is called if there are very many.
    """
    if not documents:
        return ()
    for document in documents:
        if document.keys() != set(_COLUMNS):
            raise ValueError(f"a region has the members {sorted(document)!r:.80}")
    copies = sum(count for document in documents for _, count, _ in document["ranks"])
    if copies > _FREE_COPIES and stored_bytes is not None and copies * CHECKSUM_BYTES > (there := stored_bytes()):
        raise ValueError(f"the regions have {copies} copies, and all files together {there} bytes")
    columns, lengths = zip(*(_expanded([document[name] for document in documents]) for name in _COLUMNS), strict=True)
    if not np.array_equal(lengths[0], lengths[1]) or not np.array_equal(lengths[0], lengths[2]):
        raise ValueError("the columns of a region differ in length")
    if not lengths[0].all():
        raise ValueError("a region has no copies")
    ranks, files, starts = columns
    for name, numbers, most in (
        ("rank", ranks, world_size),
        ("file", files, _MAX_FILES),
        ("start", starts, _MAX_BYTES),
    ):
        if numbers.min() < 0 or numbers.max() >= most:
            raise ValueError(f"a region has a copy whose {name} is below 0 or not below {most}")
    if (starts % ALIGNMENT).any():
        raise ValueError(f"a region starts at a byte that is no multiple of {ALIGNMENT}")
    ends = np.cumsum(lengths[0]).tolist()
    return tuple(
        Region(ranks[first:end], files[first:end], starts[first:end])
        for first, end in zip([0, *ends], ends, strict=False)
    )


def _expanded(columns: list[Any]) -> tuple[Numbers, Numbers]:
    """Return the numbers of all columns that `_runs` has encoded, one behind the other, and how many each has."""
    runs = list(chain.from_iterable(columns))
    flat = list(chain.from_iterable(runs))
    if set(map(len, runs)) - {3} or set(map(type, flat)) - {int}:
        raise ValueError("a region has something else than runs of three numbers")
    first, count, step = np.array(flat, np.int64).reshape(-1, 3).T
    if not ((count > 0) & (count <= _MAX_COPIES)).all() or count.sum() > _MAX_COPIES:
        raise ValueError(f"a region has a run without numbers, or the regions have more than {_MAX_COPIES} copies")
    if (np.abs(first) >= _MAX_BYTES).any() or (np.abs(step) >= _MAX_BYTES // count).any():
        raise ValueError("a region has a run with impossible numbers")
    ends = np.concatenate([[0], np.cumsum(count)])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], count)
    last_runs = np.cumsum([0, *map(len, columns)])
    return np.repeat(first, count) + np.repeat(step, count) * within, np.diff(ends[last_runs])


def _runs(numbers: Numbers) -> list[list[int]]:
    """Return the numbers as runs of [first, count, step]."""
    runs: list[list[int]] = []
    for number in numbers.tolist():
        if runs and runs[-1][1] == 1:
            runs[-1][1:] = 2, number - runs[-1][0]
        elif runs and number == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1, 0])
    return runs


def chunk_sizes(meta: ArrayMeta) -> Numbers:
    """Return the bytes of each chunk of an array before compression, in C order of the grid."""
    full = meta.inner_chunk_shape or meta.chunk_shape
    inner_chunks = np.ones(1, np.int64)
    for size, chunk, inner in zip(meta.shape, meta.chunk_shape, full, strict=True):
        left = size - np.arange(-(-size // chunk), dtype=np.int64) * chunk
        inner_chunks = np.multiply.outer(inner_chunks, -(-np.minimum(left, chunk) // inner)).reshape(-1)
    return inner_chunks * (meta.inner_chunk_bytes + CHECKSUM_BYTES) + meta.index_bytes


@dataclass(frozen=True, eq=False)
class FilePlaces:
    """The copies of all regions, sorted by rank, file and place; `ends` are where their last chunks end."""

    ranks: Numbers
    files: Numbers
    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, regions: Sequence[Region], ends: Sequence[Numbers]) -> FilePlaces:
        """Sort the copies of `regions`, which end `ends` bytes from their starts."""
        if not regions:
            none = np.zeros(0, np.int64)
            return cls(none, none, none, none)
        ranks, files, starts = (np.concatenate([getattr(region, name) for region in regions]) for name in _COLUMNS)
        order = np.lexsort((starts, files, ranks))
        return cls(ranks[order], files[order], starts[order], (starts + np.concatenate(ends))[order])

    def overlap(self) -> bool:
        """Return whether two copies overlap."""
        return bool((self._in_one_file() & (self.ends[:-1] > self.starts[1:])).any())

    def file_sizes(self) -> dict[tuple[int, int], int]:
        """Return where the last copy in each file ends, by rank and number of the file. There are no overlaps."""
        last = np.flatnonzero(np.concatenate([~self._in_one_file(), [len(self.ranks) > 0]]))
        keys = zip(self.ranks[last].tolist(), self.files[last].tolist(), strict=True)
        return dict(zip(keys, self.ends[last].tolist(), strict=True))

    def _in_one_file(self) -> Any:
        """Return whether each copy but the last is in one file with the next."""
        return (self.ranks[:-1] == self.ranks[1:]) & (self.files[:-1] == self.files[1:])
