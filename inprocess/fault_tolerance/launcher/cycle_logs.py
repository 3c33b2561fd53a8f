"""One log file per cycle: the output of the workers of this node, each line with the rank of its worker.

    worker ──stdout, stderr──▶ pipes of the launcher ──thread──▶ PREFIX_cycle0.log, PREFIX_cycle1.log, ...

The pipes last as long as the launcher. So processes that a worker has left behind can go on writing: their lines are in
the file of the cycle that is then. Several nodes may append to one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import select
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from inprocess.ipc.wakeup import Wakeup

_log = logging.getLogger(__name__)
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_SLOW_S = 10.0
_LONGEST_LINE = 1 << 16  # longer ones are split


@dataclass(frozen=True)
class _Change:
    """The file of a cycle, and the begin of each line, by local rank; or the end, without a path."""

    path: str = ""
    prefixes: tuple[bytes, ...] = ()


class CycleLogs:
    """The logs of `count` workers, at paths that begin with `prefix`: "/x/train.log" is "/x/train_cycle0.log", ....

    A context manager, which has a thread. `begin_cycle` and `close` are for the launcher's thread, and wait for a file
    system for some seconds at most. An error of writing is logged once per cycle, and the lines are dropped; while the
    file system does not answer, workers wait once their pipes are full.
    """

    def __init__(self, prefix: str, count: int) -> None:
        self._prefix = prefix
        self._file = -1
        self._prefixes: tuple[bytes, ...] = (b"",) * count
        self._unfinished: dict[int, bytes] = {}  # descriptor to read from -> the begin of a line
        self._workers: dict[int, int] = {}  # descriptor to read from -> local rank
        self._writers: list[int] = []
        self._changes: queue.SimpleQueue[tuple[_Change, threading.Event]] = queue.SimpleQueue()
        self._wake = Wakeup()
        for number in range(2 * count):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):  # above a limit of the user
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._workers[reader] = number // 2
            self._unfinished[reader] = b""
            self._writers.append(writer)
        self._thread = threading.Thread(target=self._run, name="cycle-logs", daemon=True)
        self._thread.start()

    def path(self, cycle: int) -> str:
        """Return the path of the log of a cycle."""
        begin, extension = os.path.splitext(self._prefix)
        return f"{begin}_cycle{cycle}{extension or '.log'}"

    def specs(self, torchs: Any) -> DefaultLogsSpecs:
        """Return the destinations of the output of workers, for torch; files of errors are where `torchs` has them."""
        paths = [f"/proc/{os.getpid()}/fd/{writer}" for writer in self._writers]
        return _PipedOutput(torchs.root_log_dir, paths[::2], paths[1::2])

    def begin_cycle(self, cycle: int, ranks: Sequence[int], world_size: int) -> None:
        """Write to the file of this cycle from now on. `ranks` are those of the workers, which have not begun."""
        width = len(str(world_size - 1))
        self._change(_Change(self.path(cycle), tuple(f"{rank:>{width}}: ".encode() for rank in ranks)))

    def close(self) -> None:
        """Write what there is, and end the thread. Idempotent."""
        if not self._writers or not self._change(_Change()):
            return
        self._thread.join()
        for descriptor in (*self._workers, *self._writers):
            os.close(descriptor)
        self._workers, self._writers = {}, []
        self._wake.close()

    def __enter__(self) -> CycleLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _change(self, change: _Change) -> bool:
        """Have the thread change over to this. False if it has not done so within some seconds; it does so later."""
        is_done = threading.Event()
        self._changes.put((change, is_done))
        self._wake.set()
        if is_done.wait(_SLOW_S):
            return True
        _log.error("the file system of %s has not answered for %g s", self._prefix, _SLOW_S)
        return False

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for reader in self._workers:
            poll.register(reader, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._wake.fileno() in ready:
                self._wake.clear()
                while not self._changes.empty():
                    change, is_done = self._changes.get()
                    self._finish_file()
                    if change.path:
                        self._open(change)
                    is_done.set()
                    if not change.path:
                        return
            else:
                for reader in ready:
                    self._copy(reader)

    def _open(self, change: _Change) -> None:
        self._prefixes = change.prefixes
        try:
            os.makedirs(os.path.dirname(change.path), exist_ok=True)
            self._file = os.open(change.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            _log.error("the output of the workers of this cycle is lost: %s", error)

    def _finish_file(self) -> None:
        """Write what is in the pipes, and lines without an end; close the file."""
        for reader in self._workers:
            for _ in range(_PIPE_BYTES // _READ_BYTES + 1):  # what was left behind may write without end
                if not self._copy(reader):
                    break
            if self._unfinished[reader]:
                self._write(reader, [self._unfinished[reader]])
                self._unfinished[reader] = b""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _copy(self, reader: int) -> bool:
        """Copy what is in a pipe, one block at most. Return whether there was anything."""
        try:
            block = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, last = (self._unfinished[reader] + block).split(b"\n")
        if len(last) >= _LONGEST_LINE:
            lines, last = [*lines, last], b""
        self._unfinished[reader] = last
        self._write(reader, lines)
        return bool(block)

    def _write(self, reader: int, lines: list[bytes]) -> None:
        if self._file < 0 or not lines:
            return
        prefix = self._prefixes[self._workers[reader]]
        left = memoryview(b"".join(prefix + line + b"\n" for line in lines))
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            _log.error("further output of the workers of this cycle is lost: %s", error)
            os.close(self._file)
            self._file = -1


class _PipedOutput(DefaultLogsSpecs):
    """As torch's, but the output of workers goes to these paths, by local rank."""

    def __init__(self, folder: str, stdouts: Sequence[str], stderrs: Sequence[str]) -> None:
        super().__init__(folder)
        self._stdouts, self._stderrs = dict(enumerate(stdouts)), dict(enumerate(stderrs))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where the output of the workers with these environments goes."""
        return replace(super().reify(envs), stdouts=dict(self._stdouts), stderrs=dict(self._stderrs))
