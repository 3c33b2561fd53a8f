"""The trainer's side of a mirror: says which steps are due, and orders the worker that copies them, or its share.

Rank 0 decides, when a save begins, and records it with the save: so all ranks have one answer, also those that have
come since. Until a step that is due is copied, or cannot be, the first root keeps it: rank 0 tells its writer, which
removes steps, with each save.

The trainer never waits for that worker before `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection
from dataclasses import replace

from ckpt.arguments import in_seconds
from ckpt.async_calls.call import pickled
from ckpt.async_calls.writer_main import Run
from ckpt.errors import CheckpointError
from ckpt.events import MirrorDone, MirrorFailed
from ckpt.keeper.messages import Finished, Notice
from ckpt.keeper.trainer_side import Keeper, Worker
from ckpt.mirroring.options import Mirror
from ckpt.mirroring.wanted import CODEC, MIRROR, CopyEnded, Due, MirrorMessage
from ckpt.observing import emit, is_observed, shortened
from ckpt.saving.recover import Branch
from ckpt.saving.retention import keep_policy
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId
from ckpt.storage.stores.interface import StorageOptions
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children
from inprocess.ipc.packets import Packet

_log = logging.getLogger("ckpt")

_GRACE_S = 10.0  # after the worker should have ended by itself
_EXIT_WAIT_S = 2.0  # for the keeper to tell how a dead worker ended
_FORK_WAIT_S = 1.0  # for the pid of a worker that is to be killed
_FAILING_S = 10.0  # for a mirror that could not be reached before
_POLL_S = 0.02
_ASK_S = 5.0
_RESTART_S, _LONGEST_RESTART_S = 1.0, 60.0
_NICE = 19
_CAUSE_CHARACTERS = 4000
_COORDINATOR = 0


class BackgroundMirror:
    """The copies of one Checkpointer, or the share of this rank in them. For the thread that trains.

    What fails is never raised, and logged by rank 0, which is told of all that matters.
    """

    def __init__(
        self,
        root: Root,
        mirror: Root,
        options: Mirror,
        mirror_options: StorageOptions,
        keeper: Keeper,
        node_local: str | None = None,
    ) -> None:
        """`node_local`: the directory of this node with the pack files of the root."""
        self._root = root
        self._node_local = node_local
        self._mirror = mirror
        self._options = options
        self._mirror_options = mirror_options
        self._keeper = keeper
        self._rank = _COORDINATOR
        self._last_due: SaveId | None = None  # of the saves that have begun
        self._published: dict[SaveId, bool] = {}  # that one, and those after it: whether they are published
        self._is_other_branch = False
        self._begun: set[SaveId] = set()  # due, and not known to be published
        self._newest: Due | None = None
        self._last_done: SaveId | None = None
        self._due: dict[SaveId, Due] = {}  # not copied yet, or given up; of a rank other than 0 also undecided ones
        self._let_go: set[SaveId] = set()  # due, and not held in the first root any more
        self._owner = 0
        self._is_failing = False  # what was tried last is to be tried again
        self._worker: Worker[MirrorMessage] | None = None
        self._last_words = ""
        self._start_at, self._restart_s = 0.0, _RESTART_S
        in_forked_children(self._disconnect)

    def is_next_due(self, in_flight: Collection[SaveId]) -> bool:
        """Return whether the save that is about to begin is due. What rank 0 says holds for all.

        The first one is, each N-th after it, the first one of another branch, so that the mirror leaves the old one,
        and the next one after a save that was due and was abandoned. `in_flight` are the saves that are not decided.
        """
        self._published = {save: known for save, known in self._published.items() if known or save in in_flight}
        if self._is_other_branch or self._last_due not in self._published:
            return True
        return len(self._published) >= self._options.every

    def another_branch(self) -> None:
        """Note that training has left steps that are published: the mirror may have them."""
        self._is_other_branch = True

    def begun(self, save: SaveId, is_due: bool) -> None:
        """Note a save that has begun, and whether it is due."""
        if is_due:
            self._last_due, self._published, self._is_other_branch = save, {}, False
            self._begun.add(save)
        self._published[save] = False

    def held(self, in_flight: Collection[SaveId]) -> list[str]:
        """Return the saves of which the first root must not remove the steps yet, by name; on rank 0 only.

        They are due, and neither copied nor given up: the newest `Mirror.held` of them. `in_flight` as above.
        """
        if self._rank != _COORDINATOR:
            return []
        if self._worker is not None:
            self._worker.receive(self._note)
        self._begun &= set(in_flight)
        waiting = sorted({*self._due, *self._begun}, key=lambda save: (save.owner, save.step))
        let_go, kept = waiting[: -self._options.held], waiting[-self._options.held :]
        for save in let_go:
            if save not in self._let_go:
                _log.warning(
                    "step %d is not in the mirror %s yet, and %d newer ones wait, too: the first root does not hold "
                    "it any longer (Mirror.held is %d)",
                    save.step,
                    self._mirror.path,
                    len(kept),
                    self._options.held,
                )
        self._let_go = set(let_go)
        return [save.name for save in kept]

    def published(self, save: SaveId, branch: Branch, rank: int, world_size: int) -> None:
        """Note a published save, and have it copied if it is due."""
        if rank != self._rank:  # since a restart
            self._end(wait=False)
            self._rank, self._owner, self._due = rank, 0, {}
        if save in self._published:
            self._published[save] = True
        self._newest = Due(save, save.owner, branch, world_size > 1)
        if rank != _COORDINATOR:
            self._want(replace(self._newest, is_due=False))  # its worker looks what rank 0 has decided
        elif save in self._begun:
            self._want(self._newest)
        self._begun.discard(save)

    def _want(self, due: Due) -> None:
        self._is_failing |= self._rank != _COORDINATOR and not self._due  # until that of rank 0 has begun
        self._due[due.save] = due
        if self._worker is not None:
            self._worker.channel.send(due)
        self.poll()

    def poll(self) -> None:
        """Note what the worker has done; have another one forked if it has died. Does not wait for it."""
        if self._worker is not None and self._worker.receive(self._note):
            self._died(self._worker)
        if self._due and self._worker is None and time.monotonic() >= self._start_at:
            self._start()

    def close(self, ending: Deadline) -> None:
        """Have the newest step copied, wait for what is not copied, for a limited time, and end. Idempotent.

        At most until `ending`, however long `Mirror.close_timeout` is.
        """
        newest, self._newest = self._newest, None
        known = self._last_due if self._rank == _COORDINATOR else self._last_done
        if newest is not None and newest.save != known:
            self._want(newest)
        begin, most_s = time.monotonic(), min(in_seconds(self._options.close_timeout), ending.left_s)
        while self._due and time.monotonic() - begin < (min(most_s, _FAILING_S) if self._is_failing else most_s):
            self.poll()
            time.sleep(_POLL_S)
        self.poll()
        for save in self._missing(ending):
            why = "the Checkpointer was closed before; a later job goes on with it"
            self._failed(save, why, again=False)
        self._end(wait=not self._due)
        self._due.clear()

    def _missing(self, ending: Deadline) -> list[SaveId]:
        """Return the saves that are due and not in the mirror, oldest first, also if this process was not told.

        The mirror is asked in a thread, as it may not answer; then all that are due count as missing.
        """
        missing = sorted(self._due, key=lambda save: (save.owner, save.step))
        there: dict[int, str | None] = {}

        def ask() -> None:
            with contextlib.suppress(CheckpointError, OSError):
                there.update(self._mirror.saves())

        if missing and not (self._is_failing and self._rank == _COORDINATOR):
            asking = threading.Thread(target=ask, name="ckpt-mirror-left", daemon=True)
            asking.start()
            asking.join(ending.within(_ASK_S).left_s)
        return [save for save in missing if there.get(save.step) != save.name]

    def abort(self) -> None:
        """Kill the worker. Idempotent."""
        self._end(wait=False)

    def _start(self) -> None:
        """Have a worker forked, and send it all that is due. It takes that before it exists."""
        self._start_at = time.monotonic() + self._restart_s
        self._restart_s = min(2 * self._restart_s, _LONGEST_RESTART_S)
        try:
            self._worker = self._new_worker()
        except Exception as error:  # a policy of the user may raise anything
            self._failed(None, f"its worker cannot be started: {error}", again=True)

    def _new_worker(self) -> Worker[MirrorMessage]:
        arguments = pickled(
            {
                "root": (self._root.path, self._root.options),
                "mirror": (self._mirror.path, self._mirror_options),
                "keep": keep_policy(self._options.keep),
                "bandwidth": self._options.bandwidth,
                "close_s": in_seconds(self._options.close_timeout),
                "rank": self._rank,
                "token": self._owner,
                "node_local": self._node_local,
            },
            {},
        )
        try:
            worker = Worker(self._keeper, "mirror", CODEC, nice=_NICE, io_class="idle")
            try:
                worker.channel.send(Run(MIRROR), arguments)
                for due in self._due.values():
                    worker.channel.send(due)
            except BaseException:
                worker.release()
                raise
        finally:
            os.close(arguments)
        return worker

    def _note(self, packet: Packet[MirrorMessage]) -> None:
        match packet.message:
            case Notice(_, {"owner": int(token)}):
                self._owner = token
            case Notice(_, {"begun": str()}):
                self._is_failing = False
            case Notice(_, {"not_due": str(name)}):
                self._due = {save: due for save, due in self._due.items() if save.name != name}
            case CopyEnded(save, nbytes, seconds, ""):
                step = save.step
                self._is_failing, self._last_done = False, save
                self._due.pop(save, None)
                self._restart_s = _RESTART_S
                level = logging.INFO if self._rank == _COORDINATOR else logging.DEBUG
                _log.log(level, "copied step %d to %s: %d bytes, %.1f s", step, self._mirror.path, nbytes, seconds)
                if is_observed() and self._rank == _COORDINATOR:
                    emit(MirrorDone(time.time(), self._rank, step, self._mirror.path, nbytes, seconds))
            case CopyEnded(save, error=cause, again=again):
                if not again:
                    self._due.pop(save, None)
                self._failed(save, cause, again=again)
            case Finished(traceback=trace):
                self._last_words = trace[-_CAUSE_CHARACTERS:].strip()

    def _failed(self, save: SaveId | None, cause: str, *, again: bool) -> None:
        """Tell that a step is not in the mirror; None if the mirror cannot be used."""
        self._is_failing = again
        step = None if save is None else save.step
        what = "the mirror" if step is None else f"step {step} is not in the mirror"
        later = "; it is tried again" if again else ""
        is_only_here = self._node_local is not None and not again  # rank 0 does not know the cause
        level = logging.WARNING if self._rank == _COORDINATOR or is_only_here else logging.DEBUG
        _log.log(level, "%s %s: %s%s", what, self._mirror.path, cause, later)
        if is_observed() and self._rank == _COORDINATOR:
            emit(MirrorFailed(time.time(), self._rank, step, self._mirror.path, shortened(cause), again))

    def _died(self, worker: Worker[MirrorMessage]) -> None:
        """Note that the worker has ended although it was not asked to."""
        how, words = worker.how_it_ends(_EXIT_WAIT_S), self._last_words
        self._disconnect()
        self._failed(None, f"its worker {how}{f': {words}' if words else ''}", again=True)
        self._start_at = max(self._start_at, time.monotonic() + self._restart_s / 2)

    def _end(self, *, wait: bool) -> None:
        worker = self._worker
        if worker is None:
            return
        if wait:
            worker.end(Deadline(_GRACE_S))
        else:
            worker.abort(Deadline(_FORK_WAIT_S))
        self._disconnect()

    def _disconnect(self) -> None:
        """Forget the worker, which then ends by itself; in a fork of the process it is that of the parent."""
        worker, self._worker, self._last_words = self._worker, None, ""
        if worker is not None:
            worker.release()
