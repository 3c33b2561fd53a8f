"""Runs the jobs of a program in `programs`, and reads what their ranks wrote down."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import run_ranks
from tests.support.frameworks import TRANSFORMERS

PROGRAMS = Path(__file__).with_name("programs")
KILLED = -9


@dataclass(frozen=True)
class Job:
    """One run of a program: in `folder`, where others may have run before, with `words` for it."""

    name: str
    folder: str
    words: str = ""
    ranks: int = 1


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended, and the lines that each wrote."""

    codes: list[int]
    lines: list[list[dict[str, Any]]]

    @property
    def start(self) -> int:
        """The step that all ranks began with."""
        (start,) = {line["start"] for lines in self.lines for line in lines if "start" in line}
        return int(start)

    def steps(self, rank: int = 0, after: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if line.get("step", 0) > after]


def run_program(program: str, folder: Path, jobs: list[Job], timeout: float) -> dict[str, Ended]:
    """Run jobs one after the other. A job that fails is found by the tests that look at it."""
    plan = folder / "plan.json"
    plan.write_text(
        json.dumps(
            [
                {
                    "name": job.name,
                    "ranks": job.ranks,
                    "args": [str(folder / job.folder), str(folder / f"{job.name}.log"), *job.words.split()],
                }
                for job in jobs
            ]
        )
    )
    options = {"timeout": timeout, "init_process_group": False, "imports": TRANSFORMERS}
    (result,) = run_ranks(PROGRAMS / program, 1, plan, **options)
    print(result.stderr)
    return {job.name: Ended(json.loads(Path(f"{plan}.{job.name}").read_text()), _lines(folder, job)) for job in jobs}


def _lines(folder: Path, job: Job) -> list[list[dict[str, Any]]]:
    files = [folder / f"{job.name}.log.{rank}" for rank in range(job.ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


def assert_continued(whole: Ended, resumed: Ended, start: int) -> None:
    """Assert that a job began with step `start`, and went on as the uninterrupted one did: losses and weights."""
    assert set(resumed.codes) == set(whole.codes) == {0}
    assert resumed.start == start
    for rank in range(len(whole.lines)):
        assert resumed.steps(rank) == whole.steps(rank, after=start)
        assert resumed.lines[rank][-1] == whole.lines[rank][-1]
