"""Delete the files of removed steps and abandoned saves in the background: each rank its own, between its saves.

    retention (coordinator)    renames a step away: for readers it is gone
    Remover (every rank)       deletes the rank's files of it, in a thread of its writer process
    Remover (coordinator)      deletes what is left of it after the next save, or at the end of its process
    Remover (every rank)       deletes what its node has of steps that were removed since, at the end of its process

The whole job deletes at most `REMOVALS_PER_S` files a second, and a process none while it writes a save, unless two
removed steps are waiting. What is left by a crash is deleted by the coordinator of the next run, after its first save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from ckpt.errors import CheckpointError
from ckpt.saving.task import COORDINATOR
from ckpt.storage.directories import remove_share
from ckpt.storage.interface import Root
from ckpt.storage.node_packs import NodePacks

REMOVALS_PER_S = 500.0
_AFTER_S = 0.2  # the coordinator renames the steps soon after the other ranks have learned the outcome
_LOOK_S = 600.0
_ROUNDS = 2
_FINISH_S = 5.0  # for what is left at the end of the process
_log = logging.getLogger("ckpt")


class _StoppedError(Exception):
    """There is no time left."""


class Remover:
    """Deletes what one rank has to delete in one root. `start`, `held` and `close` are for one thread, and never wait.

    Only `close` does, for some seconds at most.
    """

    def __init__(self, root: Root, rank: int, world_size: int, packs: NodePacks | None = None) -> None:
        """`packs`: where the pack files of the root are on this node, to be deleted by any of its ranks."""
        self._root = root
        self._packs = packs
        self._rank = rank
        self._pause_s = world_size / REMOVALS_PER_S
        self._alone = world_size == 1 or not root.removed_by_all
        self._look_at = 0.0  # when to ask the storage for all that is to be deleted, on a monotonic clock
        self._left: set[str] = set()  # by the coordinator in an earlier round, for the other ranks to delete
        self._failed: dict[str, int] = {}  # in how many rounds what could not be deleted
        self._backlog = 0
        self._may_run = threading.Event()
        self._may_run.set()
        self._closing = threading.Event()
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._again = False  # a round is to begin that has not begun yet
        self._thread: threading.Thread | None = None  # until it has found that there is no round to begin

    def start(self, *, others: bool = True) -> None:
        """Begin to delete what is there to delete, or do so once more after that.

        Without `others` it may be only what this process has removed.
        """
        if others:
            self._look_at = 0.0
        if self._rank != COORDINATOR and not self._root.removed_by_all and self._packs is None:
            return
        with self._lock:
            self._again = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-remove", daemon=True)
                self._thread.start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delete nothing meanwhile, as this process writes a save; unless two steps are waiting to be deleted."""
        self._may_run.clear()
        try:
            yield
        finally:
            self._may_run.set()

    def hurry(self) -> None:
        """Delete what is waiting, also while `held`: a save may need its space. Any thread."""
        self._may_run.set()

    def close(self) -> None:
        """Delete the rest at full speed, for some seconds at most. Idempotent."""
        self._deadline = time.monotonic() + _FINISH_S
        self._closing.set()
        self._may_run.set()
        if self._thread is not None or self._left or self._packs is not None:
            self.start()
        thread = self._thread
        if thread is not None:
            thread.join(2 * _FINISH_S)

    def _run(self) -> None:
        self._closing.wait(_AFTER_S)
        while self._is_wanted():
            try:
                self._round()
            except _StoppedError:
                continue
            except (CheckpointError, OSError) as error:
                _log.debug("removed files are not all deleted: %s", error)

    def _is_wanted(self) -> bool:
        """Return whether to begin a round; if not, the thread ends, and `start` makes another one."""
        with self._lock:
            wanted, self._again = self._again, False
            if not wanted:
                self._thread = None
            return wanted

    def _round(self) -> None:
        if self._packs is not None:
            self._packs.clean(self._before_each)
        if self._rank != COORDINATOR and not self._root.removed_by_all:
            return
        here = self._root.removed_here()
        all_of_it = here is None or self._closing.is_set() or time.monotonic() >= self._look_at
        removed = self._root.removed() if here is None or all_of_it else here
        self._backlog = sum(moved.why == "removed" for moved in removed)
        for moved in removed if self._root.removed_by_all else ():
            with self._going_on(moved.source.path):
                remove_share(moved.source.path, self._rank, self._before_each)
        if self._rank != COORDINATOR:
            return
        left = set()
        for moved in removed:
            if not (self._alone or self._closing.is_set() or moved.name in self._left):
                left.add(moved.name)
                continue
            with self._going_on(moved.source.path):
                self._root.delete(moved, self._before_each)
        self._left = left
        if all_of_it:
            self._root.clean_records()
            self._look_at = time.monotonic() + _LOOK_S

    @contextlib.contextmanager
    def _going_on(self, path: str) -> Iterator[None]:
        """Take an error of one directory for no reason to leave the others: a late writer may still write there.

        It is tried again in the next round, and logged once, in the second one.
        """
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._failed[path] = self._failed.get(path, 0) + 1
            level = logging.WARNING if self._failed[path] == _ROUNDS else logging.DEBUG
            _log.log(level, "removed files are not all deleted, others are: %s", error)

    def _before_each(self) -> None:
        """Wait until the next file may be deleted."""
        if not self._closing.wait(self._pause_s):
            while self._backlog < 2 and not self._may_run.wait(1.0):
                pass
        if self._closing.is_set() and time.monotonic() > self._deadline:
            raise _StoppedError
