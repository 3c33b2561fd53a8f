"""Exports of published steps beside a training job, each in a writer process of its own, one after the other.

    trainer of rank 0 ── published(step) ──▶ due? ──▶ writer process of its own (`export`) ──▶ <directory>/step_<N>
                      ── poll() ◀── ended: log what failed, start the step that waits

The trainer only orders processes, and looks whether they have ended: it never waits for one before `close`.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from ckpt.arguments import in_seconds
from ckpt.async_calls.call import Call
from ckpt.async_calls.request import AsyncRequest
from ckpt.async_calls.writer import CallOutcome, WriterConfig, WriterProcess, wait_for_any
from ckpt.errors import CheckpointError, RemoteTraceback
from ckpt.events import ExportDone, ExportFailed
from ckpt.exporting.export import export_alone
from ckpt.exporting.options import ExportOptions
from ckpt.formats.foreign_files import remove_left
from ckpt.keeper.trainer_side import Keeper
from ckpt.observing import emit, is_observed, shortened
from ckpt.storage.interface import Root
from ckpt.storage.roots import own_directory
from ckpt.storage.step_source import HeldStep
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children

_log = logging.getLogger("ckpt")

_NICE = 15
_IO_LEVEL = 7
_FORK_WAIT_S = 1.0  # for the pid of a worker that is to be killed
_LOOK_S = 0.5
_RANK = 0  # which alone exports


@dataclass(frozen=True)
class _Running:
    """An export that runs. `held` keeps the step."""

    step: int
    target: str
    held: HeldStep
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
        timeout_s = in_seconds(options.timeout)
        config = WriterConfig(_NICE, "best-effort", _IO_LEVEL, start_timeout_s=timeout_s)
        self._writer = WriterProcess(config, keeper, "export")  # with a process while an export runs
        self._running: _Running | None = None
        self._calls = 0
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
                wait_for_any([self._writer], ending.within(_LOOK_S).left_s)

    def abort(self) -> None:
        """Kill the export that runs, and forget the one that waits. Idempotent; `release` is to follow."""
        if self._waiting is not None:
            self._forget("the Checkpointer was closed before")
        if (running := self._running) is not None:
            outcome = self._outcome()
            self._writer.abort(Deadline(_FORK_WAIT_S))
            self._end(running, outcome, "it was killed, as the Checkpointer was closed before")

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
        self._running = None

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
        if (running := self._running) is not None:
            if (outcome := self._outcome()) is not None:
                self._end(running, outcome)
            elif time.monotonic() > running.deadline:
                self._writer.abort(Deadline(0.0))
                self._end(running, None, f"it took longer than {self._options.timeout}")
            else:
                return
        if self._waiting is not None:
            (step, held), self._waiting = self._waiting, None
            self._start(step, held)

    def _start(self, step: int, held: HeldStep) -> None:
        target, timeout_s = self._target(step), in_seconds(self._options.timeout)
        arguments = (self._root.path, self._root.options, step, target, self._options, timeout_s)
        now = time.monotonic()
        self._calls += 1
        try:
            call = Call(self._calls, AsyncRequest(export_alone, arguments, []))
        except OSError as error:
            self._not_needed.append(held)
            self._failed(step, target, f"it cannot be started: {error}")
            return
        self._running = _Running(step, target, held, now, now + timeout_s)
        self._writer.submit(call)

    def _outcome(self) -> CallOutcome | None:
        """Return the outcome of the export that runs, if it has ended."""
        return next((each for each in self._writer.poll() if isinstance(each, CallOutcome)), None)

    def _end(self, running: _Running, outcome: CallOutcome | None, why: str = "") -> None:
        """Note the end of an export. Without an outcome it was killed, and `why`."""
        self._running = None
        self._not_needed.append(running.held)
        self._writer.release()
        if outcome is not None and outcome.error is None:
            _log.info("exported step %d to %s", running.step, running.target)
            if is_observed():
                seconds = time.monotonic() - running.began
                emit(ExportDone(time.time(), _RANK, running.step, running.target, seconds))
            return
        trace = None if outcome is None or outcome.error is None else outcome.error.__cause__
        self._was_killed |= trace is None
        if trace is None and time.monotonic() > running.deadline:  # the kernel may have ended it
            why = f"it took longer than {self._options.timeout}"
        cause = why if outcome is None or why else f"it {outcome.problem}"
        self._failed(
            running.step, running.target, cause, f"\n{trace.text}" if isinstance(trace, RemoteTraceback) else ""
        )

    def _failed(self, step: int, target: str, cause: str, detail: str = "") -> None:
        _log.error("the export of step %d to %s failed: %s%s", step, target, cause, detail)
        _emit_failure(step, target, cause)


def _emit_failure(step: int, target: str, cause: str) -> None:
    if is_observed():
        emit(ExportFailed(time.time(), _RANK, step, target, shortened(cause)))
