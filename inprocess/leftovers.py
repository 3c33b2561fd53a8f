"""Leftovers of an interrupted iteration in the process, which must not be there in the next one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inprocess.exception import is_restart
from inprocess.main_thread.thrower import MainThreadThrower, discard_imports, failed_imports
from inprocess.modes import Modes
from inprocess.old_threads import OldThreads
from inprocess.process_state import release_frames
from inprocess.torn_locks import (
    HeldLock,
    TornLock,
    release_import_lock,
    release_logging_locks,
    release_torn_locks,
    used_locks,
)

__all__ = ["Leftovers"]

_log = logging.getLogger(__name__)


class Leftovers:
    """Frames, locks, imports by halves, modes of libraries, and threads. Main thread.

    `begin` when an iteration begins, `make_good` when it was interrupted, `close` after the last one. Locks that were
    `held` before the function was called stay so.
    """

    def __init__(self, thrower: MainThreadThrower, held: Sequence[HeldLock]) -> None:
        self._thrower = thrower
        self._held = held
        self._modes = Modes()
        self._threads = OldThreads()

    def begin(self) -> None:
        """Note what the iteration finds."""
        self._modes.record()
        self._threads.begin()

    def make_good(self, failure: BaseException, iteration: int, where: str) -> list[str]:
        """Release and restore what can be; return the threads that the iteration has left. `where` is for messages.

        The frames of an exception that goes on to the caller are kept.
        """
        locks = used_locks(failure)
        self._discard_imports(failed_imports(failure), where)  # first: what modules register ends when they are freed
        if isinstance(failure, Exception) or is_restart(failure):
            release_frames(failure)
        self._release_locks(locks, where)
        if modes := self._modes.restore():
            _log.info("%s: these modes are as they were before the function began: %s", where, ", ".join(modes))
        threads = self._threads.end(iteration)
        if threads:
            _log.warning(
                "%s: the interrupted function has left threads running, which cannot use process groups any more: %s. "
                "End them before the function ends (try ... finally)",
                where,
                ", ".join(threads),
            )
        return threads

    def close(self) -> None:
        """Leave torch as it was. Idempotent."""
        self._threads.close()

    def _release_locks(self, locks: list[TornLock], where: str) -> None:
        if count := release_logging_locks(self._held):
            _log.warning("%s: the interrupted function held %d locks of logging; they are released", where, count)
        if release_import_lock():
            _log.warning("%s: the interrupted function held the lock of the import system; it is released", where)
        if owners := release_torn_locks(locks, self._held):
            _log.warning("%s: the interrupted function held locks; they are released: %s", where, ", ".join(owners))

    def _discard_imports(self, failed: list[str], where: str) -> None:
        thrower = self._thrower
        place, thrower.forced_at = thrower.forced_at, None
        interrupted, thrower.interrupted_imports = thrower.interrupted_imports, []
        imports = list(dict.fromkeys(interrupted + failed))
        if place is not None:
            _log.warning(
                "%s: no place without harm was found in time, the function was interrupted at %s", where, place
            )
        if imports:
            _log.warning("%s: the import of %s was interrupted; it is done again", where, ", ".join(imports))
            discard_imports(imports)
