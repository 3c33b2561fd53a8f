"""One rank of a job, started by `jobs`; writes its answer to FOLDER.

python -m tools.bench.suite.rank SPEC FOLDER FD FD
"""

import gc
import json
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tools.bench.suite.limit_turns import Limits
from tools.bench.suite.monitor import Request
from tools.bench.suite.spec import JobSpec, Turn
from tools.bench.suite.turns import SystemTurn, Tools, empty_folder
from tools.bench.systems import Place
from tools.bench.training import StepLoop
from tools.bench.workloads.small import many_state, one_state
from tools.bench.workloads.transformer import replicated_state, sharded_state, share_of

__all__ = ["main"]

_TIMEOUT = timedelta(minutes=5)
_THREADS = 4


@dataclass
class _Job:
    """This rank's side of a job. `failures` are systems that raised on any rank: they get no more turns. `counts` says
    whether the present round does."""

    spec: JobSpec
    temporary: Path
    tools: Tools
    progress: TextIO
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    counts: bool = True

    def rounds(self, turn: Callable[[str, Path], Turn]) -> None:
        """Every system has its turn in every round; each round begins with another one."""
        names = self.spec.systems
        self.turns = {name: [] for name in names}
        for number in range(self.spec.rounds + 1):
            first = number % len(names)
            self.counts = number > 0 or not self.spec.rounds
            for name in (*names[first:], *names[:first]):
                if name not in self.failures:
                    self._take(name, turn, number)

    def _take(self, name: str, turn: Callable[[str, Path], Turn], number: int) -> None:
        folder = Path(self.spec.folder) / f"{name}-{number}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            text = f"{self.spec.kind}, {self.spec.world_size} ranks: round {number} of {self.spec.rounds}, {name}"
            print(f"\r{text:<78}", end="", file=self.progress, flush=True)
        dist.barrier()
        problem, taken = "", {}
        try:
            taken = turn(name, folder)
        except Exception as error:  # of a peer that cannot do this here: the others go on
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if "BENCH_TRACEBACKS" in os.environ:
                traceback.print_exc(file=self.progress)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if any(problems):
            self.failures[name] = next(filter(None, problems))
        elif self.counts:
            self.turns[name].append(taken)
        gc.collect()
        if dist.get_rank() == 0 and self.spec.kind != "reshard_save":
            empty_folder(folder)
        dist.barrier()


def saving(job: _Job) -> None:
    """The transformer: limits, saves, training, memory, loads."""
    state = _state(job.spec)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    limits = Limits(job.spec, state, share_of(state, rank, world_size), Path(job.spec.folder))
    loop = StepLoop(job.spec.step_s, job.spec.device)

    def turn(name: str, folder: Path) -> Turn:
        system = SystemTurn(name, _place(job, folder), state, job.tools)
        taken = limits.of_saves()
        taken |= system.saves()
        if job.counts:
            taken |= system.training(loop) | system.memory()
        taken |= system.from_memory()
        system.close()
        return taken | limits.of_loads() | system.loads()

    job.rounds(turn)
    limits.close()


def counting(job: _Job) -> None:
    """The transformer: files, bytes and calls of fsync of a steady save."""
    state = _state(job.spec)
    counter = Path(os.environ["BENCH_FSYNCS"])

    def turn(name: str, folder: Path) -> Turn:
        system = SystemTurn(name, _place(job, folder), state, job.tools)
        taken = system.counts(counter)
        system.close()
        return taken

    job.rounds(turn)


def small(job: _Job) -> None:
    """Very many small tensors, and the same bytes in one; how many files that makes."""
    states = {"many": many_state(job.spec.count), "one": one_state(job.spec.count)}

    def turn(name: str, folder: Path) -> Turn:
        taken: Turn = {}
        for which, state in states.items():
            place = _place(job, folder / which)
            place.folder.mkdir()
            system = SystemTurn(name, place, state, job.tools)
            saved = system.saves()
            taken |= {f"{which}_durable_s": saved["durable_s"], f"{which}_files": system.files_of_last()}
            system.close()
        return taken

    job.rounds(turn)


def reshard_save(job: _Job) -> None:
    """Leaves one checkpoint of each system for another job."""
    state = _state(job.spec)

    def turn(name: str, folder: Path) -> Turn:
        system = SystemTurn(name, _place(job, folder), state, job.tools)
        taken = system.saves()
        system.close()
        return taken

    job.rounds(turn)


def reshard_load(job: _Job) -> None:
    """Loads what another number of ranks saved, in turns with what this number saved."""
    state = _state(job.spec)

    def turn(name: str, folder: Path) -> Turn:
        own = SystemTurn(name, _place(job, folder), state, job.tools)
        own.saves()
        own.close()
        taken = {f"same_{key}": value for key, value in own.loads(warm=False).items()}
        other = SystemTurn(name, _place(job, Path(job.spec.earlier) / f"{name}-0"), state, job.tools, last_step=2)
        return taken | {f"other_{key}": value for key, value in other.loads(warm=False).items()}

    job.rounds(turn)


KINDS = {function.__name__: function for function in (saving, counting, small, reshard_save, reshard_load)}


def _state(spec: JobSpec) -> dict[str, dict[str, torch.Tensor]]:
    make = sharded_state if spec.sharded else replicated_state
    return make(spec.total_bytes, spec.device)


def _backend(spec: JobSpec) -> str:
    """NCCL refuses several ranks on one GPU; nothing that is measured communicates on it."""
    with_nccl = spec.device == "cuda" and spec.world_size <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if with_nccl else "gloo"


def _place(job: _Job, folder: Path) -> Place:
    return Place(folder, dist.get_rank(), dist.get_world_size(), _THREADS, job.spec.sharded, job.spec.device)


def main(arguments: list[str]) -> int:
    text, temporary, fd, progress_fd = arguments
    spec = JobSpec.from_json(text)
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore")  # of peers
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # DCP needs one for each tensor it shares
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // spec.world_size))
    store = FileStore(str(Path(temporary) / "store"), spec.world_size)
    if spec.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(_backend(spec), store=store, rank=rank, world_size=spec.world_size, timeout=_TIMEOUT)
    job = _Job(
        spec,
        Path(temporary),
        Tools(Request(int(fd)) if rank == 0 else None, spec.most_steps),
        os.fdopen(int(progress_fd), "w"),
    )
    KINDS[spec.kind](job)
    answer = {"turns": job.turns, "failures": job.failures}
    Path(temporary, f"rank_{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
