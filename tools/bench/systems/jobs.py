"""Start the ranks of a job, measure the memory of all its processes from outside, and collect what the ranks measured.

rank 0 (MemoryRequest)              this process (_MemoryMonitor)
    "b"                       ──▶   look at all processes, again and again
        ◀── first look taken
    "e"                       ──▶
        ◀── bytes at the first look, and the most of all looks
"""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tools.bench.processes import REPOSITORY, free_port, proportional_bytes, rank_environment

_COUNTING = REPOSITORY / "tools" / "bench" / "counting"
_ANSWER = struct.Struct("<QQ")
_PAUSE_S = 0.02


Turn = dict[str, float]
"""What one turn of one system gave: `*_s` are seconds, `*_bytes` bytes, the rest counts."""


@dataclass(frozen=True)
class JobSpec:
    """What the ranks of a job do.

    `kind` is the name of a function of `rank`. `rounds` count, after one that does not; with 0 that one counts. Only
    this job writes to `folder`, on the disk to be measured; `earlier` is the folder of another job whose checkpoints
    are read. A window of training has at most `most_steps`, each of about `step_s`. `count` is the number of small
    tensors. The state and the training are on `device`, "cpu" or "cuda".
    """

    kind: str
    world_size: int
    systems: tuple[str, ...]
    folder: str
    rounds: int
    total_bytes: float
    sharded: bool = False
    step_s: float = 0.05
    most_steps: int = 100
    count: int = 10_000
    earlier: str = ""
    device: str = "cpu"

    def to_json(self) -> str:
        """Encode for the command line of a rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Decode what `to_json` made."""
        document: dict[str, Any] = json.loads(text)
        return cls(**{**document, "systems": tuple(document["systems"])})


class MemoryRequest:
    """Measurements of the memory of all processes of the job, for rank 0."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._begun = False

    def begin(self) -> None:
        """Begin, and return after the first look. A measurement that a failed system has begun is ended before."""
        if self._begun:
            self.end()
        self._begun = True
        self._socket.sendall(b"b")
        self._socket.recv(1)

    def end(self) -> tuple[int, int]:
        """Return the bytes of all processes at the first look, and the most of all looks."""
        self._begun = False
        self._socket.sendall(b"e")
        before, most = _ANSWER.unpack(self._socket.recv(_ANSWER.size))
        return before, most


class _MemoryMonitor:
    """Answers the requests of rank 0."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._theirs = theirs
        self.fd = theirs.fileno()

    def serve(self) -> None:
        """Answer until all ranks have ended."""
        self._theirs.close()
        with self._socket:
            while self._socket.recv(1) == b"b":
                before = most = _memory_below()
                self._socket.sendall(b".")
                self._socket.settimeout(_PAUSE_S)
                while not self._end_requested():
                    most = max(most, _memory_below())
                self._socket.settimeout(None)
                self._socket.sendall(_ANSWER.pack(before, max(most, _memory_below())))

    def _end_requested(self) -> bool:
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True


def _memory_below() -> int:
    """Return the bytes of all processes below this one; memory that several of them share counts once."""
    return sum(proportional_bytes(process.pid) for process in psutil.Process().children(recursive=True))


JobResult = dict[str, list[Turn]]
"""The turns of each system, by round: seconds of the slowest rank, sums of bytes and counts. A system that failed has
none."""


class JobError(Exception):
    """A rank ended without a result."""


def run_job(spec: JobSpec, counting: bool = False) -> tuple[JobResult, dict[str, str]]:
    """Return the results by system, and the errors of those that failed. With `counting`, count calls of fsync."""
    with tempfile.TemporaryDirectory(prefix="bench-job-") as temporary:
        monitor, port = _MemoryMonitor(), free_port()
        ranks = [_start(spec, rank, port, Path(temporary), monitor, counting) for rank in range(spec.world_size)]
        try:
            monitor.serve()
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in Path(temporary).glob("log_*"))
            raise JobError(f"{spec.kind}, {spec.world_size} ranks: exit codes {codes}; they wrote\n{logs}")
        answers = [json.loads(Path(temporary, f"rank_{rank}.json").read_text()) for rank in range(spec.world_size)]
    failures: dict[str, str] = {}
    for answer in answers:
        failures |= answer["failures"]
    turns = {name: _merged([answer["turns"][name] for answer in answers]) for name in answers[0]["turns"]}
    return {name: merged for name, merged in turns.items() if name not in failures}, failures


def _start(
    spec: JobSpec, rank: int, port: int, temporary: Path, monitor: _MemoryMonitor, counting: bool
) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **rank_environment(rank, spec.world_size, port)}
    if counting:
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{_COUNTING}{os.pathsep + path if path else ''}"
        environment["BENCH_FSYNCS"] = str(temporary / "fsyncs")
    progress = os.dup(2)  # what peers log goes to a file instead
    fds = (monitor.fd, progress) if rank == 0 else (progress,)
    line = [sys.executable, "-m", "tools.bench.systems.rank", spec.to_json(), str(temporary)]
    line += [str(monitor.fd), str(progress)]
    try:
        with (temporary / f"log_{rank}").open("wb") as log:
            return subprocess.Popen(
                line, cwd=REPOSITORY, env=environment, pass_fds=fds, stdout=log, stderr=subprocess.STDOUT
            )
    finally:
        os.close(progress)


def _merged(of_ranks: list[list[Turn]]) -> list[Turn]:
    """Merge the turns of all ranks, by round."""
    rounds = []
    for turns in zip(*of_ranks, strict=True):
        merged: Turn = {}
        for key in dict.fromkeys(key for turn in turns for key in turn):
            values = [turn[key] for turn in turns if key in turn]
            merged[key] = max(values) if key.endswith("_s") else sum(values)
        rounds.append(merged)
    return rounds
