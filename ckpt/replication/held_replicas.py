"""The replicas that a process holds for others, in anonymous shared memory.

        begin                    complete               a later begin or retain
    ───────────▶ ARRIVING ──────────────────▶ COMPLETE ─────────────────────────▶ its memory is free, to be used again
                     └──── discard: peer lost, wrong checksum, superseded ──────────────▶ the same

What was complete of the snapshot to keep stays until a newer one is complete on all ranks: only then a `begin` names
another one to keep. So there are two replicas of each owner at most.

    memfd := memory of a slot, documents, ... room │ label: which replica this is, as long as it is COMPLETE

The keeper has every region from its creation, too (`ckpt.keeper.kept_memory`). When this process is killed, the next
one finds by the labels what is complete. A label is written when all bytes are there, and removed before any of them
may change.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckpt.keeper.kept_memory import WorkerMemory
from ckpt.replication.replica import Replica, TransportError
from inprocess.ipc.packets import Codec, PacketError
from inprocess.ipc.shared_memory import SharedMemory

_MAX_NAME = 256
_MAX_REPLICAS = 1024  # memory is bounded by bytes; this bounds their number
_ROUNDED_TO = 64 << 10
_LABEL: Codec[Replica] = Codec(Replica)
_MAX_LABEL = 8 << 10
_Key = tuple[str, int]


@dataclass(eq=False)
class _Held:
    """A replica and its memory; the memory is larger than the replica if it had another before."""

    replica: Replica
    region: SharedMemory
    complete: bool = False
    lent: bool = False
    dropped: bool = False
    readers: int = 0


@dataclass(frozen=True)
class Arrival:
    """A replica that is being received: `memory` has room for all its bytes, and is written by the receiver alone."""

    held: _Held
    memory: memoryview


class ReplicaMemory:
    """Holds replicas of other ranks, of at most `limit_bytes` together, with the memory that is free. Any thread.

    The limit may be changed at any time; what is held stays.
    """

    def __init__(self, limit_bytes: int, kept: WorkerMemory | None = None) -> None:
        """`kept` has what a process before this one has left, and gets every region; None for tests of this alone."""
        self.limit_bytes = limit_bytes
        self._kept = kept
        self._lock = threading.Lock()
        self._held: dict[_Key, _Held] = {}
        self._dropped: set[_Held] = set()  # still written or read by a thread
        self._free: list[SharedMemory] = []
        self._closed = False
        for region in () if kept is None else kept.left:
            self._take_over(region)

    def begin(self, replica: Replica, keep: str | None) -> Arrival:
        """Return room for a replica; drop all replicas of other snapshots than its own and `keep`.

        The same replica that is still arriving is superseded. Raises TransportError if there is no room.
        """
        _check(replica)
        key = replica.snapshot, replica.rank
        with self._lock:
            if self._closed:
                raise TransportError("the holder is closing")
            for other in list(self._held.values()):
                if other.replica.snapshot not in (replica.snapshot, keep):
                    self._drop(other)
            if (former := self._held.get(key)) is not None:
                self._drop(former)
            if len(self._held) >= _MAX_REPLICAS:
                raise TransportError(f"the holder has {_MAX_REPLICAS} replicas, and takes no more")
            held = self._held[key] = _Held(replica, self._region(replica.nbytes))
        try:
            held.region.prefault()  # at most once for each region: what was touched before is there
            memory = held.region.buffer[: replica.nbytes]
        except OSError as error:
            self._forget(held)
            raise TransportError(f"no memory for {replica.nbytes} bytes: {error}") from error
        return Arrival(held, memory)

    def complete(self, arrival: Arrival) -> None:
        """Make a replica readable. TransportError if it was superseded meanwhile."""
        arrival.memory.release()
        with self._lock:
            held = arrival.held
            if not held.dropped:
                try:
                    held.region.write_behind(0, _LABEL.encode(held.replica))
                except OSError as error:
                    self._drop(held)
                    self._recycle(held)
                    raise TransportError(f"no memory for the label of a replica: {error}") from error
                held.complete = True
                return
            self._recycle(held)
        raise TransportError("superseded: the holder keeps newer snapshots")

    def discard(self, arrival: Arrival) -> None:
        """Give up a replica that did not arrive."""
        arrival.memory.release()
        with self._lock:
            self._drop(arrival.held)
            self._recycle(arrival.held)

    def lend(self, replica: Replica, region: SharedMemory) -> None:
        """Let others read what is not a replica, but here first: `region` is closed when it is dropped.

        TransportError if it is there already.
        """
        _check(replica)
        with self._lock:
            if self._closed or (replica.snapshot, replica.rank) in self._held:
                raise TransportError(f"{replica.snapshot} of rank {replica.rank} is there already")
            self._held[replica.snapshot, replica.rank] = _Held(replica, region, complete=True, lent=True)

    def replicas(self) -> list[Replica]:
        """Return what is complete; not what is lent."""
        with self._lock:
            return [held.replica for held in self._held.values() if held.complete and not held.lent]

    @contextlib.contextmanager
    def reading(self, replica: Replica) -> Iterator[SharedMemory]:
        """Yield the memory of a complete replica, which stays as it is meanwhile. TransportError if there is none."""
        with self._lock:
            held = self._held.get((replica.snapshot, replica.rank))
            if held is None or not held.complete or held.replica != replica:
                raise TransportError(f"the holder does not have rank {replica.rank}'s replica of {replica.snapshot}")
            held.readers += 1
        try:
            yield held.region
        finally:
            with self._lock:
                held.readers -= 1
                if held.dropped and not held.readers:
                    self._recycle(held)

    def retain(self, snapshots: Collection[str]) -> None:
        """Drop all replicas of other snapshots, also those that are arriving, and all that was lent."""
        with self._lock:
            for held in list(self._held.values()):
                if held.lent or held.replica.snapshot not in snapshots:
                    self._drop(held)

    @property
    def allocated_bytes(self) -> int:
        """The memory in use, also that which is kept to be used again."""
        with self._lock:
            return self._allocated()

    def close(self) -> None:
        """Unmap all memory; what was kept of it stays so. Idempotent. Nothing may arrive or be read any more."""
        with self._lock:
            self._closed = True
            for held in (*self._held.values(), *self._dropped):
                held.region.close()
            for region in self._free:
                region.close()
            self._held.clear()
            self._dropped.clear()
            self._free.clear()

    def _take_over(self, region: SharedMemory) -> None:
        """Hold what the process before has completed in a region, else use it again."""
        try:
            replica = _LABEL.decode(region.read_behind(0, _MAX_LABEL))
            _check(replica)
            is_new = replica.nbytes <= region.size and (replica.snapshot, replica.rank) not in self._held
        except (OSError, PacketError, TransportError):  # it was arriving, or free
            is_new = False
        if is_new:
            self._held[replica.snapshot, replica.rank] = _Held(replica, region, complete=True)
        else:
            self._free.append(region)

    # -- with the lock held --------------------------------------------------------------------------------------------

    def _allocated(self) -> int:
        held = (each for each in (*self._held.values(), *self._dropped) if not each.lent)
        regions = [each.region for each in held] + self._free
        return sum(region.size for region in regions)

    def _region(self, nbytes: int) -> SharedMemory:
        """Return memory for so many bytes: the smallest that is free and large enough, else new memory.

        New memory has some room for documents that grow, so that it can be used again.
        """
        nbytes = (nbytes // _ROUNDED_TO + 2) * _ROUNDED_TO
        fitting = [region for region in self._free if nbytes - _ROUNDED_TO <= region.size <= 2 * nbytes]
        if fitting:
            region = min(fitting, key=lambda region: region.size)
            self._free.remove(region)
            return region
        while self._free and self._allocated() + nbytes > self.limit_bytes:
            self._give_back(self._free.pop())
        if self._allocated() + nbytes > self.limit_bytes:
            raise TransportError(
                f"no room for {nbytes} bytes: the holder has {self._allocated()} of at most {self.limit_bytes} bytes"
            )
        try:
            region = SharedMemory.create("ckpt-replica", nbytes)
        except OSError as error:
            raise TransportError(f"no memory for {nbytes} bytes: {error}") from error
        if self._kept is not None:
            self._kept.keep(region)
        return region

    def _give_back(self, region: SharedMemory) -> None:
        if self._kept is not None:
            self._kept.drop(region.region_id)
        region.close()

    def _drop(self, held: _Held) -> None:
        """Forget a replica. Its memory is free as soon as no thread writes or reads it."""
        if held.dropped:
            return
        held.dropped = True
        if not held.lent:
            os.ftruncate(held.region.fd, held.region.size)  # without a label it is no replica for the next process
        del self._held[held.replica.snapshot, held.replica.rank]
        self._dropped.add(held)
        if held.complete and not held.readers:
            self._recycle(held)

    def _recycle(self, held: _Held) -> None:
        if held in self._dropped:
            self._dropped.remove(held)
            if held.lent:
                held.region.close()
                return
            end = held.replica.slot_bytes  # a process that still maps this must not take it for whole
            start = max(0, end - mmap.PAGESIZE)
            held.region.buffer[start:end] = bytes(end - start)
            self._free.append(held.region)

    def _forget(self, held: _Held) -> None:
        """Give back the memory of a replica for which there was not enough."""
        with self._lock:
            self._drop(held)
            self._dropped.discard(held)
            self._give_back(held.region)


def usable_bytes() -> int:
    """Return the memory of this machine, or what the control groups of this process may use, if that is less.

    Both versions, see cgroups(7). A limit that cannot be read counts as none.
    """
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                mounted, name = Path("/sys/fs/cgroup"), "memory.max"
            elif "memory" in controllers.split(","):
                mounted, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
            else:
                continue
            place = PurePosixPath(group.lstrip("/"))
            for each in (place, *place.parents):  # in a container the path may be that on the host, and not be there
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    found = min(found, int((mounted / each / name).read_text()))
    return found


def _check(replica: Replica) -> None:
    named = replica.snapshot and len(replica.snapshot) <= _MAX_NAME and replica.rank >= 0
    if not named or not 0 < replica.slot_bytes <= replica.nbytes:
        raise TransportError(f"not a replica: {replica!r:.300}")
