"""The memory of a slot on its way: pages are allocated, and pinned where there is a GPU, beside training.

thread of low priority ───▶ block, block, ... ──▶ pin ──▶ ready
a save that waits ────────▶ takes blocks, too, in threads of its own
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from inprocess.ipc.shared_memory import SharedMemory
from inprocess.ipc.threads import JoinableThread, join_all

_LOWEST_PRIORITY = 19
_LEAST_S = 0.001


class Preparation:
    """The allocation of all pages of a region; `pin`, if given, is called behind it."""

    def __init__(
        self, region: SharedMemory, pin: Callable[[], None] | None, after: JoinableThread | None = None
    ) -> None:
        """To be begun; where `after` is given, nothing is allocated before that thread has ended."""
        self._region = region
        self._pin = pin
        self._after = after
        self._blocks = deque(region.blocks())
        self._error: OSError | None = None
        self._helpers: list[JoinableThread] = []
        self._wanted = threading.Event()  # set while a save waits
        self._stopped = False
        self.is_pinned = False
        """Whether `pin` was called and has returned."""
        self._ready: Future[None] = Future()
        self._thread = JoinableThread(self._run, "ckpt-arena")

    def begin(self) -> None:
        """Begin, in a thread. Idempotent: an interrupt may have come between."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the memory is ready, or cannot be had."""
        return self._ready.done()

    def check(self) -> None:
        """Raise OSError, or the error of CUDA, if the memory cannot be had. To be called when it `is_over`."""
        self._ready.result()
        if self._error is not None:  # of a block that a save took when the thread found none left
            raise self._error

    def hurry(self, limit_s: float) -> None:
        """Work on it, with as many threads as the copies of a save, at most about `limit_s`, until it is over."""
        if self._after is not None and self._after.is_alive():
            self._after.join(limit_s)
            return
        self._wanted.set()
        if not self._helpers:
            count = min(torch.get_num_threads() - 1, len(self._blocks))
            self._helpers = [JoinableThread(self._help, "ckpt-arena-help") for _ in range(count)]
            for helper in self._helpers:
                helper.start()
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self._take():
            pass
        wait([self._ready], max(_LEAST_S, end - time.monotonic()))

    def relax(self) -> None:
        """Leave the rest to the thread of low priority, as no save waits any more."""
        self._wanted.clear()
        helpers, self._helpers = self._helpers, []
        join_all(helpers)

    def stop(self) -> None:
        """Allocate no more. Idempotent; does not wait."""
        self._stopped = True
        self._blocks.clear()

    def join(self) -> None:
        """Wait until no thread uses the memory any more; that is soon after `stop`."""
        join_all([self._thread, *self._helpers])

    def _help(self) -> None:
        while self._wanted.is_set() and self._take():
            pass

    def _take(self) -> bool:
        """Allocate one block; return False if none is left."""
        try:
            start, size = self._blocks.popleft()
        except IndexError:
            return False
        try:
            self._region.populate(start, size)
        except OSError as error:
            self._error = error
            self._blocks.clear()
        return True

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            # Not with a GPU: the driver's locks, which pinning takes, are those that training needs.
            if self._pin is None:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            if self._after is not None:
                self._after.join()
            while self._take():
                pass
            for helper in list(self._helpers):
                helper.join()
            if self._error is not None:
                raise self._error
            if self._pin is not None and not self._stopped:
                self._pin()
                self.is_pinned = True
        except BaseException as error:
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)
