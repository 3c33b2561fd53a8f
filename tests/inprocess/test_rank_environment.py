"""Which rank of how many a process is, by the variables of whoever has started it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inprocess.monitor_process.messages import RankInfo
from inprocess.rank_environment import RankEnvironment, ranks_of_environment, scheduled_ranks
from inprocess.state import State
from tests.support import free_port
from tests.support.ranks import REPOSITORY
from tests.support.slurm import missing_for_slurm, run_slurm
from tests.support.template import quick_python

PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "FLUX_")


def setenv(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Set these variables, and no others that could count."""
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    for item in text.split():
        monkeypatch.setenv(*item.split("="))


SLURM = "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x3),1"
OMPI = " ".join(f"OMPI_COMM_WORLD_{name}" for name in ("RANK=3", "SIZE=4", "LOCAL_RANK=1", "LOCAL_SIZE=2"))


@pytest.mark.parametrize(
    ("variables", "numbers"),
    [
        ("", (0, 1, None, None)),
        ("RANK=3 WORLD_SIZE=8", (3, 8, None, None)),
        ("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", (3, 8, 1, 2)),
        ("RANK=0", (0, 1, None, None)),
        ("WORLD_SIZE=1", (0, 1, None, None)),
        (SLURM, (3, 7, 1, 2)),
        (SLURM.replace("2(x3),1", "6,1"), (3, 7, 1, 1)),
        (SLURM.replace("2(x3),1", "some"), (3, 7, 1, None)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0", (0, 1, None, None)),  # a batch script
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0", (0, 1, 0, None)),
        ("WORLD_SIZE=7 " + SLURM, (3, 7, 1, 2)),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            (1, 2, 1, None),
        ),  # torchrun in a step
        (
            f"{OMPI} PMIX_RANK=3 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",  # the daemons of mpirun are a step
            (3, 4, 1, 2),
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 2, 1, 2)),
        ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2", (1, 2, None, None)),
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=0", (1, 2, 0, None)),
    ],
)
def test_the_variables_of_launchers(
    monkeypatch: pytest.MonkeyPatch, variables: str, numbers: tuple[int | None, ...]
) -> None:
    setenv(monkeypatch, variables)
    found = ranks_of_environment()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == numbers
    state = State.from_env()
    assert (state.rank, state.world_size) == numbers[:2]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ("RANK=1", "RANK=1, WORLD_SIZE is not set"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2, RANK is not set"),
        ("WORLD_SIZE=2 " + SLURM, "WORLD_SIZE=2, SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=7, RANK is not set"),
        ("RANK=0 " + SLURM, "RANK=0, SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=7, WORLD_SIZE is not set"),
        ("PMIX_RANK=0", "PMIX_RANK in the environment"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE in the environment"),
        ("SLURM_PROCID=1", "SLURM_PROCID in the environment .* no SLURM_STEP_NUM_TASKS"),
        ("PMI_RANK=x PMI_SIZE=2", "PMI_RANK must be a number, not 'x'"),
    ],
)
def test_too_little_is_an_error_that_names_the_variables(
    monkeypatch: pytest.MonkeyPatch, variables: str, named: str
) -> None:
    setenv(monkeypatch, variables)
    with pytest.raises(ValueError, match=named):
        ranks_of_environment()


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        (SLURM, ""),
        (f"{SLURM} SLURM_JOB_ID=7", ""),
        (f"{SLURM} SLURM_JOB_ID=7 SLURM_STEP_ID=0", "7.0"),
        (f"{OMPI} SLURM_JOB_ID=7 SLURM_STEP_ID=0", ""),  # that of a daemon of mpirun, on some of the nodes
        (f"{OMPI} PMIX_NAMESPACE=prte-1", "prte-1"),
        (f"{OMPI} OMPI_MCA_ess_base_jobid=123", "123"),
        ("PMI_RANK=1 PMI_SIZE=2", ""),
    ],
)
def test_the_name_of_the_job(monkeypatch: pytest.MonkeyPatch, variables: str, job: str) -> None:
    setenv(monkeypatch, variables)
    assert ranks_of_environment().job == job


def test_the_local_numbers_are_set_as_torchrun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, "LOCAL_RANK=5")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    RankEnvironment(3, 8, 1, 2).export_local()
    assert (os.environ["LOCAL_RANK"], os.environ.pop("LOCAL_WORLD_SIZE")) == ("5", "2")


def test_the_client_of_a_monitor_knows_its_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, SLURM)
    info = RankInfo.get_for_current_rank()
    assert (info.global_rank, info.local_rank) == (3, 1)
    setenv(monkeypatch, "")
    assert scheduled_ranks() is None
    with pytest.raises(ValueError, match="the rank is unknown"):
        RankInfo.get_for_current_rank()


PROGRAM = """
import os
import inprocess

@inprocess.Wrapper()
def train():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    print("runs as", *(os.environ.get(name) for name in names), flush=True)

train()
"""


@pytest.mark.timeout(180)
@pytest.mark.skipif(missing_for_slurm() is not None, reason=str(missing_for_slurm()))
def test_tasks_of_srun_are_one_job_and_a_batch_script_is_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/bash\nsrun -n 2 {quick_python()} {program}\necho alone\n{quick_python()} {program}\n")
    env = {"PYTHONPATH": str(REPOSITORY), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with run_slurm(tmp_path / "slurm") as slurm:
        job = slurm.run("sbatch", "--parsable", "-n2", f"-o{tmp_path}/out", str(batch), env=env).strip()
        slurm.wait_for_state(job, "COMPLETED", timeout=100)
    step, alone = (tmp_path / "out").read_text().split("alone\n")
    assert {"runs as 0 2 0 2", "runs as 1 2 1 2"} <= set(step.splitlines())
    assert "runs as 0 1 None None" in alone.splitlines()
