"""What ranks tell each other about their memory before a restore, and what follows from it: the same on all ranks.

Each rank offers the shares that it can read: of which snapshot, of which rank. A snapshot can be restored if every
share of it is offered, and if it is on the way that training has taken:

    iteration      0           1              2
    steps          0 ... 120   100 ... 130    110 ...
                    restored 100 ┘  restored 110 ┘          fences (1, 100), (2, 110)

A snapshot of iteration 0 may be restored only up to step 100, one of iteration 1 up to step 110: every restore that
came after it has gone back to its step, or to one behind it. A rank that took no part in a restore, as a spare, may
still hold others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.saving.share import ShareOf
from ckpt.storage.names import SaveId, parse_save_name

__all__ = ["Fence", "Offer", "Whole", "in_lineage", "pruned", "whole_snapshots"]

_MOST_FENCES = 32

Fence = tuple[int, int]
"""A restore: the iteration that began with it, and the step that it chose; -1 for none."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank can read, on which node it is, and the restores that it knows of."""

    node: str
    shares: tuple[ShareOf, ...] = ()
    fences: tuple[Fence, ...] = ()

    def encode(self) -> bytes:
        """Return it as JSON, with ranks as ranges: a few hundred bytes."""
        ranks: dict[tuple[str, int, int], list[int]] = {}
        for share in self.shares:
            ranks.setdefault((share.save.name, share.world_size, share.restart), []).append(share.rank)
        held = [[*about, _ranges(sorted(found))] for about, found in ranks.items()]
        return json.dumps([self.node, held, self.fences], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Return what `encode` has encoded."""
        node, held, fences = json.loads(data)
        shares = []
        for name, world_size, restart, ranges in held:
            save = parse_save_name(name)
            assert save is not None
            ranks = [rank for first, end in ranges for rank in range(first, end)]
            shares += [ShareOf(save, rank, world_size, restart) for rank in ranks]
        return cls(node, tuple(shares), tuple((index, step) for index, step in fences))


@dataclass(frozen=True, slots=True)
class Whole:
    """A snapshot of which every share can be read by some rank: `readers` has these, lowest first, by owner."""

    save: SaveId
    world_size: int
    readers: tuple[tuple[int, ...], ...]

    def lacks(self, offers: Sequence[Offer]) -> bool:
        """Return whether any rank cannot read a share that another one on its node can."""
        on_node = Counter(offer.node for offer in offers)
        return any(
            len(readers) < sum(on_node[name] for name in {offers[reader].node for reader in readers})
            for readers in self.readers
        )


def whole_snapshots(offers: Sequence[Offer]) -> list[Whole]:
    """Return the snapshots that can be restored, newest first. Pure: the same on all ranks."""
    fences = pruned(fence for offer in offers for fence in offer.fences)
    readers: dict[tuple[SaveId, int], dict[int, list[int]]] = {}
    for rank, offer in enumerate(offers):
        for share in offer.shares:
            if in_lineage(share, fences):
                readers.setdefault((share.save, share.world_size), {}).setdefault(share.rank, []).append(rank)
    whole = [
        Whole(save, world_size, tuple(tuple(found[rank]) for rank in range(world_size)))
        for (save, world_size), found in readers.items()
        if len(found) == world_size
    ]
    return sorted(whole, key=lambda snapshot: (-snapshot.save.step, snapshot.save.name))


def in_lineage(share: ShareOf, fences: Sequence[Fence]) -> bool:
    """Return whether training has gone on from this snapshot, as far as these restores tell; they are `pruned`."""
    if len(fences) == _MOST_FENCES and share.restart < fences[0][0]:
        return False
    return all(share.save.step <= step for index, step in fences if index > share.restart)


def pruned(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Return the restores that say something the later ones do not, in their order; of very many the last ones."""
    lowest: dict[int, int] = {}
    for index, step in fences:
        lowest[index] = min(step, lowest.get(index, step))
    left: list[Fence] = []
    for fence in sorted(lowest.items(), reverse=True):
        if not left or fence[1] < left[-1][1]:
            left.append(fence)
    return tuple(reversed(left[:_MOST_FENCES]))


def _ranges(ranks: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = ranges[-1][0], rank + 1
        else:
            ranges.append((rank, rank + 1))
    return ranges
