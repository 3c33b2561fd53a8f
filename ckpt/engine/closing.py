"""The end of a `Checkpointer`, and the refusal of calls after it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection
from types import TracebackType

from ckpt.engine.parts import Parts
from ckpt.errors import CheckpointError, CheckpointTimeoutError, StorageError
from ckpt.observing import ObservedWork, is_failing
from ckpt.storage.directories import remove_contents
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import Origin
from inprocess.ipc.threads import finishes_within

_LEAVING_S = 5.0  # to leave the root and end processes, when nothing is waited for; an eighth of `timeout` at most
_KEEPER_S = 20.0  # it has nothing left to do, but may only be starting
_log = logging.getLogger("ckpt")


class Closing:
    """Ends the parts of one Checkpointer, once, and only in the process that made them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._timeout_s = parts.settings.timeout_s
        self._closed = False
        self._origin = Origin()
        self._work = None if parts.settings.read_only else ObservedWork()

    def check_open(self) -> None:
        """Raise CheckpointError after the end, and in a fork of the process."""
        if self._closed:
            raise CheckpointError("this Checkpointer is closed")
        if not self._origin.is_here:
            raise CheckpointError(
                f"this Checkpointer belongs to process {self._origin.pid}; process {os.getpid()} is a fork of it, such "
                "as a data loader worker, and can neither save nor restore with it"
            )

    def check_writable(self) -> None:
        """Raise CheckpointError with `read_only`, too."""
        self.check_open()
        if self._parts.settings.read_only:
            raise CheckpointError("this Checkpointer was made with read_only=True: it saves and removes nothing")

    def close(self, finalized: Collection[int]) -> None:
        """See `Checkpointer.close`. `finalized` has the steps that are published, also those of the last moment."""
        if self._closed or not self._origin.is_here:
            return
        self._closed = True
        parts, ending = self._parts, Deadline(self._timeout_s)
        waiting = ending.before_end(self._leaving_s)
        with contextlib.ExitStack() as ends:  # all are done, whatever one of them raises; the last one first
            ends.push(self._end_work)
            ends.callback(self._release_exports, ending)
            ends.push(functools.partial(self._end_keeper, ending))
            if parts.mirror is not None:
                ends.callback(parts.mirror.close, waiting)
            if parts.exports is not None:
                ends.callback(parts.exports.close, waiting)
            ends.callback(parts.saver.close, ending)
            ends.callback(parts.saver.failures.say_what_is_lost)
            self._finalize_all(waiting, finalized)
        rank = parts.saver.last_rank
        if parts.reuses_files and rank == 0:
            finishes_within(ending, self._delete_recycled, "ckpt-delete-recycled")

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End after an exception, without waiting: the writers finish what was scheduled by themselves."""
        if not self._origin.is_here:
            return
        self._closed = True
        self._end_work(kind, error, trace)
        parts = self._parts
        ending = Deadline(self._leaving_s)
        parts.saver.failures.say_what_is_lost()
        with contextlib.ExitStack() as ends:
            ends.callback(self._release_exports, ending)
            ends.callback(parts.keeper.release)
            if parts.mirror is not None:
                ends.callback(parts.mirror.abort)
            if parts.exports is not None:
                ends.callback(parts.exports.abort)
            ends.callback(parts.saver.close, ending, linger=True)
            if self._owns_queue:
                parts.queue.__exit__(kind, error, trace)

    def _end_keeper(
        self,
        ending: Deadline,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the keeper, when all that it has forked is ended or given up."""
        if error is None or isinstance(error, Exception):
            self._parts.keeper.close(ending.within(_KEEPER_S))
        else:  # Ctrl-C waits for nothing: the writers finish by themselves
            self._parts.keeper.release()

    def _end_work(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._work is not None:
            self._work.end(self._parts.saver.last_rank, has_failed=error is not None or is_failing())

    @property
    def _owns_queue(self) -> bool:
        return self._parts.settings.queue is None

    @property
    def _leaving_s(self) -> float:
        return min(_LEAVING_S, self._timeout_s / 8)

    def _finalize_all(self, deadline: Deadline, finalized: Collection[int]) -> None:
        """Finalize all calls, and close the queue unless it is shared."""
        queue, saver = self._parts.queue, self._parts.saver
        steps = {save.step for save in saver.in_flight}
        try:
            if self._owns_queue:
                queue.close(no_dist=True, timeout_s=deadline.left_s, check=saver.failures.check)
            else:
                queue.finalize_all(deadline, no_dist=True, check=saver.failures.check)
        except CheckpointTimeoutError as error:
            left = sorted(steps - set(finalized))
            if not left:
                raise
            raise CheckpointTimeoutError(
                f"close: the saves of steps {left} were not finalized in {self._timeout_s:g} s: {error}",
                rank=saver.last_rank,
                step=left[0],
            ) from error

    def _release_exports(self, ending: Deadline) -> None:
        """Release the steps of exports, whose storage may not answer; after the processes, which use the keeper."""
        if self._parts.exports is not None:
            finishes_within(ending, self._parts.exports.release, "ckpt-end-exports")

    def _delete_recycled(self) -> None:
        root = self._parts.root
        if self._parts.saver.root_claim.is_owner:
            for path in root.discard_recycled():
                try:
                    remove_contents(path, lambda: None)
                except StorageError as error:
                    _log.warning("files kept for the next save are not all deleted: %s", error)
