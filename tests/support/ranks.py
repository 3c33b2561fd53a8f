"""Run a function or a script as N real processes, one per rank, and never leave one behind.

    pytest process                    rank r (own session)
    launch_ranks()  -- fork ------->  function: process group (gloo), call, result file (see `template`)
         |     fork, or               script: as torchrun would start it; examples are forked, but not with TESTS=full
         |     Popen
         |                                 \\-- whatever it starts has its session, or TEST_RANKS_ID in the environment
       wait() <------- pidfd of every rank
         |
       close(): SIGKILL to every process of such a session or with that TEST_RANKS_ID, however long its parent is gone,
                and to those of the keepers that were forked for ranks (see `quick_keepers`)

Output goes to files, so a process that outlives its rank and still holds its stdout cannot block anybody.
"""

import contextlib
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from ckpt.async_calls.call import CodePickler
from tests.support.quick_keepers import sessions_of_keepers
from tests.support.selection import FULL
from tests.support.template import REPOSITORY, ForkedRank, grown_template

MARKER = "TEST_RANKS_ID"
_POLL_S = 0.01
_EXAMPLES = REPOSITORY / "examples"


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. `value` is what the function returned, None for a script or a rank that did not return."""

    rank: int
    returncode: int | None  # negative: the signal that ended it; None: still running when the deadline passed
    value: Any
    stdout: str
    stderr: str


class RanksFailed(AssertionError):
    """A rank ended wrongly, ran past the deadline, or left processes behind. The text has every rank's output."""

    def __init__(self, reason: str, results: Sequence[RankResult]) -> None:
        parts = [reason]
        for result in results:
            parts.append(f"---- rank {result.rank}: exit {result.returncode}, stdout:\n{result.stdout.rstrip()}")
            parts.append(f"---- rank {result.rank}: stderr:\n{result.stderr.rstrip()}")
        super().__init__("\n".join(parts))
        self.results = list(results)


def free_port() -> int:
    """Return a port of this machine that no process uses now.

    It is none that the system gives to connections, which one of them could get before the caller binds it.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(1000):
        port = random.SystemRandom().randrange(10_000, 1 << 16)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if not low <= port <= high:
                probe.bind(("", port))
                return port
    raise AssertionError(f"no port outside {low} to {high} (net.ipv4.ip_local_port_range) is free")


class RankGroup:
    """Ranks that run now. Made by `launch_ranks`; everything here runs in the test's thread."""

    def __init__(
        self,
        target: Callable[..., Any] | Path,
        world_size: int,
        folder: Path,
        args: Sequence[Any],
        env: Mapping[str, str],
        init_process_group: bool,
        imports: Sequence[str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._folder = folder
        self._marker = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        if not isinstance(target, Path):
            with (folder / "call.pickle").open("wb") as file:
                CodePickler(file).dump((target, tuple(args)))
        common = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            MARKER: self._marker,
            "TEST_RANKS_INIT": "1" if init_process_group else "",
            **env,
        }
        template = grown_template(*imports or ())
        try:
            for rank in range(world_size):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                if not isinstance(target, Path):
                    self._processes.append(template.fork(folder, environment))
                elif (target.parent == _EXAMPLES or imports is not None) and not FULL:
                    self._processes.append(template.fork(folder, environment, [target, *args]))
                else:  # of tests that are about the interpreter and its end, too
                    self._processes.append(self._start_script(rank, target, args, environment))
        except BaseException:
            self.close()
            raise

    def _start_script(
        self, rank: int, script: Path, args: Sequence[Any], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with open(self._file(rank, "stdout"), "wb") as stdout, open(self._file(rank, "stderr"), "wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-u", str(script), *map(str, args)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the trainer process of one rank, not to what it started."""
        self._processes[rank].send_signal(signum)

    def stdout(self, rank: int) -> str:
        return self._text(rank, "stdout")

    def stderr(self, rank: int) -> str:
        return self._text(rank, "stderr")

    def wait_for_output(self, rank: int, pattern: str, timeout: float = 45.0) -> re.Match[str]:
        """Wait until the rank's stdout matches the regular expression; fail at once when the rank ends without it."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self._processes[rank].poll() is not None
            if match := re.search(pattern, self.stdout(rank), re.MULTILINE):
                return match
            if ended:
                raise RanksFailed(f"rank {rank} ended without printing {pattern!r}", self.results())
            if time.monotonic() > deadline:
                raise RanksFailed(f"rank {rank} did not print {pattern!r} in {timeout} s", self.results())
            time.sleep(_POLL_S)

    def wait(self, timeout: float = 50.0, returncodes: Mapping[int, int | None] | None = None) -> list[RankResult]:
        """Wait for all ranks.

        `returncodes` says what each rank must end with; a rank not named must end with 0, and None accepts anything.
        Once a rank has ended wrongly, the others get 5 s more, because they may wait for it in a collective.
        """
        expected = returncodes or {}
        deadline = time.monotonic() + timeout
        wrong: list[str] = []
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as pidfds:
            for rank, process in enumerate(self._processes):
                pidfd = os.pidfd_open(process.pid) if process.poll() is None else None
                if pidfd is None:
                    wrong += self._complaint(rank, expected)
                    continue
                pidfds.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, rank)
            if wrong:
                deadline = min(deadline, time.monotonic() + 5)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fd)
                    self._processes[key.data].wait()
                    if complaint := self._complaint(key.data, expected):
                        wrong += complaint
                        deadline = min(deadline, time.monotonic() + 5)
            wrong += (
                [f"rank {key.data} still running after {timeout:g} s" for key in selector.get_map().values()]
                if not wrong
                else []
            )
        if wrong:
            self._dump_stacks()
            raise RanksFailed("; ".join(wrong), self.results())
        return self.results()

    def results(self) -> list[RankResult]:
        """What is known now about every rank."""
        return [
            RankResult(rank, process.poll(), self._value(rank), self.stdout(rank), self.stderr(rank))
            for rank, process in enumerate(self._processes)
        ]

    def survivors(self) -> list[psutil.Process]:
        """Every living process that descends from a rank and is not a rank itself, orphans included."""
        trainers = {process.pid for process in self._processes}
        sessions = trainers | sessions_of_keepers(self._marker)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.pid in trainers or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getsid(process.pid) in sessions or process.environ().get(MARKER) == self._marker:
                    found.append(process)
        return found

    def wait_for_no_survivors(self, timeout: float = 30.0) -> None:
        """Fail when a process that a rank started is still alive after `timeout`."""
        deadline = time.monotonic() + timeout
        while left := self.survivors():
            if time.monotonic() > deadline:
                names = []
                for process in left:
                    with contextlib.suppress(psutil.Error):
                        names.append(f"{process.pid} ({' '.join(process.cmdline())[:120]})")
                raise RanksFailed(f"left running after {timeout:g} s: {', '.join(names)}", self.results())
            time.sleep(5 * _POLL_S)

    def close(self) -> None:
        """Kill whatever still runs. Idempotent."""
        for process in self._processes:
            process.kill()
            process.wait()
        # A process that is just being forked shows up in the next round.
        deadline = time.monotonic() + 5
        while (left := self.survivors()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(_POLL_S)

    def _file(self, rank: int, kind: str) -> Path:
        return self._folder / f"rank_{rank:05d}.{kind}"

    def _text(self, rank: int, kind: str) -> str:
        file = self._file(rank, kind)
        return file.read_text(errors="replace") if file.exists() else ""

    def _value(self, rank: int) -> Any:
        file = self._file(rank, "result")
        return cloudpickle.loads(file.read_bytes()) if file.exists() else None

    def _complaint(self, rank: int, expected: Mapping[int, int | None]) -> list[str]:
        code, wanted = self._processes[rank].returncode, expected.get(rank, 0)
        return [] if wanted is None or code == wanted else [f"rank {rank} ended with {code}, not {wanted}"]

    def _dump_stacks(self) -> None:
        """Have ranks that hang write their Python stacks to stderr (SIGABRT and faulthandler)."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)


@contextlib.contextmanager
def launch_ranks(
    target: Callable[..., Any] | Path,
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    init_process_group: bool = True,
    imports: Sequence[str] | None = None,
) -> Iterator[RankGroup]:
    """Start one process per rank and hand out the running group; on leaving, everything that still runs is killed.

    `target` is a function, called as `target(rank, world_size, *args)` inside an initialized gloo process group unless
    `init_process_group=False`, or the path of a script, started with `args` and the variables that torchrun sets. A
    function at the top of a test module is imported in the rank; a local function or lambda travels by value.

    `imports` are modules that take long to import, as those of a framework: the ranks are forked from a process that
    has them. A script of the examples, or with `imports`, if only (), is forked, too; others get a fresh interpreter.
    """
    with tempfile.TemporaryDirectory(prefix="test_ranks_") as folder:
        group = RankGroup(target, world_size, Path(folder), args, env or {}, init_process_group, imports)
        try:
            yield group
        finally:
            group.close()


def run_ranks(
    target: Callable[..., Any] | Path,
    world_size: int,
    *args: Any,
    timeout: float = 50.0,
    env: Mapping[str, str] | None = None,
    init_process_group: bool = True,
    returncodes: Mapping[int, int | None] | None = None,
    survivors_timeout: float | None = 30.0,
    imports: Sequence[str] | None = None,
) -> list[RankResult]:
    """`launch_ranks`, wait for all ranks, and check that nothing they started outlives them by `survivors_timeout`.

    None there means no check. Raises `RanksFailed` with the output of all ranks when a rank does not end in time with
    its code in `returncodes` (default 0).
    """
    options: dict[str, Any] = {"env": env, "init_process_group": init_process_group, "imports": imports}
    with launch_ranks(target, world_size, *args, **options) as group:
        results = group.wait(timeout, returncodes)
        if survivors_timeout is not None:
            group.wait_for_no_survivors(survivors_timeout)
        return results


def rank_values(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` without a process group: what the function returned on each rank, None where it did not."""
    return [result.value for result in run_ranks(function, world_size, *args, init_process_group=False, **options)]
