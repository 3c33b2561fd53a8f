"""Ranks and programs that start in milliseconds: forked from one process that has imported torch once for all of them.

    pytest process                      template_main (torch imported, one thread)        rank r (own session)
    RankTemplate.fork  -- Fork ------>  fork  ------------------------------------------>  call.pickle, or a script
    ForkedRank.poll    -- Reap ------>  waitpid, the exit code

A rank that has ended stays a zombie until its `ForkedRank` asks for the exit code, so its pid belongs to nobody else.
The folder `commands` has an interpreter for programs that tests start as others start them; see `quick_python`.
"""

import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from tests.support.selection import FULL

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_BYTES = 1 << 17
_COMMANDS = ("python", "torchrun", "ckpt_launcher", "inspect_ckpt")


@dataclass(frozen=True)
class Fork:
    """Make a rank that runs the script, or `call.pickle` of the folder; the answer is its pid."""

    folder: str
    environment: dict[str, str]
    script: tuple[str, ...] = ()  # its path and arguments


@dataclass(frozen=True)
class Grow:
    """Fork a template that imports these modules, too, and connects to the socket; the answer is its pid."""

    path: str
    modules: tuple[str, ...]


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
        self.commands = Path(tempfile.mkdtemp(prefix="test_commands_"))
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.commands / "socket"))
            listener.listen(64)
            self._write_commands()
            fds = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.support.template_main", *map(str, fds)],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "PYTHONFAULTHANDLER": "1",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",  # no threads in a process that forks
                },
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process that forks."""
        return self._process.pid

    def fork(self, folder: Path, environment: Mapping[str, str], script: Sequence[object] = ()) -> ForkedRank:
        """A rank with exactly this environment. Standard output and error go to files in the folder."""
        return ForkedRank(self, self.ask(Fork(str(folder), dict(environment), tuple(map(str, script)))))

    def ask(self, request: Fork | Grow | Reap) -> Any:
        self._end.send(cloudpickle.dumps(request))
        answer = self._end.recv(MAX_BYTES)
        assert answer, "the process that forks ranks has ended"
        return cloudpickle.loads(answer)

    def close(self) -> None:
        self._end.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.commands)

    def _write_commands(self) -> None:
        program = Path(__file__).with_name("command.py").read_text()
        for name in _COMMANDS:
            file = self.commands / name
            # Isolated and without `site`: it starts in ten milliseconds, and imports nothing from the current folder.
            file.write_text(f"#!{sys.executable} -IS\n{program}")
            file.chmod(0o755)


class GrownTemplate(RankTemplate):
    """A fork of the template that has imported more modules, those of a framework. It ends with this process."""

    def __init__(self, template: RankTemplate, modules: tuple[str, ...]) -> None:
        path = template.commands / f"grown_{uuid.uuid4().hex[:8]}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(60)
            self._pid: int = template.ask(Grow(str(path), modules))
            self._end, _ = listener.accept()

    @property
    def pid(self) -> int:
        """The process that forks."""
        return self._pid

    def close(self) -> None:
        self._end.close()


@functools.cache
def grown_template(*modules: str) -> RankTemplate:
    """The one of this process that has these modules. The first rank waits until they are imported."""
    return GrownTemplate(rank_template(), modules) if modules else rank_template()


@functools.cache
def rank_template() -> RankTemplate:
    """The one of this process. Started in the background at the first call."""
    return RankTemplate()


def quick_python() -> str:
    """Path of a Python whose programs are forked from the template; with TESTS=full that of the real one.

    `torchrun` and the commands of this project are beside it. A program that depends on its parent, its process
    group, or on what it has imported takes `sys.executable`. Signals are passed on, except SIGSTOP; if the process that
    was started is killed, so is the program.
    """
    return sys.executable if FULL else str(rank_template().commands / "python")
