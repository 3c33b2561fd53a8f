"""Exports of published steps beside a training job, each in a worker of its own, one after the other.

    trainer of rank 0 ── published(step) ──▶ due? ──▶ keeper: fork a worker (`worker`) ──▶ <directory>/step_<N>
                      ── poll() ◀── ended: log what failed, start the step that waits

The trainer only orders processes, and looks whether they have ended: it never waits for one before `close`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from dataclasses import dataclass

from ckpt.arguments import in_seconds
from ckpt.errors import CheckpointError
from ckpt.events import ExportDone, ExportFailed
from ckpt.exporting.messages import CODEC, ExportEnded, ExportRequest, Message
from ckpt.exporting.options import ExportOptions
from ckpt.formats.foreign_files import remove_left
from ckpt.keeper.trainer_side import Keeper, Worker
from ckpt.observing import emit, is_observed, shortened
from ckpt.storage.interface import Root
from ckpt.storage.roots import own_directory
from ckpt.storage.step_source import HeldStep
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children
from inprocess.ipc.packets import PacketError

__all__ = ["BackgroundExports"]

_log = logging.getLogger("ckpt")

_NICE = 15
_IO_LEVEL = 7
_EXIT_WAIT_S = 2.0  # for the keeper to tell how a dead worker ended
_FORK_WAIT_S = 1.0  # for the pid of a worker that is to be killed
_LOOK_S = 0.5
_RANK = 0  # which alone exports


@dataclass(frozen=True)
class _Running:
    """An export that runs. `held` keeps the step."""

    step: int
    target: str
    held: HeldStep
    worker: Worker[Message]
    began: float
    deadline: float


class BackgroundExports:
    """The exports of one Checkpointer, on rank 0. At most one runs; a newer step that is due replaces one that waits.

    A step is held from when it is due until its export has ended: retention does not remove it. What fails is logged,
    with the cause, and never raised. For the thread that trains, but `release`.
    """

    def __init__(self, root: Root, options: ExportOptions, keeper: Keeper) -> None:
        directory = own_directory(os.fspath(options.directory), "a directory for exports")
        if os.path.realpath(directory) == os.path.realpath(root.path):
            raise ValueError(
                f"the exports would have the names of the checkpoints in {root.path}: give ExportOptions another "
                "directory"
            )
        self._root = root
        self._options = options
        self._keeper = keeper
        self._running: _Running | None = None
        self._ended: ExportEnded | None = None  # what the worker of `_running` has said
        self._waiting: tuple[int, HeldStep] | None = None
        self._not_needed: list[HeldStep] = []
        self._was_killed = False  # an export, so that it may have left hidden files
        in_forked_children(self._disconnect)

    def published(self, step: int) -> None:
        """Export the step if it is due, as soon as no other export runs."""
        if step % self._options.every != 0:
            return
        try:
            held = self._root.hold_step(step, lease=True, renewing=True)
        except CheckpointError as error:
            self._failed(step, self._target(step), str(error))
            return
        if self._waiting is not None:
            self._forget(f"step {step} is due, and the export before has not ended")
        self._waiting = step, held
        self.poll()

    def poll(self) -> None:
        """Note an export that has ended, kill one that takes too long, and start the one that waits. Never waits."""
        self._advance()
        self._release_steps()

    def close(self, ending: Deadline) -> None:
        """Wait until all exports have ended, then kill what is left. Idempotent; `release` is to follow."""
        while self._running is not None or self._waiting is not None:
            self._advance()
            if ending.is_over:
                self.abort()
            elif self._running is not None:
                channel, poll = self._running.worker.channel, select.poll()
                poll.register(channel, channel.poll_events)
                poll.poll(ending.poll_ms(_LOOK_S))

    def abort(self) -> None:
        """Kill the export that runs, and forget the one that waits. Idempotent; `release` is to follow."""
        if self._waiting is not None:
            self._forget("the Checkpointer was closed before")
        if (running := self._running) is not None:
            is_over = self._is_over(running)
            running.worker.abort(Deadline(_FORK_WAIT_S))
            self._end(running, "" if is_over else "it was killed, as the Checkpointer was closed before")

    def release(self) -> None:
        """Release the steps, and remove what killed exports have left. Idempotent; the last call, in any thread.

        This waits for storage, and uses no process.
        """
        self._release_steps()
        if self._was_killed:
            self._was_killed = False
            remove_left(os.fspath(self._options.directory))

    def _release_steps(self) -> None:
        while self._not_needed:
            self._not_needed.pop().close()

    def _disconnect(self) -> None:
        """In a fork of the process: the worker is that of the parent."""
        running, self._running = self._running, None
        if running is not None:
            running.worker.release()

    def _forget(self, why: str) -> None:
        """Forget the step that waits."""
        if self._waiting is not None:
            (step, held), self._waiting = self._waiting, None
            self._not_needed.append(held)
            _log.warning("step %d is not exported: %s", step, why)
            _emit_failure(step, self._target(step), why)

    def _target(self, step: int) -> str:
        name = f"step_{step:08d}" + (".pt" if self._options.format == "torch" else "")
        return os.path.join(os.fspath(self._options.directory), name)

    def _advance(self) -> None:
        running = self._running
        if running is not None:
            is_over = self._is_over(running)
            if not is_over and time.monotonic() > running.deadline:
                running.worker.kill()
                is_over = running.worker.pidfd is None  # the keeper hangs, and has not forked it
            if not is_over:
                return
            self._end(running)
        if self._waiting is not None:
            (step, held), self._waiting = self._waiting, None
            self._start(step, held)

    def _start(self, step: int, held: HeldStep) -> None:
        target, timeout_s = self._target(step), in_seconds(self._options.timeout)
        try:
            worker = self._worker_for(ExportRequest(self._root.path, self._root.options, step, target, timeout_s))
        except (OSError, PacketError) as error:
            self._not_needed.append(held)
            self._failed(step, target, f"it cannot be started: {error}")
            return
        now = time.monotonic()
        self._running = _Running(step, target, held, worker, now, now + timeout_s)

    def _worker_for(self, request: ExportRequest) -> Worker[Message]:
        worker = Worker(self._keeper, "export", CODEC, nice=_NICE, io_class="best-effort", io_level=_IO_LEVEL)
        try:
            with open(os.memfd_create("ckpt-export", os.MFD_CLOEXEC), "wb") as form:
                form.write(json.dumps(self._options.to_document()).encode())
                form.flush()
                worker.channel.send(request, form.fileno())
        except BaseException:
            worker.release()
            raise
        return worker

    def _is_over(self, running: _Running) -> bool:
        """Take in what the worker has said; return whether it has ended."""
        self._keeper.pump()
        return running.worker.receive(self._note)

    def _note(self, message: Message) -> None:
        if isinstance(message, ExportEnded):
            self._ended = message

    def _end(self, running: _Running, how: str = "") -> None:
        """Note the end of an export. Without an answer of its worker, `how` it ended, if that is known."""
        self._running = None
        self._not_needed.append(running.held)
        ended, self._ended = self._ended, None
        if ended is None:
            how = how or self._how_ended(running)
            ended = ExportEnded(how)
            self._was_killed = True
        running.worker.release()
        if ended.error is None:
            _log.info("exported step %d to %s", running.step, running.target)
            if is_observed():
                seconds = time.monotonic() - running.began
                emit(ExportDone(time.time(), _RANK, running.step, running.target, seconds))
            return
        self._failed(running.step, running.target, ended.error, f"\n{ended.traceback}" if ended.traceback else "")

    def _how_ended(self, running: _Running) -> str:
        if time.monotonic() > running.deadline:
            return f"it took longer than {self._options.timeout}"
        return f"its process {running.worker.how_it_ends(_EXIT_WAIT_S)}"

    def _failed(self, step: int, target: str, cause: str, detail: str = "") -> None:
        _log.error("the export of step %d to %s failed: %s%s", step, target, cause, detail)
        _emit_failure(step, target, cause)


def _emit_failure(step: int, target: str, cause: str) -> None:
    if is_observed():
        emit(ExportFailed(time.time(), _RANK, step, target, shortened(cause)))
