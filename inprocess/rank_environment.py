"""The number of this process among the processes of its job, according to the environment.

    started by                        rank                    of                      local rank, of
    torchrun, ckpt_launcher, by hand  RANK                    WORLD_SIZE              LOCAL_RANK, LOCAL_WORLD_SIZE
    mpirun of Open MPI                OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK, _SIZE
    mpirun of MVAPICH2                MV2_COMM_WORLD_RANK     MV2_COMM_WORLD_SIZE     MV2_COMM_WORLD_LOCAL_RANK, _SIZE
    mpirun of MPICH, Intel MPI        PMI_RANK                PMI_SIZE                MPI_LOCALRANKID, MPI_LOCALNRANKS
    flux run                          FLUX_TASK_RANK          FLUX_JOB_SIZE           FLUX_TASK_LOCAL_ID
    srun                              SLURM_PROCID            SLURM_STEP_NUM_TASKS    SLURM_LOCALID, of its node

The first row that is complete counts, but for RANK and WORLD_SIZE alone, which the row of the launcher completes. A
process of a batch script that no srun has started is in no step of several tasks: it is alone. Without any of these
variables a process is alone, too; with some of them but not enough there is an error.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["RankEnvironment", "ranks_of_environment", "scheduled_ranks"]


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process is `rank` of `world_size`, and on its node `local_rank` of `local_world_size`, if that is known.

    `job` names the job to which a launcher of MPI or a scheduler has given these numbers, if it has a name.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    job: str = ""

    def export_local(self) -> None:
        """Set LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does, if they are known and not set."""
        for name, value in (("LOCAL_RANK", self.local_rank), ("LOCAL_WORLD_SIZE", self.local_world_size)):
            if value is not None and not os.environ.get(name):
                os.environ[name] = str(value)


@dataclass(frozen=True, slots=True)
class _Names:
    """The variables of one launcher."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""
    jobs: tuple[tuple[str, ...], ...] = ()  # variables that name the job together; the first that are all set count

    def read(self) -> RankEnvironment | None:
        """Return the numbers that they hold; None unless there is a rank and a world size."""
        rank, world_size = _number(self.rank), _number(self.world_size)
        if rank is None or world_size is None:
            return None
        local_world_size = _number(self.local_world_size) if self.local_world_size else _tasks_of_this_node()
        named = (".".join(os.environ.get(name, "") for name in names) for names in self.jobs if _all_set(names))
        return RankEnvironment(rank, world_size, _number(self.local_rank), local_world_size, next(named, ""))


_OF_SLURM = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", jobs=(("SLURM_JOB_ID", "SLURM_STEP_ID"),))
_LAUNCHERS = (
    _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    ),
    _Names("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", jobs=(("FLUX_JOB_ID",),)),
    _OF_SLURM,
)
_HINTS = (*(name for each in _LAUNCHERS[:-1] for name in (each.rank, each.world_size)), "PMIX_RANK")
_REMEDY = (
    "start the processes with torchrun or ckpt_launcher, or set RANK and WORLD_SIZE in each (0 and 1 if it is alone)"
)


def ranks_of_environment() -> RankEnvironment:
    """Return the numbers of this process. ValueError, with the names of the variables, if they are not all known."""
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    local_rank, local_world_size = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    scheduled = scheduled_ranks()
    if scheduled is not None and rank in (None, scheduled.rank) and world_size in (None, scheduled.world_size):
        return scheduled
    if rank is not None and world_size is not None:
        return RankEnvironment(rank, world_size, local_rank, local_world_size)
    if scheduled is not None or rank not in (None, 0) or world_size not in (None, 1):
        raise ValueError(f"the environment does not say which rank of how many this process is: {_found()}; {_REMEDY}")
    if hints := [name for name in _HINTS if _number(name) is not None]:
        raise ValueError(
            f"{', '.join(hints)} in the environment say that this process is one of several, but not which one of how "
            f"many; {_REMEDY}"
        )
    if _number(_OF_SLURM.rank):  # that of a batch script is 0
        raise ValueError(
            f"{_OF_SLURM.rank} in the environment says that this process is one of several, but there is no "
            f"{_OF_SLURM.world_size}; {_REMEDY}"
        )
    return RankEnvironment(0, 1, local_rank, local_world_size)


def scheduled_ranks() -> RankEnvironment | None:
    """Return the numbers that a launcher of MPI or a scheduler has given to this process, if there are any."""
    return next((found for each in _LAUNCHERS if (found := each.read()) is not None), None)


def _found() -> str:
    names = ["RANK", "WORLD_SIZE", *(name for each in _LAUNCHERS for name in (each.rank, each.world_size))]
    values = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    missing = [f"{name} is not set" for name in names[:2] if not os.environ.get(name)]
    return ", ".join([*values, *missing])


def _all_set(names: tuple[str, ...]) -> bool:
    return all(os.environ.get(name) for name in names)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {variable} must be a number, not {text!r}") from None


def _tasks_of_this_node() -> int | None:
    """Return how many tasks of this step of Slurm are on this node, from a list such as ``2(x3),1``."""
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number("SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None
