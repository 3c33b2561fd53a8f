"""Start a program in one of the ways in which people start training, wait for it, and read what it wrote down."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support import free_port
from tests.support.template import quick_python

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).with_name("programs")
_MARKER = "TEST_UNCHANGED_ID"
_NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC")


class Way(enum.Enum):
    """How the processes are started."""

    TORCHRUN = "torchrun"
    CKPT_LAUNCHER = "ckpt_launcher"
    ENVIRONMENT = "environment"  # RANK, WORLD_SIZE, ... set for each process, as srun and mpirun do
    ALONE = "alone"  # one process, nothing set


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit codes of the processes that were started, journals by the rank at the start."""

    codes: list[int | None]
    journals: list[list[dict[str, Any]]]
    output: str

    def lines(self, event: str) -> list[list[dict[str, Any]]]:
        """The journals' lines of one kind."""
        return [[line for line in journal if line["event"] == event] for journal in self.journals]

    def problems(self, ranks: int, faults: str, lost: tuple[int, ...] = ()) -> list[str]:
        """What is not as it must be after these faults: nothing, if all is well."""
        found = []
        planned = [fault.split(":") for fault in faults.split()]
        left = [rank for rank in range(ranks) if rank not in lost]
        calls = 1 + len(planned)
        for rank in left:
            begins = self.lines("begin")[rank]
            if len(begins) != calls:
                found.append(f"rank {rank} was called {len(begins)} times, not {calls}")
            if len({line["MASTER_PORT"] for line in begins}) != len(begins):
                found.append(f"rank {rank} met at the same port twice")
        struck = {
            (line["call"], rank, line["kind"]) for rank, lines in enumerate(self.lines("fault")) for line in lines
        }
        if struck != {(int(call), int(rank), kind) for call, rank, _, kind in planned}:
            found.append(f"faults that happened: {struck}")
        # The replacement of a lost rank trains if it was ready for a restart; else it sees the end of the job.
        done = [[line for line in lines if line["call"] >= 0] for lines in self.lines("done")]
        weights = {line["weights"] for lines in done for line in lines}
        ended = {rank for rank, lines in enumerate(done) if lines}
        if not set(left) <= ended <= {*left, *lost} or len(weights) != 1:
            found.append(f"not the same weights at the end on ranks {left}: {self.lines('done')}")
        by_size: dict[str, set[str]] = {}
        for begins, firsts in zip(self.lines("begin"), self.lines("first step"), strict=True):
            sizes = {(line["pid"], line["call"]): line["WORLD_SIZE"] for line in begins}
            for line in firsts:
                by_size.setdefault(sizes[line["pid"], line["call"]], set()).add(line["weights"])
        if any(len(digests) != 1 for digests in by_size.values()):
            found.append(f"each restart must train as the first call did, and did not: {by_size}")
        return [*found, self.output] if found else []


def run_program(
    name: str,
    way: Way,
    folder: Path,
    *,
    ranks: int = 3,
    faults: str = "",
    lost: tuple[int, ...] = (),
    timeout: float = 150.0,
) -> Ended:
    """Run a program of this folder with faults (see `journal.strike`), and check what every such run must be like.

    `lost` are the ranks that are killed. AssertionError with all output.
    """
    ended = _run(name, way, folder, ranks, {"TEST_FAULTS": faults}, lost, timeout)
    problems = ended.problems(ranks, faults, lost)
    assert not problems, "\n".join(problems)
    return ended


def run_with_fault_at(
    name: str, way: Way, folder: Path, fault: str, *, ranks: int, lost: tuple[int, ...] = (), timeout: float = 100.0
) -> Ended:
    """Run a program of this folder with a fault at a time (see `journal.begin`): it must end right all the same.

    All ranks that are left must end with the same weights, after one restart at most. AssertionError with all output.
    """
    ended = _run(name, way, folder, ranks, {"TEST_FAULT_AT": fault}, lost, timeout)
    left = [rank for rank in range(ranks) if rank not in lost]
    assert len({done["weights"] for rank in left for done in ended.lines("done")[rank]}) == 1, ended.output
    for rank in left:
        assert len(ended.lines("done")[rank]) == 1, ended.output
        assert len(ended.lines("begin")[rank]) <= 2, ended.output
    return ended


def _run(
    name: str, way: Way, folder: Path, ranks: int, variables: dict[str, str], lost: tuple[int, ...], timeout: float
) -> Ended:
    with _started(PROGRAMS / f"{name}.py", way, folder, ranks, variables) as processes:
        deadline = time.monotonic() + timeout
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        codes = [process.poll() for process in processes]
        if None in codes:
            _dump_stacks(folder)
    ended = Ended(codes, _journals(folder, ranks), _output(folder))
    expected = [-9 if way is Way.ENVIRONMENT and rank in lost else 0 for rank in range(len(codes))]
    assert codes == expected, f"exit codes {codes}, not {expected}\n{ended.output}"
    return ended


@contextlib.contextmanager
def _started(
    program: Path, way: Way, folder: Path, ranks: int, variables: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    marker = uuid.uuid4().hex
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    common = {
        **clean,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TEST_FOLDER": str(folder),
        _MARKER: marker,
        **variables,
    }
    processes = []
    try:
        for number, (argv, own) in enumerate(_commands(program, way, ranks)):
            with open(folder / f"output_{number}.txt", "wb") as output:
                processes.append(
                    subprocess.Popen(
                        argv,
                        cwd=folder,
                        env={**common, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        _end_all(marker)
        for process in processes:
            process.wait()


def _commands(program: Path, way: Way, ranks: int) -> list[tuple[list[str], dict[str, str]]]:
    python = [quick_python(), "-u"]
    if way is Way.ALONE:
        return [([*python, str(program)], {})]
    if way is Way.ENVIRONMENT:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        common["LOCAL_WORLD_SIZE"] = str(ranks)
        own = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        return [([*python, str(program)], variables) for variables in own]
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    workers = {"PYTHON_EXEC": quick_python()}
    if way is Way.TORCHRUN:
        return [([*python, "-m", "torch.distributed.run", *options, str(program)], workers)]
    options += ["--ft-restart-policy=in-process", "--ft-rejoin=next-restart", "--max-restarts=0"]
    return [([*python, "-m", "tools.ckpt_launcher", *options, str(program)], workers)]


def _marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARKER) == marker:
                found.append(process)
    return found


def _end_all(marker: str) -> None:
    deadline = time.monotonic() + 5
    while (left := _marked(marker)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def _dump_stacks(folder: Path) -> None:
    """Have the programs that still run write their stacks (SIGABRT, faulthandler)."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            environment = process.environ()
            is_program = any(word.startswith(str(PROGRAMS)) for word in process.cmdline()[1:3])
            if environment.get("TEST_FOLDER") == str(folder) and is_program:
                process.send_signal(6)
    time.sleep(1)


def _journals(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    files = [folder / f"journal_{rank}.jsonl" for rank in range(ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


def _output(folder: Path) -> str:
    texts = []
    for file in sorted([*folder.glob("output_*.txt"), *folder.glob("journal_*.jsonl"), *folder.glob("monitor_*.log")]):
        texts.append(f"---- {file.name}:\n{file.read_text(errors='replace')[-6000:]}")
    return "\n".join(texts)
