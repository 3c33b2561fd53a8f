"""Ranks that start in milliseconds: forked from one process that has imported torch once for all of them.

    pytest process             rank_server (torch imported)        rank r (own session)
    RankServer.launch  ----->  fork, fork, ... ---------------->   function(rank, world_size, *args), result file
      Fleet.wait       <-----  waitpid: who ended, and how

What the ranks start by themselves (monitor processes) carries a mark in its environment and is found by that.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from tests.support.rank_server import MAX_BYTES, Ended, Forked, Job
from tests.support.ranks import MARKER, REPOSITORY, RankResult, RanksFailed

_SERVER = Path(__file__).with_name("rank_server.py")


class Fleet:
    """The ranks of one job. Made by `RankServer.launch`."""

    def __init__(self, end: socket.socket, folder: Path, pids: tuple[int, ...], mark: str) -> None:
        self.pids = pids
        self._end = end
        self._folder = folder
        self._mark = mark
        self._codes: dict[int, int] = {}

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], signum)

    def stderr(self, rank: int) -> str:
        return self._text(rank, "stderr")

    def stdout(self, rank: int) -> str:
        return self._text(rank, "stdout")

    def wait(self, timeout: float = 30.0, returncodes: Mapping[int, int | None] | None = None) -> list[RankResult]:
        """Wait for all ranks, and for what they started. `RanksFailed` with all output if that does not go as expected.

        `returncodes` says what a rank must end with: 0 if it is not named, anything if None.
        """
        expected = returncodes or {}
        deadline = time.monotonic() + timeout
        while len(self._codes) < len(self.pids) and self._read(max(0.0, deadline - time.monotonic())):
            pass
        results = self.results()
        wrong = [
            f"rank {r.rank} ended with {r.returncode}"
            for r in results
            if (wanted := expected.get(r.rank, 0)) is not None and r.returncode != wanted
        ]
        if wrong:
            raise RanksFailed("; ".join(wrong), results)
        while left := self.survivors():
            if time.monotonic() > deadline:
                raise RanksFailed(f"still running: {left}", results)
            time.sleep(0.02)
        return results

    def results(self) -> list[RankResult]:
        found = []
        for rank, pid in enumerate(self.pids):
            file = self._folder / f"rank_{rank:05d}.result"
            value = cloudpickle.loads(file.read_bytes()) if file.exists() else None
            found.append(RankResult(rank, self._codes.get(pid), value, self.stdout(rank), self.stderr(rank)))
        return found

    def survivors(self) -> list[psutil.Process]:
        """Processes started by ranks that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """Kill what still runs."""
        for pid in self.pids:
            if pid not in self._codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
        if not all(self._read(2.0) for _ in range(len(self.pids) - len(self._codes))):
            for pid in self.pids:
                if pid not in self._codes:
                    os.kill(pid, signal.SIGKILL)
            while len(self._codes) < len(self.pids):
                assert self._read(5.0)
        for process in self.survivors():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _read(self, timeout: float) -> bool:
        if not select.select([self._end], [], [], timeout)[0]:
            return False
        ended = cloudpickle.loads(self._end.recv(MAX_BYTES))
        assert isinstance(ended, Ended)
        self._codes[ended.pid] = ended.returncode
        return True

    def _text(self, rank: int, kind: str) -> str:
        file = self._folder / f"rank_{rank:05d}.{kind}"
        return file.read_text(errors="replace") if file.exists() else ""


class RankServer:
    """The warmed process, for any number of jobs, one after the other. `close` ends it."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno())],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "PYTHONFAULTHANDLER": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @contextlib.contextmanager
    def launch(
        self, function: Callable[..., Any], world_size: int, *args: Any, env: Mapping[str, str] | None = None
    ) -> Iterator[Fleet]:
        """Run `function(rank, world_size, *args)` on all ranks, with the variables of a job of torch.

        Standard output and error of the ranks go to files. On leaving, everything that still runs is killed.
        """
        mark = uuid.uuid4().hex
        with tempfile.TemporaryDirectory(prefix="fleet_") as name:
            folder = Path(name)
            (folder / "call.pickle").write_bytes(cloudpickle.dumps((function, args)))
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
                "WORLD_SIZE": str(world_size),
                MARKER: mark,
                **(env or {}),
            }
            self._end.send(cloudpickle.dumps(Job(str(folder), world_size, variables)))
            forked = cloudpickle.loads(self._end.recv(MAX_BYTES))
            assert isinstance(forked, Forked), "the rank server has ended"
            fleet = Fleet(self._end, folder, forked.pids, mark)
            try:
                yield fleet
            finally:
                fleet.close()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        returncodes: Mapping[int, int | None] | None = None,
    ) -> list[Any]:
        """`launch`, wait for everything, and return what the function returned on each rank; None where it did not."""
        with self.launch(function, world_size, *args, env=env) as fleet:
            return [result.value for result in fleet.wait(timeout, returncodes)]

    def close(self) -> None:
        self._end.close()
        self._process.wait(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
