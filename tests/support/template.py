"""Ranks that start in milliseconds: forked from one process that has imported torch once for all of them.

    pytest process                      template_main (torch imported, one thread)        rank r (own session)
    RankTemplate.fork  -- Fork ------>  fork  ------------------------------------------>  call.pickle, result file
    ForkedRank.poll    -- Reap ------>  waitpid, the exit code

A rank that has ended stays a zombie until its `ForkedRank` asks for the exit code, so its pid belongs to nobody else.
"""

import functools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_BYTES = 1 << 17


@dataclass(frozen=True)
class Fork:
    """Make a rank that runs `call.pickle` of the folder; the answer is its pid."""

    folder: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Reap:
    """Wait for a rank; the answer is its exit code, negative if a signal ended it."""

    pid: int


class ForkedRank:
    """What `subprocess.Popen` is to a child, for a rank that the template has forked."""

    def __init__(self, template: "RankTemplate", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0)
            finally:
                os.close(pidfd)
            self.returncode = self._template.ask(Reap(self.pid))
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RankTemplate:
    """The process that forks. For one thread; `close` ends it."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.support.template_main", str(theirs.fileno())],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "PYTHONFAULTHANDLER": "1",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",  # no threads in a process that forks
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, folder: Path, environment: Mapping[str, str]) -> ForkedRank:
        """A rank with exactly this environment. Standard output and error go to files in the folder."""
        return ForkedRank(self, self.ask(Fork(str(folder), dict(environment))))

    def ask(self, request: Fork | Reap) -> Any:
        self._end.send(cloudpickle.dumps(request))
        answer = self._end.recv(MAX_BYTES)
        assert answer, "the process that forks ranks has ended"
        return cloudpickle.loads(answer)

    def close(self) -> None:
        self._end.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def rank_template() -> RankTemplate:
    """The one of this process. Started in the background at the first call."""
    return RankTemplate()
