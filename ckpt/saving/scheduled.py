"""The saves that are scheduled and not decided, and how a load waits for them.

    the same Checkpointer           `Saver.drain` decides and finalizes them, on all ranks
    another one of this program     `wait_for_program`: known by the list of this module, also before they have begun
    another program                 `wait_for_step`: known once they have begun, by what is pending and by leases

Waiting changes nothing: each save is decided by its writers and its own ranks. The list belongs to the whole process,
as any part of a program may load what another part has saved; a child that the process forked has none.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ckpt.arguments import duration
from ckpt.async_calls import AsyncCallsQueue
from ckpt.errors import CheckpointCorruptError
from ckpt.saving.handle import SaveHandle
from ckpt.storage.interface import Pending, Root
from ckpt.storage.names import SaveId
from ckpt.storage.ownership import OwnerState
from ckpt.storage.roots import open_root
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.forks import Origin

_log = logging.getLogger("ckpt")
_COORDINATOR = 0
_TIMEOUT_S = 60.0  # for requests that a storage does not answer
_GRACE_S = 3.0  # a writer may have to be started first, on a busy machine
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25

# Changed by atomic operations only.
_of_this_process: weakref.WeakValueDictionary[int, Scheduled] = weakref.WeakValueDictionary()


class Scheduled:
    """The scheduled saves of one Checkpointer. `in_flight` returns those that it has staged.

    `wait` is for any thread; the rest for the one that saves, which has called `note_thread`.
    """

    def __init__(self, root: Root, queue: AsyncCallsQueue, in_flight: Callable[[], dict[SaveId, SaveHandle]]) -> None:
        self.root = root
        self._queue = queue
        self._in_flight = in_flight
        self._origin, self._thread = Origin(), threading.get_ident()
        _of_this_process[id(self)] = self

    def note_thread(self) -> None:
        """Remember that this thread saves."""
        self._thread = threading.get_ident()

    def __call__(self) -> dict[SaveId, SaveHandle]:
        """Return the saves whose calls are in the queue."""
        functions = self._queue.functions()
        return {save: handle for save, handle in self._in_flight().items() if any(fn is handle for fn in functions)}

    def wait(self, is_wanted: Callable[[SaveId], bool], deadline: float) -> None:
        """Wait until the saves that are wanted are decided, at most until `deadline`. Finalizes nothing."""
        if not self._origin.is_here:
            return
        in_this_thread = self._thread == threading.get_ident()
        saves = self() if in_this_thread else self._in_flight()
        wanted = {save: handle for save, handle in saves.items() if is_wanted(save) and self._is_undecided(save)}
        if not wanted:
            return
        _say_that_this_waits(self.root, wanted)
        if in_this_thread:  # which learns at once that a writer has died
            self._queue.wait_for(list(wanted.values()), deadline - time.monotonic())
            return
        pause = _Pause(self.root)
        while any(map(self._is_undecided, wanted)) and time.monotonic() < deadline:
            pause()

    def close(self) -> None:
        """Leave the list of the process: what is still in flight is known by what is pending. Idempotent."""
        _of_this_process.pop(id(self), None)

    def _is_undecided(self, save: SaveId) -> bool:
        return self.root.pending_save(save).outcome() is None


def wait_until_written(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    timeout: timedelta | float = timedelta(minutes=10),
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Wait while a live process writes `step`, in this program or another; without it, while this program saves there.

    At most `timeout`, a timedelta or seconds. `path` is a checkpoint root, also a URL, with the `storage_options` of
    `Checkpointer`. For any thread, without communication. Decides and finalizes nothing: afterwards the step may be
    published, or not, and what a process that died has left is as it was.
    """
    timeout_s = duration("timeout", timeout, or_zero=True).total_seconds()
    root, deadline = (
        open_root(path, StorageOptions.of(storage_options, max(timeout_s, 1.0))),
        time.monotonic() + timeout_s,
    )
    if step is None:
        wait_for_program(root, deadline)
    else:
        wait_for_step(root, step, deadline)


def pending_steps(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """Return the steps of the saves to a root that are neither published nor abandoned, sorted.

    They may be published later, by this program or another one that is running, or by the next one. `path` and
    `storage_options` are those of `Checkpointer`.
    """
    root = open_root(path, StorageOptions.of(storage_options, _TIMEOUT_S))
    return sorted({save.step for save in root.pending()})


def wait_for_program(root: Root, deadline: float, step: int | None = None, but: Scheduled | None = None) -> None:
    """Wait until saves of this process to a root are decided, at most until `deadline` (monotonic).

    Those of `step`, or all; without those of `but`.
    """
    others = [reference() for reference in _of_this_process.valuerefs()]
    for each in others:
        if each is None or each is but or each.root.path != root.path:
            continue
        each.wait(lambda save: step in (None, save.step), deadline)


def wait_for_step(root: Root, step: int, deadline: float, but: Scheduled | None = None) -> None:
    """Wait while live processes, of this program or another, write a step; at most until `deadline` (monotonic).

    Returns at once if none does. Without the saves of `but`.
    """
    wait_for_program(root, deadline, step, but)
    own = set() if but is None else set(but())
    pause, said = _Pause(root), False
    lost_since: float | None = None
    while (now := time.monotonic()) < deadline:
        saves = [save for save in root.pending() if save.step == step and save not in own]
        if not saves:
            return
        if any(_is_written(root.pending_save(save)) for save in saves):
            lost_since = None
        elif lost_since is None:
            lost_since = now
        elif now - lost_since >= _GRACE_S:
            return
        if not said and lost_since is None:
            said = True
            _say_that_this_waits(root, saves)
        pause()


def _is_written(pending: Pending) -> bool:
    """Return whether the processes that a save waits for are alive, as far as is known."""
    leases, owner = pending.root.ownership, pending.save.owner
    if leases.state(owner) is OwnerState.GONE:
        return False
    try:
        intent = pending.intent()
    except CheckpointCorruptError:
        return False
    if intent is None:
        return True
    missing = set(range(int(intent["world_size"]))) - pending.parts_present()
    writers = leases.leases(owner).writers()
    dead = {writer.rank for writer in writers} - {writer.rank for writer in writers if writer.alive}
    return not dead & (missing or {_COORDINATOR})


def _say_that_this_waits(root: Root, saves: object) -> None:
    steps = ", ".join(str(save.step) for save in saves)  # type: ignore[attr-defined]
    _log.info("waiting for step %s of %s, which is being written", steps, root.path)


class _Pause:
    """Sleeps a little longer each time."""

    def __init__(self, root: Root) -> None:
        self._least_s = root.least_look_s
        self._pause_s = _FIRST_PAUSE_S

    def __call__(self) -> None:
        time.sleep(max(self._pause_s, self._least_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
