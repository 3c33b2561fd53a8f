"""Where the chunks of all arrays lie in the packs: arrays with the same owners share regions.

The arrays whose chunks have the same owners, one by one, form regions: each owner has a copy of the region, with its
chunks in the same order at the same offsets. Each rank puts its copies one behind the other, and begins a new file when
one is full. A region is smaller than half a file, so a file has less than one and a half times the size asked for.
Arrays that are `apart` are in files of their own, behind the others; so are small ones, if they are to be: those of
tensors that are small beside most of the others. Fine-tuning changes adapters, norms and biases, while the large
tensors stay as they are, so that their files can be linked (`ckpt.storage.unchanged_files`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.paths import Path
from ckpt.storage.array_metadata import ArrayMeta
from ckpt.storage.pack_index import ALIGNMENT, PackIndex, Region, StoredArray

_REGIONS_IN_FILE = 4
_SMALL = 32  # times smaller than a tensor of which the larger ones have half of all bytes

Owners = tuple[int, ...]
"""The rank that writes each chunk of an array, in C order of its grid."""


@dataclass(frozen=True, slots=True)
class ArrayDraft:
    """An array that has no place yet; otherwise as `StoredArray`."""

    path: Path
    meta: ArrayMeta
    owners: Owners
    box_offset: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    rank: int | None
    apart: bool = False

    @property
    def tensor_bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.tensor_shape) * self.meta.stored.itemsize


def lay_out(drafts: Sequence[ArrayDraft], world_size: int, file_bytes: int, *, small_apart: bool = False) -> PackIndex:
    """Give every chunk its place. The arrays of the index are the `drafts`, in order.

    With `small_apart` the files of small tensors have no others. Equal owners must be one object: comparing those of
    thousands of ranks takes long.
    """
    small_bytes = _small_bytes(drafts) if small_apart else 0
    open_regions: dict[tuple[int, int], int] = {}  # by the identity of the owners, and the group
    sizes: list[int] = []  # of the regions
    owners_of: list[Owners] = []
    groups: list[int] = []
    arrays: list[StoredArray] = []
    for number, draft in enumerate(drafts):
        region, offset = None, 0
        if draft.owners:
            group = 2 * draft.apart + (draft.tensor_bytes < small_bytes)
            key = id(draft.owners), group
            region = open_regions.get(key)
            if region is None or sizes[region] * _REGIONS_IN_FILE >= file_bytes:
                region = open_regions[key] = len(sizes)
                sizes.append(0)
                owners_of.append(draft.owners)
                groups.append(group)
            offset = sizes[region]
            nbytes = draft.meta.encoded_bytes((0,) * len(draft.meta.shape))  # no other chunk is larger
            sizes[region] = offset + -(-nbytes // ALIGNMENT) * ALIGNMENT
        arrays.append(
            StoredArray(
                number, draft.path, draft.meta, region, offset, draft.box_offset, draft.tensor_shape, draft.rank
            )
        )
    return PackIndex(tuple(arrays), tuple(_place(owners_of, sizes, groups, world_size, file_bytes)))


def _small_bytes(drafts: Sequence[ArrayDraft]) -> int:
    """Return the size below which a tensor is small."""
    sizes = np.sort(np.array([draft.tensor_bytes for draft in drafts], np.int64))
    if not len(sizes):
        return 0
    sums = np.cumsum(sizes)
    return int(sizes[np.searchsorted(sums, sums[-1] / 2)]) // _SMALL


def _place(
    owners_of: list[Owners], sizes: list[int], groups: list[int], world_size: int, file_bytes: int
) -> list[Region]:
    files = np.zeros(world_size, np.int64)
    ends = np.zeros(world_size, np.int64)
    regions = [Region(ranks, np.empty_like(ranks), np.empty_like(ranks)) for ranks in map(_ranks, owners_of)]
    placed = 0  # the group
    for number in sorted(range(len(regions)), key=groups.__getitem__):
        owners, size, region = owners_of[number], sizes[number], regions[number]
        ranks = region.ranks
        if groups[number] != placed:
            placed = groups[number]
            files[ends > 0] += 1
            ends[:] = 0
        once = len(set(owners)) == len(owners)
        for copies in [slice(None)] if once else [slice(copy, copy + 1) for copy in range(len(owners))]:
            own = ranks[copies]
            full = own[ends[own] >= file_bytes]
            files[full] += 1
            ends[full] = 0
            region.files[copies], region.starts[copies] = files[own], ends[own]
            ends[own] += size
    return regions


def _ranks(owners: Owners) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(owners, np.int64)
