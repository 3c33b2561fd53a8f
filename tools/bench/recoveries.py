"""Starts the jobs that fail, and makes phases of the notes their ranks took."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tools.demo.launch import port_with_next

__all__ = ["InProcess", "Recovery", "relaunch"]

_RANKS = 2
_LIMIT_S = 300.0
_MOMENTS = ("detected", "finalize", "settled", "finalized", "entered", "stepped")
_PHASES = ("detect", "unwind", "drain", "restore", "rejoin", "first step")
_RELAUNCH = {"started": "end and start processes", "imported": "import", "joined": "join", "allocated": "allocate"}
_RELAUNCH |= {"loaded": "load", "stepped": "first step"}

Notes = dict[str, Any]


@dataclass(frozen=True)
class Recovery:
    """Seconds of one way back from a fault, on the last rank to pass each point; `phases` add up to `total`.

    `restore` is what the slowest rank spent on it alone, `memcpy` a copy of the same bytes if that was measured.
    """

    total: float
    phases: dict[str, float]
    restore: float
    memcpy: float | None
    from_memory: bool | None


class InProcess:
    """The job of `tools.bench.recovering`. Leaving the context ends it, by force if it does not answer."""

    def __init__(self, gigabytes: float, folder: Path) -> None:
        command = [sys.executable, "-m", "tools.bench.recovering", "--gb", str(gigabytes), "--folder", str(folder)]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_with_next()), "WORLD_SIZE": str(_RANKS)}
        self._errors = folder.with_suffix(".log").open("w+")
        self._ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **job, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for rank in range(_RANKS)
        ]

    def __enter__(self) -> Self:
        self._answers()  # the first step of all
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with _killing_after(_LIMIT_S if kind is None else 0.0, self._ranks):
            if kind is None:
                self._tell("end")
            for rank in self._ranks:
                rank.wait()
                for pipe in (rank.stdin, rank.stdout):
                    _of(pipe).close()
        self._errors.close()

    def recover(self, scenario: str) -> Recovery:
        """Have rank 1 fail, and return how the job came back."""
        self._tell(scenario)
        notes = self._answers()
        fault = max(note.get("fault", 0.0) for note in notes)
        restores = [float(note.get("restore_s", 0.0)) for note in notes]
        for note, restore in zip(notes, restores, strict=True):
            note["settled"] = note["finalized"] - restore
        points = [fault, *(max(float(note[moment]) for note in notes) for moment in _MOMENTS)]
        copies = [float(note["memcpy_s"]) for note in notes if "memcpy_s" in note]
        sources = [note["from_memory"] for note in notes if "from_memory" in note]
        phases = dict(zip(_PHASES, (later - at for at, later in pairwise(points)), strict=True))
        return Recovery(
            points[-1] - fault,
            phases,
            max(restores),
            max(copies, default=None),
            all(sources) if sources else None,
        )

    def _tell(self, what: str) -> None:
        for rank in self._ranks:
            print(what, file=_of(rank.stdin), flush=True)

    def _answers(self) -> list[Notes]:
        with _killing_after(_LIMIT_S, self._ranks):
            lines = [_of(rank.stdout).readline() for rank in self._ranks]
        if not all(lines):
            self._errors.seek(0)
            raise RuntimeError(f"a rank ended, or was silent for {_LIMIT_S:g} s:\n{self._errors.read()[-4000:]}")
        return [json.loads(line) for line in lines]


def relaunch(gigabytes: float, folder: Path) -> Recovery:
    """Run the job of `tools.bench.relaunching` under torchrun, through one fault. The first one saves in `folder`."""
    notes_file = folder / "notes.jsonl"
    notes_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS)]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "tools.bench.relaunching"]
    command += ["--gb", str(gigabytes), "--folder", str(folder), "--notes", str(notes_file)]
    command += [] if (folder / "shapes.json").exists() else ["--save"]
    # In the store that torchrun shares with its ranks, ranks that were started again may find addresses of dead ones.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-4000:]}")
    notes: list[Notes] = [json.loads(line) for line in notes_file.read_text().splitlines()]
    fault = max(note.get("fault", 0.0) for note in notes)
    again = [note for note in notes if note["attempt"] == 1]
    points = [fault, *(max(float(note[moment]) for note in again) for moment in _RELAUNCH)]
    phases = dict(zip(_RELAUNCH.values(), (later - at for at, later in pairwise(points)), strict=True))
    return Recovery(points[-1] - fault, phases, phases["load"], None, None)


class _killing_after:  # noqa: N801 - reads as the sentence it is
    """Kill the processes if the block takes longer."""

    def __init__(self, limit_s: float, processes: Iterable[subprocess.Popen[str]]) -> None:
        self._processes = list(processes)
        self._timer = threading.Timer(limit_s, self._kill)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._timer.join()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def _of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
