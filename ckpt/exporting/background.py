"""Exports of published steps beside a training job, each in a process of its own, one after the other.

    trainer of rank 0 ── published(step) ──▶ due? ──▶ process: python -m ckpt.exporting ──▶ <directory>/step_<N>
                      ── poll() ◀── ended: log what failed, start the step that waits

The trainer only starts processes, with exec, and looks whether they have ended: it never waits for one before `close`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import IO

from ckpt.arguments import in_seconds
from ckpt.errors import CheckpointError
from ckpt.events import ExportDone, ExportFailed
from ckpt.exporting.options import ExportOptions
from ckpt.formats.files import remove_left
from ckpt.observing import emit, is_observed, shortened
from ckpt.storage.interface import HeldStep, Root
from ckpt.storage.roots import own_directory
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.process import end_process, start_module

__all__ = ["BackgroundExports"]

_log = logging.getLogger("ckpt")

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOGGED_CHARACTERS = 4000
_RANK = 0  # which alone exports


@dataclass(frozen=True)
class _Running:
    """An export that runs. `messages` is what the process writes to stderr, `held` keeps the step."""

    step: int
    target: str
    held: HeldStep
    process: subprocess.Popen[bytes]
    messages: IO[bytes]
    began: float
    deadline: float


class BackgroundExports:
    """The exports of one Checkpointer, on rank 0. At most one runs; a newer step that is due replaces one that waits.

    A step is held from when it is due until its export has ended: retention does not remove it. What fails is logged,
    with the cause, and never raised. For the thread that trains.
    """

    def __init__(self, root: Root, options: ExportOptions) -> None:
        directory = own_directory(os.fspath(options.directory), "a directory for exports")
        if os.path.realpath(directory) == os.path.realpath(root.path):
            raise ValueError(
                f"the exports would have the names of the checkpoints in {root.path}: give ExportOptions another "
                "directory"
            )
        self._root = root
        self._options = options
        self._running: _Running | None = None
        self._waiting: tuple[int, HeldStep] | None = None
        self._was_killed = False  # an export, so that it may have left hidden files

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
        running = self._running
        if running is not None:
            if running.process.poll() is None:
                if time.monotonic() > running.deadline:
                    running.process.kill()
                return
            self._end(running)
        if self._waiting is not None:
            (step, held), self._waiting = self._waiting, None
            self._start(step, held)

    def close(self, deadline: Deadline) -> None:
        """Wait until all exports have ended, then kill what is left. Idempotent."""
        while self._running is not None or self._waiting is not None:
            if self._running is not None:
                try:
                    self._running.process.wait(deadline.left_s)
                except subprocess.TimeoutExpired:
                    self.abort()
            self.poll()
        self._clean()

    def abort(self) -> None:
        """Kill the export that runs, and forget the one that waits. Idempotent."""
        running = self._running
        if self._waiting is not None:
            self._forget("the Checkpointer was closed before")
        if running is None:
            return
        end_process(running.process, Deadline(0.0))
        self._end(running)
        self._clean()

    def _clean(self) -> None:
        if self._was_killed:
            self._was_killed = False
            remove_left(os.fspath(self._options.directory))

    def _forget(self, why: str) -> None:
        """Forget the step that waits."""
        if self._waiting is not None:
            (step, held), self._waiting = self._waiting, None
            held.close()
            _log.warning("step %d is not exported: %s", step, why)
            _emit_failure(step, self._target(step), why)

    def _target(self, step: int) -> str:
        name = f"step_{step:08d}" + (".pt" if self._options.format == "torch" else "")
        return os.path.join(os.fspath(self._options.directory), name)

    def _start(self, step: int, held: HeldStep) -> None:
        options, target = self._options, self._target(step)
        timeout_s = in_seconds(options.timeout)
        request = {"root": self._root.path, "step": step, "target": target, "timeout_s": timeout_s}
        if self._root.options is not None:
            request["storage_options"] = dict(self._root.options.given)
        messages = None
        try:
            messages = tempfile.TemporaryFile()  # noqa: SIM115
            with open(os.memfd_create("ckpt-export"), "wb+") as stream:  # no pipe: the trainer never waits for it
                stream.write(json.dumps(request | {"form": options.to_document()}).encode())
                stream.seek(0)
                process = start_module("ckpt.exporting", env=_ONE_THREAD, stdin=stream, stderr=messages)
        except OSError as error:
            if messages is not None:
                messages.close()
            held.close()
            self._failed(step, target, f"it cannot be started: {error}")
            return
        now = time.monotonic()
        self._running = _Running(step, target, held, process, messages, now, now + timeout_s)

    def _end(self, running: _Running) -> None:
        self._running = None
        running.held.close()
        with running.messages as stream:
            stream.seek(0)
            text = stream.read().decode(errors="replace").strip()
        code = running.process.returncode
        self._was_killed |= code < 0
        if code == 0:
            _log.info("exported step %d to %s", running.step, running.target)
            if is_observed():
                seconds = time.monotonic() - running.began
                emit(ExportDone(time.time(), _RANK, running.step, running.target, seconds))
            return
        how = f"it was killed by signal {-code}" if code < 0 else text.splitlines()[-1] if text else f"status {code}"
        if code < 0 and time.monotonic() > running.deadline:
            how = f"it took longer than {self._options.timeout}"
        self._failed(running.step, running.target, how, f"\n{text[-_LOGGED_CHARACTERS:]}" if text else "")

    def _failed(self, step: int, target: str, cause: str, detail: str = "") -> None:
        _log.error("the export of step %d to %s failed: %s%s", step, target, cause, detail)
        _emit_failure(step, target, cause)


def _emit_failure(step: int, target: str, cause: str) -> None:
    if is_observed():
        emit(ExportFailed(time.time(), _RANK, step, target, shortened(cause)))
