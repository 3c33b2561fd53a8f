"""The trainer's side of memory that outlives it: tells the keeper what to keep.

Nothing here waits. What was told is done also if the trainer dies the next moment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence

from ckpt.keeper.messages import DropRegion, GiveUp, Linger, MemoryRecord, Settled, keep_message
from ckpt.keeper.takeover import Job, KeeperAddress, Taken, take
from ckpt.keeper.trainer_side import Keeper
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.unix_sockets import listen

_log = logging.getLogger("ckpt")
_MOST_STARTS = 10  # of keepers that end by themselves


class LingeringMemory:
    """The memory of one rank that its keeper keeps after its death, for at most `linger_s` seconds.

    Any thread. What fails is logged: then the memory of this rank is lost with it.
    """

    def __init__(self, keeper: Keeper, job: Job, linger_s: float) -> None:
        """Start nothing yet: that is done when a restore is over, and there is something to keep."""
        self._keeper = keeper
        self._job = job
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._generation = 0  # of the keeper that was told
        self._address: KeeperAddress | None = None
        self._kept: set[str] = set()
        self._settled: Settled | None = None
        self._starts = 0
        self._closed = False

    def take(self) -> list[Taken]:
        """Return the memory of earlier processes of this job on this node. The caller closes it."""
        return take(self._job)

    def settle(self, rank: int, record: MemoryRecord, needed: Iterable[SharedMemory], taken: Sequence[Taken]) -> None:
        """A restore is over: keep what is `needed` with this record, and have the others give up what was taken."""
        with self._lock:
            regions = list(needed)
            self._settled = Settled(rank, record, [each.address.base for each in taken])
            if self._closed or not (regions or taken or self._generation):
                return  # there are no slots yet
            self._sync(regions, settle=True)

    def hold(self, needed: Iterable[SharedMemory]) -> None:
        """Keep these regions, and no others. Does nothing before `settle`."""
        with self._lock:
            regions = list(needed)
            if self._settled is not None and not self._closed and (regions or self._generation):
                self._sync(regions)

    def close(self) -> None:
        """Give up the memory. The keeper does it at once, and is not waited for. Idempotent."""
        if self.leave():
            self._keeper.tell(GiveUp())  # also if an interrupt has left it unknown what that was told

    def leave(self) -> bool:
        """Leave the memory to the next processes, as soon as `Keeper.release` is called. Idempotent; the last call.

        Nothing is told any more. Returns whether this is the first call.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
            self._keeper.pump()
            if self._address is not None and self._keeper.generation != self._generation:  # that one has died
                self._address.remove()
            return not was_closed

    def _sync(self, regions: list[SharedMemory], *, settle: bool = False) -> None:
        """Tell the keeper what has changed; all, if it is a new one."""
        assert self._settled is not None
        try:
            is_new = self._begin()
            self._tell(regions)
            if is_new or settle:
                self._keeper.tell(self._settled)
        except OSError as error:
            self._closed = True
            self._forget()
            with contextlib.suppress(OSError):
                self._keeper.tell(GiveUp())
            _log.warning("the memory of this rank will not outlive it: its keeper cannot be started: %s", error)

    def _tell(self, regions: list[SharedMemory]) -> None:
        """Tell the regions to keep. An interrupt may have told some of them: the keeper ignores those."""
        wanted = {region.region_id: region for region in regions if not region.closed}
        for key in self._kept - wanted.keys():
            self._keeper.tell(DropRegion(key))
        for key in wanted.keys() - self._kept:
            self._keeper.tell(keep_message(wanted[key]), wanted[key].fd)
        self._kept = set(wanted)

    def _begin(self) -> bool:
        """Have the keeper that runs listen for the next processes, unless it does; return whether it was told now."""
        keeper = self._keeper
        keeper.start()
        if self._generation == keeper.generation:
            return False
        if self._generation:
            _log.warning("the process that keeps the memory of this rank has ended; there is a new one")
        self._forget()
        if self._starts == _MOST_STARTS:
            raise OSError(f"it has ended {self._starts} times")
        self._starts += 1
        job = self._job
        address = self._address = job.new_address()
        try:
            with listen(address.socket) as listener:
                # From now on the next processes find it, and wait until the keeper has begun.
                secret = address.write_key()
                keeper.tell(
                    Linger(address.base, secret, job.name, job.root, job.node, self._linger_s), listener.fileno()
                )
        except BaseException:
            self._forget()
            raise
        self._generation = keeper.generation
        return True

    def _forget(self) -> None:
        """Forget a keeper that has ended, or was not told completely."""
        address, self._address = self._address, None
        self._generation, self._kept = 0, set()
        if address is not None:
            with contextlib.suppress(OSError):
                address.remove()
