"""Snapshots as the newest tier of a restore: what can be read of them, and from whose memory.

    offer     every rank tells which shares it can read: in its slots, in those of its neighbours      (one all-gather)
    choose    all ranks find the same snapshots whole
    open      the documents of the chosen one are gathered; memory is passed to ranks on the same node that lack it
    settle    what is newer than the step restored is given up on all ranks

In the first restore of a process, what dead processes of the job have left on this node is offered, too.

Runs in the thread that trains. `open` is collective.
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt.errors import CheckpointCorruptError, CheckpointError
from ckpt.keeper.lingering import LingeringMemory
from ckpt.keeper.takeover import Taken
from ckpt.native import crc32c
from ckpt.ranks.group import Group
from ckpt.ranks.rounds import named
from ckpt.saving.offers import (
    Earlier,
    Fence,
    LeftBranch,
    Offer,
    Start,
    Whole,
    agreed_start,
    before_published,
    pruned,
    whole_snapshots,
)
from ckpt.saving.publish import merged
from ckpt.saving.replicator import Replicator
from ckpt.saving.share import Share, ShareDocuments, ShareOf
from ckpt.saving.snapshots import HeldSnapshots
from ckpt.saving.staged_memory import StagedMemory
from ckpt.staging.neighbors import SlotExchange, node
from ckpt.storage.documents import FORMAT_VERSION, decode_document, encode_document, well_formed
from ckpt.storage.memory_step import LocalShare, MemoryStep, ShareBytes
from ckpt.storage.names import INDEX, SaveId, part_name
from ckpt.storage.ownership import Ownership
from ckpt.storage.pack_index import PackIndex
from inprocess.ipc.shared_memory import SharedMemory

_log = logging.getLogger("ckpt")
_HEAD = struct.Struct("<QQQQ")  # rank, and the sizes of about, index and part
_SHARES_S = 10.0  # for copies and checksums that are still being made


class MemoryTier:
    """The snapshots that this rank and its neighbours hold, for `ckpt.loading.restore`. For one thread."""

    def __init__(
        self,
        snapshots: HeldSnapshots,
        memory: StagedMemory,
        replicator: Replicator | None = None,
        lingering: LingeringMemory | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        """`ownership` is that of the root; None without `lingering`."""
        self._snapshots = snapshots
        self._memory = memory
        self._replicator = replicator
        self._lingering = lingering
        self._ownership = ownership
        self._taken: list[Taken] = []  # of dead processes, until a restore is over
        self._rank = 0
        self._start = 0  # the number of the start that this process belongs to; 0 before its first restore
        self._origin: str | None = None  # the snapshot of an earlier start with which this one began
        self._owner, self._root = 0, ""  # the token of the root's owner at the last restore, and the root's identity
        self._agreed = Start()  # what the offers of this restore say
        self._replicas: list[SharedMemory] = []  # that this rank holds for others, while a restore may read them
        self._node = node()
        self._fences: tuple[Fence, ...] = ()
        self._left = LeftBranch()
        self._offers: list[Offer] = []
        self._whole: dict[str, Whole] = {}
        self._opened: frozenset[int] = frozenset()  # whose shares can be read, of the snapshot that was opened last
        self._known: dict[tuple[str, str | None], ShareOf] = {}  # by memory and save, until this restore is over
        self._restored: str | None = None
        self._failed: set[str] = set()  # snapshots that could not be restored, since one could
        snapshots.on_complete = self._superseded

    def offer(self, ranks: Group) -> bytes:
        """Return what this rank can read, for `choose` on all ranks. Collective."""
        self._known = {}
        self._snapshots.finish(_SHARES_S)
        self._give_back_replicas()
        if self._replicator is not None:
            self._replicator.meet(ranks)
            self._replicas = self._replicator.held()
        self._rank = rank = ranks.rank
        token, root = 0, ""
        if self._lingering is not None:
            self._take_over(self._lingering)
            token, root = self._of_root() if rank == 0 else (0, "")
        shares = tuple({of: None for _, of in self._readable((*self._memory.regions, *self._replicas))})
        earlier = tuple(
            Earlier(taken.record, tuple({of: None for _, of in self._readable(taken.regions)})) for taken in self._taken
        )
        now_ms = int(time.time() * 1000)
        about = self._start, self._origin, token, now_ms
        saves = tuple(self._snapshots.saves)
        return Offer(self._node, shares, self._fences, *about, earlier, root, self._left, saves).encode()

    def _take_over(self, lingering: LingeringMemory) -> None:
        """Take what dead processes have left, before the first restore of this process is over.

        After one whose end was interrupted its keepers are still to be released.
        """
        if not self._start:
            self._give_back_taken()
            self._taken = lingering.take()

    def _of_root(self) -> tuple[int, str]:
        """Return the token of the root's owner and the identity of the root; if they are not known, one of no root."""
        try:
            if self._ownership is not None:
                return self._ownership.owner(), self._ownership.identity()
        except (CheckpointError, OSError) as error:
            _log.warning("memory of an earlier start is not used, as the root of it is not known: %s", error)
        return 0, f"unknown {secrets.token_hex(16)}"

    def choose(self, offers: Sequence[bytes]) -> list[tuple[int, str]]:
        """Return the steps that are whole in memory, newest first, and their saves: the same on all ranks."""
        self._offers = [Offer.decode(offer) for offer in offers]
        self._agreed = agreed_start(self._offers)
        if not self._agreed.is_earlier:
            self._fences = self._agreed.fences
        elif self._taken and not self._agreed.number:
            _log.warning(
                "what an earlier start of this job has left in memory is not used: its checkpoint root was removed, or "
                "another start has claimed it since"
            )
        self._left = self._agreed.left
        whole = whole_snapshots(self._offers)
        self._whole = {snapshot.save.name: snapshot for snapshot in whole}
        return [(snapshot.save.step, snapshot.save.name) for snapshot in whole]

    def before(self, save: str) -> int:
        """Return how many of the steps that `choose` returned are tried before a published save."""
        return before_published(save, list(self._whole.values()), self._offers)

    @property
    def left(self) -> frozenset[str]:
        """The published saves that training has left, by name: after `choose` the same on all ranks."""
        return self._left.saves

    @property
    def began_anew(self) -> bool:
        """Whether training goes on from no step: after `choose` the same on all ranks."""
        return self._left.began_anew

    def open(self, save: str, ranks: Group) -> MemoryStep:
        """Return a step that `choose` has returned, as a source. Collective.

        CheckpointCorruptError, on all ranks, if a document of it is damaged, or was staged over.
        """
        whole = self._whole[save]
        regions = self._regions_of(whole.save)
        own = [owner for owner, readers in enumerate(whole.readers) if readers[0] == ranks.rank]
        documents = _decoded(ranks(b"".join(_packed(owner, regions.get(owner)) for owner in own)), whole)
        if whole.lacks(self._offers):
            self._pass_on(whole, ranks, regions)
            regions = self._regions_of(whole.save)
        self._opened = frozenset(regions)
        shares: dict[int, ShareBytes] = {owner: LocalShare(region) for owner, region in regions.items()}
        shares |= self._remote(whole, ranks, regions)
        taken = {id(region) for each in self._taken for region in each.regions}
        outlived = self._agreed.is_earlier and any(id(region) in taken for region in regions.values())
        return _step(whole, documents, self._memory.index_of(documents[0].index), shares, outlived)

    def _remote(self, whole: Whole, ranks: Group, regions: Mapping[int, SharedMemory]) -> Mapping[int, ShareBytes]:
        """Return the shares that only ranks on other nodes can read, to be read from there. Collective."""
        replicator = self._replicator
        if replicator is None or len({offer.node for offer in self._offers}) == 1:
            return {}
        lenders = [next(filter(replicator.can_lend, readers), None) for readers in whole.readers]
        own = {owner: region for owner, region in regions.items() if lenders[owner] == ranks.rank}
        return replicator.remote(whole.save.name, ranks(replicator.lend(whole.save.name, own)), regions)

    def check(self, save: str) -> None:
        """Raise CheckpointCorruptError unless what was read from memory of this node was of this step all the time."""
        whole = self._whole[save]
        lost = self._opened - self._regions_of(whole.save).keys()
        if lost:
            raise CheckpointCorruptError(
                f"the snapshot of step {whole.save.step} was staged over while it was read: the share of "
                f"{named(sorted(lost))}"
            )

    def failed(self, save: str) -> None:
        """Note that a snapshot could not be restored. One that has failed before is given up.

        Else a job without an older step would fail in every restart; the first time, another node may have been slow.
        """
        if save not in self._failed:
            self._failed.add(save)
            return
        _log.warning("%s is given up, as it could not be restored again", save)
        self._clear({save})
        self._snapshots.drop(save)

    def settle(self, step: int | None, save: str | None = None, *, restart: int = 0, left: Iterable[str] = ()) -> None:
        """Give up what is newer than the step that was restored; None for nothing, so that training starts anew.

        The shares of its `save` are kept, if it is a snapshot, until a newer one is complete on all ranks. `restart` is
        the index of the iteration that goes on from there; `left` are the published saves that training has left.
        """
        last = -1 if step is None else step
        offered = [share for offer in self._offers for share in offer.all_shares]
        self._clear({share.save.name for share in offered if share.save.step > last})
        self._failed.clear()
        self._snapshots.settle(last, save)
        self._fences = pruned((*self._fences, (restart, last)))
        self._left = LeftBranch(self._left.number + bool(self._offers), frozenset(left), step is None)
        self._restored = save if save in self._whole else None
        self._begin_start()
        self._adopt_taken()
        self._memory.need(self._restored)
        if self._lingering is not None:
            about = self._start, self._origin, self._owner
            record = Offer(self._node, (), self._fences, *about, root=self._root, left=self._left).record
            self._lingering.settle(self._rank, record, self._memory.kept, self._taken)
        if self._replicator is not None:
            self._replicator.settle(self._restored, self._whole)
        self._taken = []
        self._offers, self._whole, self._known, self._agreed = [], {}, {}, Start()
        self._give_back_replicas()

    def _begin_start(self) -> None:
        """After the first restore of this process: go on with the start of the others, or a new one."""
        if not self._offers:
            return
        agreed = self._agreed
        is_new = agreed.is_earlier or not agreed.number
        self._start = max(agreed.number + 1, self._offers[0].now_ms) if is_new else agreed.number
        self._origin = self._restored if agreed.is_earlier else agreed.origin
        self._owner, self._root = self._offers[0].token, self._offers[0].root

    def _adopt_taken(self) -> None:
        """Keep what is needed of the memory of dead processes, as that of neighbours; unmap the rest."""
        regions = [region for taken in self._taken for region in taken.regions]
        needed = [region for region in regions if self._restored and Share(region).save_name == self._restored]
        self._taken = [replace(taken, regions=()) for taken in self._taken]  # before a fault can interrupt this
        self._memory.adopt(needed)
        for region in regions:
            if region not in needed:
                region.close()

    def _give_back_taken(self) -> None:
        """Unmap what dead processes have left; their keepers go on to keep it."""
        for taken in self._taken:
            taken.close()
        self._taken = []

    def _regions(self) -> list[SharedMemory]:
        return [*self._memory.regions, *self._replicas, *(region for each in self._taken for region in each.regions)]

    def _clear(self, saves: Collection[str]) -> None:
        """Mark what this rank can read of some snapshots as nothing."""
        for region in self._regions():
            if Share(region).save_name in saves:
                Share(region).clear()

    def _give_back_replicas(self) -> None:
        """Unmap the replicas, which the replica process goes on to hold."""
        for region in self._replicas:
            region.close()
        self._replicas = []

    def close(self) -> None:
        """Give back what a restore that failed has left. Idempotent."""
        self._give_back_replicas()
        self._give_back_taken()

    def _superseded(self, save: SaveId) -> None:
        """A snapshot is complete on all ranks: that which was restored is not needed any more, if it is another."""
        if self._restored is not None and save.name != self._restored:
            self._restored = None
            self._memory.need(None)

    def _readable(self, regions: Iterable[SharedMemory]) -> Iterable[tuple[SharedMemory, ShareOf]]:
        """Yield those of these slots that hold whole shares, and whose."""
        for region in regions:
            share = Share(region)
            key = region.region_id, share.save_name
            try:
                if share.is_whole and key not in self._known and (documents := share.documents()) is not None:
                    self._known[key] = documents.of
                if share.is_whole and key in self._known:
                    yield region, self._known[key]
            except (CheckpointError, OSError) as error:
                _log.warning("what a slot holds cannot be restored: %s", error)

    def _regions_of(self, save: SaveId) -> dict[int, SharedMemory]:
        """Return the slots with the shares of a snapshot, by owner; this rank's own first."""
        found: dict[int, SharedMemory] = {}
        for region, of in self._readable(self._regions()):
            if of.save == save:
                found.setdefault(of.rank, region)
        return found

    def _pass_on(self, whole: Whole, ranks: Group, regions: Mapping[int, SharedMemory]) -> None:
        """Give the shares to ranks on this node that lack them, and take what this one lacks. Collective."""
        here = {other for other, offer in enumerate(self._offers) if offer.node == self._node}
        first = [min(here & set(readers), default=None) for readers in whole.readers]
        exchange = SlotExchange(ranks)
        given = [region for owner, region in regions.items() if first[owner] == ranks.rank]
        for taken in exchange.run(given).values():
            self._memory.adopt(taken)


def _packed(owner: int, region: SharedMemory | None) -> bytes:
    """Return the documents of a share, to be gathered; nothing if they are not there any more, or cannot be read."""
    try:
        raw = None if region is None else Share(region).raw()
    except OSError as error:
        _log.warning("the share of rank %d cannot be read: %s", owner, error)
        raw = None
    return b"" if raw is None else _HEAD.pack(owner, *map(len, raw)) + b"".join(raw)


def _decoded(payloads: Iterable[bytes], whole: Whole) -> list[ShareDocuments]:
    """Return the documents of all shares, by rank. CheckpointCorruptError if one is missing or damaged."""
    found: dict[int, ShareDocuments] = {}
    for payload in payloads:
        at = 0
        while at < len(payload):
            owner, *sizes = _HEAD.unpack_from(payload, at)
            at += _HEAD.size
            parts = []
            for size in sizes:
                parts.append(payload[at : at + size])
                at += size
            found[owner] = ShareDocuments.decode(*parts)
    missing = [owner for owner in range(whole.world_size) if owner not in found]
    if missing or any(found[owner].of.save != whole.save for owner in found):
        raise CheckpointCorruptError(
            f"the snapshot of step {whole.save.step} was staged over, or is damaged: {missing or 'other documents'}"
        )
    return [found[owner] for owner in range(whole.world_size)]


def _step(
    whole: Whole,
    shares: Sequence[ShareDocuments],
    index: PackIndex | None,
    bytes_of: Mapping[int, ShareBytes],
    outlived: bool,
) -> MemoryStep:
    """Return the snapshot as a step: the documents that a coordinator would have written. `index`: if it is known."""
    path = f"memory:{whole.save.name}"
    first = shares[0]
    with well_formed(path):
        if index is None:
            index = PackIndex.from_document(decode_document(first.index, path), whole.world_size)
        intent = {
            "format": FORMAT_VERSION,
            "save": whole.save.name,
            "step": whole.save.step,
            "owner": whole.save.owner,
            "continues": None,
            "world_size": whole.world_size,
            "plan": first.about["plan"],
            **first.part["lineage"],
        }
        packs = {owner: share.places for owner, share in enumerate(shares)}
    manifests = [share.manifest() for share in shares]
    encoded = [encode_document(manifest) for manifest in manifests]
    parts = [(manifest, crc32c(data)) for manifest, data in zip(manifests, encoded, strict=True)]
    documents = {INDEX: first.index, **{part_name(owner): data for owner, data in enumerate(encoded)}}
    documents |= merged(path, intent, {"index": first.index}, parts, packs=index)
    return MemoryStep(path, documents, index, packs, bytes_of, outlived=outlived)
