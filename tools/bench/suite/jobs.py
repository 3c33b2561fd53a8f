"""Starts the ranks of a job, and collects what they measured."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench.suite.monitor import Monitor
from tools.bench.suite.spec import JobSpec, Turn

__all__ = ["JobError", "JobResult", "run_job"]

_REPOSITORY = Path(__file__).resolve().parents[3]
_COUNTING = _REPOSITORY / "tools" / "bench" / "counting"

JobResult = dict[str, list[Turn]]
"""For each system its turns, round by round; of several ranks the slowest, of bytes and counts the sum. A system that
failed has none, and a line in ``failures``."""


class JobError(Exception):
    """A rank ended without an answer."""


def run_job(spec: JobSpec, counting: bool = False) -> tuple[JobResult, dict[str, str]]:
    """Results by system, and why those failed that did. With `counting`, calls of fsync are counted on the way."""
    with tempfile.TemporaryDirectory(prefix="suite-job-") as temporary:
        monitor = Monitor()
        ranks = [_start(spec, rank, Path(temporary), monitor, counting) for rank in range(spec.world_size)]
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


def _start(spec: JobSpec, rank: int, temporary: Path, monitor: Monitor, counting: bool) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if counting:
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{_COUNTING}{os.pathsep + path if path else ''}"
        environment["BENCH_FSYNCS"] = str(temporary / "fsyncs")
    progress = os.dup(2)  # what peers log goes to a file instead
    fds = (monitor.fd, progress) if rank == 0 else (progress,)
    line = [sys.executable, "-m", "tools.bench.suite.rank", spec.to_json(), str(temporary)]
    line += [str(monitor.fd), str(progress)]
    try:
        with (temporary / f"log_{rank}").open("wb") as log:
            return subprocess.Popen(
                line, cwd=_REPOSITORY, env=environment, pass_fds=fds, stdout=log, stderr=subprocess.STDOUT
            )
    finally:
        os.close(progress)


def _merged(of_ranks: list[list[Turn]]) -> list[Turn]:
    rounds = []
    for turns in zip(*of_ranks, strict=True):
        merged: Turn = {}
        for key in dict.fromkeys(key for turn in turns for key in turn):
            values = [turn[key] for turn in turns if key in turn]
            merged[key] = max(values) if key.endswith("_s") else sum(values)
        rounds.append(merged)
    return rounds
