"""Two jobs that are started with the same MASTER_PORT and without a launcher."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from inprocess import Wrapper
from inprocess.coordination import rendezvous
from tests.ckpt.crash.killers import wait_until
from tests.inprocess.restarting import SHORT, numbers, outcome, seconds
from tests.support import RankGroup, free_port, launch_ranks, rank_values

QUICK = seconds(soft_timeout=15, hard_timeout=20, barrier_timeout=240)


def run_when_told(rank: int, world_size: int, job: str, folder: Path) -> Any:
    rendezvous._BETTER_CLAIMS_S = 60.0  # so that nothing here depends on time
    wait_until((folder / f"{job}{rank}").exists, 50)

    def train() -> Any:
        import torch

        dist.init_process_group("gloo")
        value = torch.tensor(float(rank + 1) * (1 if job == "A" else 100))
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item(), numbers()

    return outcome(Wrapper(**QUICK)(train))


class TwoJobs:
    """Jobs A and B, of two ranks each, that use the same port; the ranks begin when told. They differ in `env`."""

    def __init__(self, folder: Path, stack: ExitStack, env: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        self.port = free_port()
        self.groups: dict[str, RankGroup] = {}
        for job in "AB":
            common = {"MASTER_PORT": str(self.port), **env[job]}
            ranks = launch_ranks(run_when_told, 2, job, folder, env=common, init_process_group=False)
            self.groups[job] = stack.enter_context(ranks)

    def begin(self, job: str, rank: int) -> None:
        (self.folder / f"{job}{rank}").touch()

    def wait_for_claims(self, count: int) -> None:
        """Wait until rank 0 serves, and this many others have claimed a rank."""

        def serves() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(serves, 30)
        store: Any = dist.TCPStore("127.0.0.1", self.port, None, False, timedelta(seconds=20))  # type: ignore[attr-defined]
        wait_until(lambda: store.add(f"inprocess/{rendezvous._launch()}//1/claims", 0) >= count, 30)

    def refusal(self, job: str, rank: int) -> str:
        """Return the text of the error with which a rank ends."""
        wait_until(lambda: self.groups[job].results()[rank].returncode is not None, 30)
        kind, text, _ = self.groups[job].results()[rank].value
        assert kind == "StoreError"
        assert f"MASTER_PORT {self.port} at 127.0.0.1 is used by two jobs at once" in text
        return str(text)

    def trains(self, job: str, total: float) -> bool:
        return [each.value for each in self.groups[job].wait()] == [(total, (str(rank), "2")) for rank in range(2)]


@pytest.fixture
def jobs(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield TwoJobs(tmp_path, stack, {job: {"JOB": job} for job in "AB"})


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each in a step of one job of Slurm, whose only task starts its ranks with RANK and WORLD_SIZE of its own."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    task = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    with ExitStack() as stack:
        yield TwoJobs(
            tmp_path, stack, {job: {**task, "SLURM_STEP_ID": step} for job, step in zip("AB", "01", strict=True)}
        )


@pytest.mark.parametrize("first", ["A", "B"])
def test_the_job_that_meets_first_runs_and_the_other_fails(jobs: TwoJobs, first: str) -> None:
    other = "B" if first == "A" else "A"
    jobs.begin(first, 0)
    jobs.wait_for_claims(0)
    jobs.begin(other, 0)
    assert "is rank 0 there" in jobs.refusal(other, 0)
    jobs.begin(other, 1)
    jobs.wait_for_claims(2)  # of the other rank 0, and this
    jobs.begin(first, 1)
    assert jobs.trains(first, 3.0 if first == "A" else 300.0)
    assert "another process is rank 1 there" in jobs.refusal(other, 1)


def test_a_rank_of_another_job_that_comes_first_is_not_taken(jobs: TwoJobs) -> None:
    jobs.begin("A", 0)
    jobs.begin("B", 1)
    jobs.wait_for_claims(1)
    jobs.begin("A", 1)
    assert jobs.trains("A", 3.0)
    assert "another process is rank 1 there" in jobs.refusal("B", 1)


def test_a_rank_in_another_step_of_slurm_that_comes_first_is_not_taken(steps: TwoJobs) -> None:
    steps.begin("A", 0)
    steps.begin("B", 1)
    steps.wait_for_claims(1)
    steps.begin("A", 1)
    assert steps.trains("A", 3.0)
    assert "another process is rank 1 there" in steps.refusal("B", 1)


def test_ranks_that_do_not_come_are_named() -> None:
    def main(rank: int, world_size: int) -> Any:
        times = {**SHORT, **seconds(soft_timeout=1, hard_timeout=1.5, heartbeat_timeout=2, barrier_timeout=3)}
        return outcome(lambda: Wrapper(**times)(int)()) if rank == 0 else None

    kind, text, _ = rank_values(main, 2)[0]
    assert kind == "StoreError"
    assert "the 2 ranks did not meet" in text
    assert text.endswith("missing: 1")
