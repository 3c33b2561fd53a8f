"""The replicas of this rank's snapshots on another node: when which one is sent, and what is known of them.

    round     rank 0 names a snapshot that is whole in its memory; every rank has its replica process send its share
    ended     every rank arrives, and says if it failed; when all have arrived, rank 0 begins another round

    replicas/<nonce>/round         [number, snapshot of the round or null, last one that all buddies have or null]
    replicas/<nonce>/<number>      a `Round`: ranks that have ended arrive, those that failed decide "failed"

Buddies keep the last snapshot that all of them have until they have another one, and so does each rank in its slots,
also when a newer one is restored: a node may be lost at any time, and what it held and what it staged is then lost
together. One store request for each call of `poll`; no collective, no wait. Only `meet` is collective.

Runs in the thread that trains.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.events import SnapshotNotReplicated, SnapshotReplicated
from ckpt.keeper.trainer_side import Keeper
from ckpt.observing import emit, is_observed, shortened
from ckpt.options import Snapshots
from ckpt.ranks.collectives import Ranks
from ckpt.ranks.group import Group
from ckpt.ranks.rounds import Round, value_of
from ckpt.replication.held_replicas import usable_bytes
from ckpt.replication.replica import Address, Replica, TransportError
from ckpt.replication.replica_process import ReplicaWorker
from ckpt.replication.tcp import Sent, TcpTransport
from ckpt.saving.remote_share import RemoteShare
from ckpt.saving.replica_addresses import addresses_of_buddies, own_address
from ckpt.saving.share import Share
from ckpt.staging.arena import Slot
from ckpt.staging.neighbors import node
from ckpt.storage.names import SaveId, parse_save_name
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.shared_memory import SharedMemory

_log = logging.getLogger("ckpt")
_LINGER_S = 60.0
_SILENCE_S = 5.0  # of a holder in a restore: another copy of the step, or an older one, is near
_SECRET_BYTES = 32
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MOST_WARNINGS = 100


@dataclass(frozen=True, slots=True)
class _Order:
    """What rank 0 tells: the snapshot to be sent, if any, and the last one that all buddies have."""

    number: int = 0
    snapshot: str | None = None
    replicated: str | None = None


class Replicator:
    """The replicas of one rank. `slots` returns those of the arena."""

    def __init__(self, ranks: Ranks, slots: Callable[[], Iterable[Slot]], options: Snapshots, keeper: Keeper) -> None:
        self._keeper = keeper
        self._ranks = ranks
        self._slots = slots
        self._options = options
        self._worker: ReplicaWorker | None = None
        self._secret = ""
        self._prefix = ""
        self._addresses: list[Address | None] = []
        self._buddy: Address | None = None
        self._round = _Order()
        self._sending: dict[Replica, Slot] = {}  # also what is left of earlier rounds
        self._bytes = 0
        self._pause_s, self._next_at = 0.0, 0.0  # after a round that has failed, on rank 0
        self._ended: Sent | None = None  # of this round, not told yet
        self._is_to_send = False
        self._tried: str | None = None  # the snapshot that rank 0 began a round with last
        self._told: list[str] = []  # what ranks knew to be replicated when they met, in the order of steps
        self._is_known = False  # that the buddies of now have what is replicated
        self._remote: list[RemoteShare] = []
        self._warned: set[str] = set()

    @property
    def replicated_step(self) -> int | None:
        """The newest step whose snapshot is complete in the memory of all buddies, as far as this rank knows."""
        return _step_of(self._round.replicated) if self._is_known else None

    # -- ranks come together -------------------------------------------------------------------------------------------

    def meet(self, ranks: Group) -> None:
        """Learn the secret of the job, who receives where, and who is whose buddy. Collective.

        What fails on this rank is logged; then there are no replicas until the ranks meet again.
        """
        self.forget()
        told = ["", "", self._round.replicated]
        if ranks.rank == 0:
            # Always a new secret: what belongs to an earlier iteration must not store anything any more.
            told[:2] = secrets.token_hex(_SECRET_BYTES), secrets.token_hex(4)
        answers = [json.loads(answer) for answer in ranks(json.dumps(told).encode())]
        if len(answers) == 1:
            return
        self._secret, nonce, _ = answers[0]
        known = {replicated for _, _, replicated in answers if replicated is not None}
        self._told = sorted(known, key=lambda name: (_step_of(name), name))  # the same on all ranks
        self._round = _Order(0, None, self._told[-1] if self._told else None)
        address = self._listen()
        place = self._options.place or node()
        about = [place, node(), None if address is None else [address.host, address.port]]
        members = [json.loads(each) for each in ranks(json.dumps(about).encode())]
        self._addresses = [None if found is None else Address(*found) for _, _, found in members]
        try:
            reached = addresses_of_buddies(
                self._addresses, [found for found, _, _ in members], [on for _, on, _ in members]
            )
        except ValueError as problem:  # on all ranks
            if ranks.rank == 0:
                self._warn(f"there are none: {problem}")
        else:
            self._prefix, self._buddy = f"replicas/{nonce}", reached[ranks.rank]

    def _listen(self) -> Address | None:
        """Have the replica process listen; None if it cannot."""
        try:
            host = self._options.host or own_address()
            limit = usable_bytes() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            about = host, self._secret, self._options.bandwidth, limit
            worker = self._living()
            try:
                return worker.admit(*about)
            except TransportError:
                if worker.alive:
                    raise
            return self._living().admit(*about)  # it died just now
        except (TransportError, OSError, ValueError) as error:
            self._warn(f"this rank can receive none: {error}")
            return None

    def _living(self) -> ReplicaWorker:
        """Return the replica process. If it has died, a new one gets what it held. OSError."""
        if self._worker is not None:
            self._note_ends(self._worker.poll())
            if not self._worker.alive:
                self._fail_all("the replica process has ended")
                self._worker.leave()
                self._worker = None
        if self._worker is None:
            self._worker = ReplicaWorker(self._keeper, _LINGER_S)
        return self._worker

    # -- rounds --------------------------------------------------------------------------------------------------------

    def poll(self, staged: SaveId | None, whole: SaveId | None) -> None:
        """Take part in the rounds. The newest snapshot of this rank is `staged`, that with all checksums `whole`."""
        if self._worker is None:
            return
        self._note_ends(self._worker.poll())
        if not self._worker.alive:
            self._fail_all("the replica process has ended")
        if not self._prefix:
            return
        self._ranks.in_store(lambda store: self._take_part(store, staged, whole), None)

    def _take_part(self, store: Any, staged: SaveId | None, whole: SaveId | None) -> None:
        if self._ended is not None:
            self._count(store, self._ended.error)
            self._ended = None
        if self._ranks.rank == 0:
            found = self._lead(store, whole)
        else:
            value = value_of(store, f"{self._prefix}/round")
            found = self._round if value is None else _Order(*json.loads(value))
        if found != self._round:
            self._enter(found)
        if self._is_to_send and self._round.snapshot is not None:
            self._send(store, self._round.snapshot, staged, whole)

    def _lead(self, store: Any, newest: SaveId | None) -> _Order:
        """Return the round as it is now, which rank 0 decides."""
        now = self._round
        if now.snapshot is not None:
            ended = self._round_of(store)
            if (ended.arrived or 0) < self._ranks.world_size:
                return now
            failed = ended.is_decided
            self._pause_s = min(max(_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S) if failed else 0.0
            self._next_at = time.monotonic() + self._pause_s
            ended.delete()
            now = _Order(now.number, None, now.replicated if failed else now.snapshot)
        if newest is not None and newest.name != self._tried and time.monotonic() >= self._next_at:
            self._tried = newest.name
            now = _Order(now.number + 1, newest.name, now.replicated)
        if now != self._round:
            store.set(f"{self._prefix}/round", json.dumps([now.number, now.snapshot, now.replicated]))
        return now

    def _enter(self, found: _Order) -> None:
        """Go on to the round that rank 0 has told."""
        before, self._round = self._round, found
        self._is_known = self._is_known or found.replicated != before.replicated
        if found.replicated is not None and found.replicated != before.replicated and is_observed():
            step = _step_of(found.replicated)
            emit(SnapshotReplicated(time.time(), self._ranks.rank, step, self._bytes))
        self._is_to_send = found.snapshot is not None and found.number != before.number
        self._pin()

    def _send(self, store: Any, snapshot: str, staged: SaveId | None, whole: SaveId | None) -> None:
        """Have this rank's share sent, if it is complete; if it cannot be any more, tell that."""
        slot = next((slot for slot in self._slots() if Share(slot.region).save_name == snapshot), None)
        if slot is None and (staged is None or staged.step < _step_of(snapshot)):
            return  # rank 0 is ahead
        is_whole = slot is not None and Share(slot.region).is_whole
        if slot is not None and not is_whole and (whole is None or whole.step < _step_of(snapshot)):
            return  # its checksums are being made
        self._is_to_send = False
        assert self._worker is not None
        if slot is None or not is_whole or not self._worker.alive:
            gone = "it was not in the memory of this rank any more, or never complete"
            self._count(store, "the replica process has ended" if is_whole else gone)
            return
        assert self._buddy is not None
        replica = Replica(snapshot, self._ranks.rank, slot.region.size, Share(slot.region).nbytes)
        self._sending[replica] = slot
        slot.pin()
        self._bytes = replica.nbytes
        self._worker.send(replica, slot.region.fd, self._buddy, self._round.replicated)

    def _count(self, store: Any, error: str) -> None:
        """Tell rank 0 that this rank has ended its part of the round."""
        if error:
            self._warn(f"a snapshot has none: {error}")
            if is_observed():
                step = _step_of(self._round.snapshot)
                emit(SnapshotNotReplicated(time.time(), self._ranks.rank, step, shortened(error)))
            self._round_of(store).decide("failed")
        self._round_of(store).arrive()

    def _round_of(self, store: Any) -> Round:
        """Return the round in which ranks arrive when they have ended, and which is decided if one has failed."""
        return Round(store, f"{self._prefix}/{self._round.number}", self._ranks.world_size)

    def _note_ends(self, ends: Iterable[Sent]) -> None:
        for end in ends:
            self._sending.pop(end.replica, None)
            if end.replica.snapshot == self._round.snapshot and self._prefix:
                self._ended = end
            self._pin()

    def _fail_all(self, why: str) -> None:
        self._note_ends([Sent(replica, why) for replica in list(self._sending)])

    def _pin(self) -> None:
        """Keep the slots that are sent, and those that are needed with the replicas of others; free the others."""
        needed = {name for name in (self._round.snapshot, self._round.replicated) if name is not None}
        for slot in self._slots():
            sent = any(slot is other for other in self._sending.values())
            if sent or Share(slot.region).save_name in needed:
                slot.pin()
            elif slot.is_pinned:
                slot.unpin()

    # -- a restore -----------------------------------------------------------------------------------------------------

    def held(self) -> list[SharedMemory]:
        """Return the replicas that this rank holds for others, as slots, which the caller closes."""
        if self._worker is None:
            return []
        try:
            return [region for _, region in self._worker.held()]
        except TransportError as error:
            self._warn(str(error))
            return []

    def lend(self, save: str, regions: Mapping[int, SharedMemory]) -> bytes:
        """Let other nodes read these shares of a snapshot, by owner; return what they need to know, for `remote`."""
        replicas = [
            (Replica(save, owner, region.size, Share(region).nbytes), region.fd) for owner, region in regions.items()
        ]
        try:
            if self._worker is not None:
                self._worker.lend(replicas)
        except TransportError as error:
            self._warn(str(error))
            replicas = []
        return json.dumps([[each.rank, each.slot_bytes, each.nbytes] for each, _ in replicas]).encode()

    def remote(self, save: str, lent: Sequence[bytes], own: Iterable[int]) -> dict[int, RemoteShare]:
        """Return the shares of a snapshot that can only be read on other nodes, by owner. `lent` is by rank."""
        try:
            transport = TcpTransport(self._options.host or own_address(), self._secret, _SILENCE_S)
        except (OSError, ValueError) as error:
            self._warn(f"this rank can read none: {error}")
            return {}
        known = set(own)
        found = {}
        failed: dict[Address, str] = {}
        for rank, offers in enumerate(lent):
            address = self._addresses[rank]
            for owner, slot_bytes, nbytes in json.loads(offers):
                if address is not None and owner not in known:
                    found[owner] = RemoteShare(transport, address, Replica(save, owner, slot_bytes, nbytes), failed)
        self._remote += found.values()
        return found

    def settle(self, save: str | None, whole: Collection[str] = ()) -> None:
        """After a restore: keep replicas of the snapshot `save`, which was restored, and what was replicated before it.

        None for none. The latter, if it is one of those that are `whole`, is needed until a newer one is replicated:
        what was restored may have been in the memory of its ranks alone.
        """
        self._close_remote()
        before = [name for name in self._told if name in whole and _step_of(name) <= _step_of(save)]
        replicated = before[-1] if before else save
        if self._worker is not None:
            self._worker.retain([name for name in {save, replicated} if name is not None])
        self._round, self._is_known = _Order(0, None, replicated), False
        self._tried, self._pause_s, self._next_at = save, 0.0, 0.0
        self._pin()

    def can_lend(self, rank: int) -> bool:
        """Return whether other nodes can read from the memory of a rank."""
        return rank < len(self._addresses) and self._addresses[rank] is not None

    def _close_remote(self) -> None:
        for share in self._remote:
            share.close()
        self._remote.clear()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """After a fault: give up what is being sent. What buddies hold, and the slots, stay to be restored from."""
        if self._worker is not None and self._sending:
            self._worker.abort()
        self._prefix, self._ended, self._is_to_send = "", None, False
        self._close_remote()

    def close(self, ending: Deadline, *, linger: bool = False) -> None:
        """End the replica process; with `linger` not before others had time to restore from it. Idempotent."""
        self._close_remote()
        worker, self._worker = self._worker, None
        if worker is not None and linger:
            worker.leave()
        elif worker is not None:
            worker.close(ending)

    def _warn(self, text: str) -> None:
        """Log what does not change, once."""
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            _log.warning("replicas: %s", text)


def _step_of(name: str | None) -> int:
    save = parse_save_name(name or "")
    return -1 if save is None else save.step
