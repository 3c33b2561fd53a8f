"""Every rank learns the groups of all ranks.

Each rank publishes its keys; rank 0 reads them all and publishes one text, in which each combination of keys stands
once and the ranks refer to it by number. The others read only that: of n ranks the store then gets 3 n small requests,
where it would get n² if everybody read what everybody had written.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from inprocess.rank_assignment.base import AssignmentStore

__all__ = ["Grouping", "exchange_keys"]

_NAME = "tree"
_STORE_KEY = "rank_assignment/tree"


@dataclass(frozen=True)
class Grouping:
    """Which rank is in which group: `paths` are the different lists of keys from the root down, in the order of the
    first rank that has them; `path_of_rank[r]` is the index of that of rank `r`."""

    paths: list[list[str]]
    path_of_rank: list[int]


def exchange_keys(store: AssignmentStore, rank: int, world_size: int, keys: list[str]) -> Grouping:
    """Publish the keys of this rank, one for each layer, and return those of all. The same on all ranks."""
    store.send_key(json.dumps(keys), rank, _NAME)
    if rank == 0:
        store.set(_STORE_KEY, _encode(store.get_keys(range(world_size), _NAME)))
    return _decode(store.get(_STORE_KEY))


def _encode(texts: list[str]) -> bytes:
    numbers: dict[str, int] = {}
    path_of_rank = [numbers.setdefault(text, len(numbers)) for text in texts]
    return zlib.compress(json.dumps([list(numbers), path_of_rank]).encode())


def _decode(data: bytes) -> Grouping:
    texts, path_of_rank = json.loads(zlib.decompress(data))
    return Grouping([json.loads(text) for text in texts], path_of_rank)
