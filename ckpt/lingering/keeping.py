"""The trainer's end of its holder: starts it, and tells it what to keep.

Nothing here waits for the holder, except `close`. What was told is done also if the trainer dies the next moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Iterable, Sequence

from ckpt.lingering.job import Address, Job
from ckpt.lingering.messages import CONTROL, Control, Drop, Keep, Leave, Linger, Record, Serve, Settled
from ckpt.lingering.takeover import Taken, take
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.packets import Channel
from inprocess.ipc.process import end_process, start_module
from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.unix_sockets import listen

__all__ = ["LingeringMemory"]

_log = logging.getLogger("ckpt")
_EXIT_WAIT_S = 5.0
_MOST_STARTS = 10  # of holders that end by themselves


class LingeringMemory:
    """The memory of one rank that is kept after its death, for at most `linger_s` seconds.

    Any thread. What fails is logged: then the memory of this rank is lost with it.
    """

    def __init__(self, job: Job, linger_s: float) -> None:
        """Start nothing yet: that is done when a restore is over, and there is something to keep."""
        self._job = job
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[Control] | None = None
        self._address: Address | None = None
        self._kept: set[str] = set()
        self._settled: Settled | None = None
        self._starts = 0
        self._closed = False

    def take(self) -> list[Taken]:
        """Return what is kept of earlier processes of this job on this node. The caller closes it."""
        return take(self._job)

    def settle(self, rank: int, record: Record, needed: Iterable[SharedMemory], taken: Sequence[Taken]) -> None:
        """A restore is over: keep what is `needed` with this record, and have the others give up what was taken."""
        with self._lock:
            regions = list(needed)
            self._settled = Settled(rank, record, [each.address.base for each in taken])
            if self._closed or not (regions or taken or self._process is not None):
                return  # there are no slots yet
            self._sync(regions, settle=True)

    def hold(self, needed: Iterable[SharedMemory]) -> None:
        """Keep these regions, and no others. Does nothing before `settle`."""
        with self._lock:
            regions = list(needed)
            if self._settled is not None and not self._closed and (regions or self._process is not None):
                self._sync(regions)

    @property
    def pid(self) -> int | None:
        """The holder; None while there is none."""
        return None if self._process is None else self._process.pid

    def close(self, ending: Deadline | None = None) -> None:
        """Give up the memory, and wait for the end of the holder until the deadline, or some seconds. Idempotent."""
        with self._lock:
            process, address = self._end(Leave()), self._address
        if process is not None:
            end_process(process, (ending or Deadline(_EXIT_WAIT_S)).within(_EXIT_WAIT_S))
        if address is not None:  # if it could not do that itself
            address.remove()

    def leave(self) -> None:
        """Let the holder go on, for the next processes. Idempotent; nothing else may follow."""
        with self._lock:
            process, self._address = self._end(Linger()), None
        if process is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down, and init will reap it
                threading.Thread(target=process.wait, name="ckpt-reap-linger", daemon=True).start()

    def _end(self, message: Control) -> subprocess.Popen[bytes] | None:
        self._closed = True
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if channel is not None:
            channel.send(message)
            channel.flush()
            channel.close()
        return process

    def _sync(self, regions: list[SharedMemory], *, settle: bool = False) -> None:
        """Tell the holder what has changed; all, if it is a new one."""
        try:
            is_new = self._start()
            assert self._channel is not None
            assert self._settled is not None
            self._tell(self._channel, regions)
            if is_new or settle:
                self._channel.send(self._settled)
            self._channel.flush()
        except OSError as error:
            self._closed = True
            self._discard()
            _log.warning("the memory of this rank will not outlive it: its holder cannot be started: %s", error)

    def _tell(self, channel: Channel[Control], regions: list[SharedMemory]) -> None:
        """Tell what is to be kept. An interrupt may have told that a part of it is: the holder ignores that."""
        wanted = {region.region_id: region for region in regions if not region.closed}
        for key in self._kept - wanted.keys():
            channel.send(Drop(key))
        for key in wanted.keys() - self._kept:
            channel.send(Keep(key, wanted[key].size), wanted[key].fd)
        self._kept = set(wanted)

    def _start(self) -> bool:
        """Start the holder unless it runs; return whether it was started."""
        if self._channel is not None and self._process is not None and self._process.poll() is None:
            return False
        if self._channel is not None:
            _log.warning("the process that keeps the memory of this rank has ended; there is a new one")
        self._discard()
        if self._starts == _MOST_STARTS:
            raise OSError(f"it has ended {self._starts} times")
        self._starts += 1
        self._kept = set()
        job = self._job
        address = self._address = job.new_address()
        trainer = os.pidfd_open(os.getpid())
        try:
            self._channel, theirs = Channel.pair(CONTROL)
            with theirs, listen(address.socket) as listener:
                # From now on the next processes find it, and wait until it has begun.
                secret = address.write_key()
                arguments = theirs.fileno(), trainer, os.getpid()
                self._process = start_module("ckpt.lingering", *map(str, arguments), pass_fds=arguments[:2])
                serve = Serve(address.base, secret, job.name, job.root, job.node, self._linger_s)
                self._channel.send(serve, listener.fileno())
        except BaseException:
            self._discard()
            raise
        finally:
            os.close(trainer)
        return True

    def _discard(self) -> None:
        """Forget a holder that has ended, or was not started completely."""
        process, channel, address = self._process, self._channel, self._address
        self._process = self._channel = self._address = None
        if channel is not None:
            channel.close()
        if process is not None and process.poll() is None:
            end_process(process, Deadline(0.0))
        if address is not None:
            address.remove()
