"""What ranks tell each other about their memory before a restore, and what follows from it: the same on all ranks.

Each rank offers the shares that it can read: of which snapshot, of which rank. A snapshot can be restored if every
share of it is offered, and if it is on the way that training has taken:

    iteration      0           1              2
    steps          0 ... 120   100 ... 130    110 ...
                    restored 100 ┘  restored 110 ┘          fences (1, 100), (2, 110)

A snapshot of iteration 0 may be restored only up to step 100, one of iteration 1 up to step 110: every restore that
came after it has gone back to its step, or to one behind it. A rank that took no part in a restore, as a spare, may
still hold others.

That is within one start of the job. Ranks also offer what they took over of processes that are dead (`Earlier`): of
this start, or of an earlier one. Starts have numbers that grow. The first restore of a start may take what the newest
of the earlier ones has left, if the root is still the same, and no other has claimed it since; from then on nothing
counts that is of an earlier start, but the snapshot that was restored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt.keeper.messages import MemoryRecord
from ckpt.saving.share import ShareOf
from ckpt.storage.names import SaveId, parse_save_name

_MOST_FENCES = 32
_BEFORE_ALL = -1  # the restart index of the snapshot that a start began with

Fence = tuple[int, int]
"""A restore: the iteration that began with it, and the step that it chose; -1 for none."""


@dataclass(frozen=True, slots=True)
class LeftBranch:
    """The published saves that training has left: those newer than the step of a restore, by their names.

    The restores that ranks agree on are numbered, from 1: what the latest one says holds, also for ranks that took no
    part in it. A save is named, not its step: the branch that training is on has other saves of the same steps.
    Training `began_anew` if that restore was of no step.
    """

    number: int = 0
    saves: frozenset[str] = frozenset()
    began_anew: bool = False


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a rank has taken over of a process that is dead, and what that has recorded about it."""

    record: MemoryRecord
    shares: tuple[ShareOf, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank can read, on which node it is, and the restores that it knows of.

    `start` is the number of the start it belongs to, 0 before its first restore; `origin` the snapshot that this began
    with; `left` the branch that it has left. `token` is that of the root's owner and `root` the identity of the root,
    which the coordinator knows, and `now_ms` the time of its clock. `saves` are those that this rank has staged last,
    also those that are gone: name, iteration, and order in that.
    """

    node: str
    shares: tuple[ShareOf, ...] = ()
    fences: tuple[Fence, ...] = ()
    start: int = 0
    origin: str | None = None
    token: int = 0
    now_ms: int = 0
    earlier: tuple[Earlier, ...] = ()
    root: str = ""
    left: LeftBranch = LeftBranch()
    saves: tuple[tuple[str, int, int], ...] = ()

    @property
    def all_shares(self) -> list[ShareOf]:
        """All shares, also those of dead processes."""
        return [*self.shares, *(share for earlier in self.earlier for share in earlier.shares)]

    @property
    def record(self) -> MemoryRecord:
        """The record of the memory of this rank, for its holder."""
        left = self.left
        fences = list(map(list, self.fences))
        about = self.start, self.origin, self.token, fences, self.root
        return MemoryRecord(*about, left.number, sorted(left.saves), left.began_anew)

    def encode(self) -> bytes:
        """Return it as JSON, with ranks as ranges: a few hundred bytes."""
        earlier = [[asdict(each.record), _packed(each.shares)] for each in self.earlier]
        about = self.node, self.start, self.origin, self.token, self.now_ms, self.root
        left = self.left.number, sorted(self.left.saves), self.left.began_anew
        said = about, _packed(self.shares), self.fences, earlier, left, self.saves
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Return what `encode` has encoded."""
        (node, start, origin, token, now_ms, root), held, fences, taken, left_branch, saves = json.loads(data)
        number, left_saves, began_anew = left_branch
        earlier = tuple(Earlier(MemoryRecord(**record), _unpacked(shares)) for record, shares in taken)
        left = LeftBranch(number, frozenset(left_saves), began_anew)
        staged = tuple((str(name), int(restart), int(order)) for name, restart, order in saves)
        return cls(node, _unpacked(held), _fences(fences), start, origin, token, now_ms, earlier, root, left, staged)


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the job, as the offers of all ranks tell: its number, 0 if none is known, and what it began with.

    `fences` are its restores, `left` the branch that it has left. It `is_earlier` if this restore is the first one of a
    new start.
    """

    number: int = 0
    origin: str | None = None
    fences: tuple[Fence, ...] = ()
    is_earlier: bool = False
    left: LeftBranch = LeftBranch()


def agreed_start(offers: Sequence[Offer]) -> Start:
    """Return the start whose snapshots count. Pure: the same on all ranks."""
    own = [offer.record for offer in offers]
    left = [earlier for offer in offers for earlier in offer.earlier]
    is_earlier = not any(offer.start or offer.shares or offer.fences for offer in offers)
    number = max((each.record.start for each in left), default=0) if is_earlier else max(each.start for each in own)
    records = [each.record for each in left if each.record.start == number]
    if is_earlier:
        tokens = [each.record.token for each in left if each.record.start == number]
        tokens += [share.save.owner for each in left if each.record.start == number for share in each.shares]
        if number == 0 or any(each.root != offers[0].root for each in records):
            return Start(is_earlier=True)  # it was removed, and perhaps there is another in its place
        if offers[0].token != max(tokens):  # another job or start has claimed the root since, or its claims are lost
            return Start(is_earlier=True)
    else:
        records += own
    origin = next((each.origin for each in records if each.start == number and each.origin is not None), None)
    fences = pruned(fence for each in records for fence in _fences(each.fences))
    latest = max(records, key=lambda record: record.restores)
    left_branch = LeftBranch(latest.restores, frozenset(latest.left), latest.began_anew)
    return Start(number, origin, fences, is_earlier, left_branch)


@dataclass(frozen=True, slots=True)
class Whole:
    """A snapshot of which every share can be read by some rank: `readers` has these, lowest first, by owner.

    `made` is the iteration that made it, and its order there: of two of the same step it tells the later one.
    """

    save: SaveId
    world_size: int
    readers: tuple[tuple[int, ...], ...]
    made: tuple[int, int] = (0, 0)

    def lacks(self, offers: Sequence[Offer]) -> bool:
        """Return whether any rank cannot read a share that another one on its node can."""
        on_node = Counter(offer.node for offer in offers)
        return any(
            len(readers) < sum(on_node[name] for name in {offers[reader].node for reader in readers})
            for readers in self.readers
        )


def whole_snapshots(offers: Sequence[Offer]) -> list[Whole]:
    """Return the snapshots that can be restored, newest first; of one step, the one that was made last is the first.

    Pure: the same on all ranks.
    """
    start = agreed_start(offers)
    readers: dict[tuple[SaveId, int], dict[int, list[int]]] = {}
    made: dict[SaveId, tuple[int, int]] = {}
    for rank, offer in enumerate(offers):
        for share in _counted(offer, start):
            found = readers.setdefault((share.save, share.world_size), {}).setdefault(share.rank, [])
            if in_lineage(share, start.fences) and rank not in found:
                found.append(rank)
            # The ranks count for themselves, each in the same direction, so the largest number is in order, too.
            made[share.save] = max(made.get(share.save, (_BEFORE_ALL, 0)), (share.restart, share.order))
    whole = [
        Whole(save, world_size, tuple(tuple(found[rank]) for rank in range(world_size)), made[save])
        for (save, world_size), found in readers.items()
        if len(found) == world_size and all(found.values())
    ]
    return sorted(whole, key=lambda snapshot: (snapshot.save.step, snapshot.made, snapshot.save.name), reverse=True)


def before_published(save: str, whole: Sequence[Whole], offers: Sequence[Offer]) -> int:
    """Return how many of the `whole_snapshots` are tried before a published save. Pure: the same on all ranks.

    Its own copy in memory is, and snapshots of its step that were made later. A save that is not of this start came
    before all that its ranks have made, and after what an earlier start has left.
    """
    found = parse_save_name(save)
    step = -1 if found is None else found.step
    newer = sum(snapshot.save.step > step for snapshot in whole)
    same = [snapshot for snapshot in whole if snapshot.save.step == step]
    names = [snapshot.save.name for snapshot in same]
    if save in names:
        return newer + names.index(save) + 1
    made = [(restart, order) for offer in offers for name, restart, order in offer.saves if name == save]
    if not made:
        return newer + (0 if agreed_start(offers).is_earlier else len(same))
    return newer + sum(snapshot.made > max(made) for snapshot in same)


def _counted(offer: Offer, start: Start) -> Iterator[ShareOf]:
    """Yield the shares of this start; that with which it began comes before all its iterations."""
    ours = list(offer.shares)
    for earlier in offer.earlier:
        is_ours = start.number > 0 and earlier.record.start == start.number
        ours += [share for share in earlier.shares if is_ours or share.save.name == start.origin]
    for share in ours:
        yield replace(share, restart=_BEFORE_ALL) if share.save.name == start.origin else share


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


def _fences(found: Iterable[Any]) -> tuple[Fence, ...]:
    return tuple((int(index), int(step)) for index, step in found)


def _packed(shares: Iterable[ShareOf]) -> list[list[Any]]:
    ranks: dict[tuple[str, int, int, int], list[int]] = {}
    for share in shares:
        about = share.save.name, share.world_size, share.restart, share.order
        ranks.setdefault(about, []).append(share.rank)
    return [[*about, _ranges(sorted(found))] for about, found in ranks.items()]


def _unpacked(held: Iterable[Any]) -> tuple[ShareOf, ...]:
    shares = []
    for name, world_size, restart, order, ranges in held:
        save = parse_save_name(name)
        assert save is not None
        ranks = [rank for first, end in ranges for rank in range(first, end)]
        shares += [ShareOf(save, rank, world_size, restart, order) for rank in ranks]
    return tuple(shares)


def _ranges(ranks: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = ranges[-1][0], rank + 1
        else:
            ranges.append((rank, rank + 1))
    return ranges
