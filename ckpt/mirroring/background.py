"""The trainer's side of a mirror: says which steps are due, and starts the process that copies them, or its share.

The trainer never waits for that process before `close`: messages that a pipe cannot take are sent later.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import subprocess
import tempfile
import time
from typing import IO

from ckpt.events import MirrorDone, MirrorFailed
from ckpt.mirroring.messages import Begun, Done, Due, Failed, Owner, Report, Setup
from ckpt.mirroring.options import Mirror
from ckpt.observing import emit, is_observed, shortened
from ckpt.saving.recover import Branch
from ckpt.storage.interface import Root
from ckpt.storage.options import StorageOptions
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.forks import in_forked_children
from inprocess.ipc.process import end_process, start_module

__all__ = ["BackgroundMirror"]

_log = logging.getLogger("ckpt")

_GRACE_S = 10.0  # after the process should have ended by itself
_FAILING_S = 10.0  # for a mirror that could not be reached before
_POLL_S = 0.02
_RESTART_S, _LONGEST_RESTART_S = 1.0, 60.0
_READ_BYTES = 1 << 16
_LOGGED_CHARACTERS = 4000
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_NICE = 19
_COORDINATOR = 0


class BackgroundMirror:
    """The copies of one Checkpointer, or the share of this rank in them. For the thread that trains.

    What fails is never raised, and logged by rank 0, which is told of all that matters.
    """

    def __init__(
        self, root: Root, mirror: Root, options: Mirror, mirror_options: StorageOptions, node_local: str | None = None
    ) -> None:
        """`node_local`: the directory of this node with the pack files of the root."""
        self._root = root
        self._node_local = node_local
        self._mirror = mirror
        self._options = options
        self._mirror_options = mirror_options
        self._rank = _COORDINATOR
        self._published = 0
        self._newest: Due | None = None
        self._due: dict[int, Due] = {}  # not copied yet, or given up
        self._unsent: list[Due] = []
        self._owner = 0
        self._is_failing = False  # what was tried last is to be tried again
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: IO[bytes] | None = None
        self._buffer = b""
        self._start_at, self._restart_s = 0.0, _RESTART_S
        in_forked_children(self._close_pipes)

    def published(self, step: int, token: int, branch: Branch, rank: int, world_size: int) -> None:
        """Note a published step of the owner with `token`, and have it copied if it is due."""
        if rank != self._rank:  # since a restart
            self._end(wait=False)
            self._rank, self._owner, self._due, self._unsent = rank, 0, {}, []
        self._published += 1
        self._newest = Due(step, token, branch, world_size > 1)
        if (self._published - 1) % self._options.every == 0:
            self._want(self._newest)

    def _want(self, due: Due) -> None:
        self._is_failing = self._is_failing or self._rank != _COORDINATOR  # until that of rank 0 has begun
        self._due[due.step] = due
        self._unsent.append(due)
        self.poll()

    def poll(self) -> None:
        """Note what the process has done, and send it what is due; start it again if it has died. Never waits."""
        self._receive()
        process = self._process
        if process is not None and process.poll() is not None:
            self._died(process)
        if self._due and self._process is None and time.monotonic() >= self._start_at:
            self._start()
        self._send()

    def close(self, ending: Deadline) -> None:
        """Have the newest step copied, wait for what is not copied, for a limited time, and end. Idempotent.

        At most until `ending`, however long `Mirror.close_timeout` is.
        """
        newest = self._newest
        if newest is not None and (self._published - 1) % self._options.every != 0:
            self._newest = None
            self._want(newest)
        begin, most_s = time.monotonic(), min(self._options.close_timeout.total_seconds(), ending.left_s)
        while self._due and time.monotonic() - begin < (min(most_s, _FAILING_S) if self._is_failing else most_s):
            self.poll()
            time.sleep(_POLL_S)
        self.poll()
        for step in sorted(self._due):
            self._failed(Failed(step, "the Checkpointer was closed before; a later job goes on with it", again=False))
        self._end(wait=not self._due)
        self._due.clear()
        self._unsent.clear()

    def abort(self) -> None:
        """Kill the process. Idempotent."""
        self._end(wait=False)

    def _start(self) -> None:
        options = self._options
        setup = Setup(
            self._rank,
            self._root.path,
            self._root.options,
            self._mirror.path,
            self._mirror_options,
            options.keep,
            options.bandwidth,
            options.close_timeout.total_seconds(),
            self._owner,
            self._node_local,
        )
        self._start_at = time.monotonic() + self._restart_s
        self._restart_s = min(2 * self._restart_s, _LONGEST_RESTART_S)
        messages = None
        try:
            messages = tempfile.TemporaryFile()  # noqa: SIM115
            with open(os.memfd_create("ckpt-mirror"), "wb+") as stream:
                pickle.dump(setup, stream)
                stream.seek(0)
                self._process = start_module(
                    "ckpt.mirroring",
                    str(stream.fileno()),
                    pass_fds=[stream.fileno()],
                    env=_ONE_THREAD,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    bufsize=0,
                )
        except OSError as error:
            if messages is not None:
                messages.close()
            self._failed(Failed(None, f"the process cannot be started: {error}", again=True))
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)  # its threads inherit that
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._messages, self._buffer = messages, b""
        self._unsent = list(self._due.values())

    def _send(self) -> None:
        """Send what the pipe takes. A message is smaller than what POSIX writes to a pipe at once."""
        if self._process is None or self._process.stdin is None:
            return
        while self._unsent:
            try:
                os.write(self._process.stdin.fileno(), pickle.dumps(self._unsent[0]))
            except OSError:  # it is full, or the process has died
                return
            del self._unsent[0]

    def _receive(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), _READ_BYTES):
                self._buffer += data
        while self._buffer:
            stream = io.BytesIO(self._buffer)
            try:
                report: Report = pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):  # the rest of it is still to come
                return
            self._buffer = self._buffer[stream.tell() :]
            self._note(report)

    def _note(self, report: Report) -> None:
        match report:
            case Owner(token):
                self._owner = token
            case Begun():
                self._is_failing = False
            case Done(step, nbytes, seconds):
                self._is_failing = False
                self._due.pop(step, None)
                self._restart_s = _RESTART_S
                level = logging.INFO if self._rank == _COORDINATOR else logging.DEBUG
                _log.log(level, "copied step %d to %s: %d bytes, %.1f s", step, self._mirror.path, nbytes, seconds)
                if is_observed() and self._rank == _COORDINATOR:
                    emit(MirrorDone(time.time(), self._rank, step, self._mirror.path, nbytes, seconds))
            case Failed(step):
                if step is not None and not report.again:
                    self._due.pop(step, None)
                self._failed(report)

    def _failed(self, report: Failed) -> None:
        self._is_failing = report.again
        what = "the mirror" if report.step is None else f"step {report.step} is not in the mirror"
        later = "; it is tried again" if report.again else ""
        is_only_here = self._node_local is not None and not report.again  # rank 0 does not know the cause
        level = logging.WARNING if self._rank == _COORDINATOR or is_only_here else logging.DEBUG
        _log.log(level, "%s %s: %s%s", what, self._mirror.path, report.cause, later)
        if is_observed() and self._rank == _COORDINATOR:
            cause = shortened(report.cause)
            emit(MirrorFailed(time.time(), self._rank, report.step, self._mirror.path, cause, report.again))

    def _died(self, process: subprocess.Popen[bytes]) -> None:
        """Note that the process has ended although it was not asked to."""
        self._receive()
        text = self._release(process)
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with status {code}"
        self._failed(Failed(None, f"the process {how}{f': {text}' if text else ''}", again=True))
        self._start_at = max(self._start_at, time.monotonic() + self._restart_s / 2)

    def _end(self, *, wait: bool) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        end_process(process, Deadline(_GRACE_S if wait else 0.0))
        self._release(process)

    def _close_pipes(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _release(self, process: subprocess.Popen[bytes]) -> str:
        """Close the pipes, and return what the process has written to stderr."""
        self._close_pipes()
        self._process = None
        if self._messages is None:
            return ""
        with self._messages as stream:
            stream.seek(0)
            return stream.read().decode(errors="replace").strip()[-_LOGGED_CHARACTERS:]
