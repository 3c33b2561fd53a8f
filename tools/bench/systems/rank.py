"""One rank of a job that `jobs` has started: its state, its rounds, and the kinds of jobs.

    python -m tools.bench.systems.rank SPEC FOLDER MEMORY_FD PROGRESS_FD

It writes its results to FOLDER, and progress to the descriptor PROGRESS_FD: what systems print goes to a log.
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

from tools.bench.limits import BusLimit, CopyLimit, DiskLimit, cached_share, crc_seconds, drop_cache
from tools.bench.systems import Place
from tools.bench.systems.jobs import JobSpec, MemoryRequest, Turn
from tools.bench.systems.state import local_tensors, replicated_state, sharded_state, share_of
from tools.bench.systems.turns import SystemTurn, Tools, empty_folder
from tools.bench.workload import State, StepLoop, make_many_small, make_one_large, size_of

_TIMEOUT = timedelta(minutes=5)
_THREADS = 4


class _Limits:
    """Limits of the machine, measured by all ranks together, right before the turn of each system.

    There is memory to copy into, and a file with as many bytes as the whole state. `share` is what this rank stages.
    With the state on a GPU a copy goes over the bus: to pinned memory for saves, from there for loads.
    """

    def __init__(self, spec: JobSpec, state: State, share: list[torch.Tensor], folder: Path) -> None:
        needed = [tensor for tensor in local_tensors(state) if tensor.numel()]
        self._needed_bytes, share_bytes = size_of(needed), size_of(share)
        self._copy: CopyLimit | BusLimit
        self._copy_needed: CopyLimit | BusLimit
        if spec.device == "cuda":
            self._copy, self._copy_needed = BusLimit(share, to_gpu=False), BusLimit(needed, to_gpu=True)
        else:
            self._copy = CopyLimit(share)
            self._copy_needed = self._copy if self._needed_bytes == share_bytes else CopyLimit(needed)
        sizes: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, share_bytes)
        shares = [size or 0 for size in sizes]
        self._total = sum(shares)
        self._first = sum(shares[: dist.get_rank()]) if spec.sharded else 0
        self._file = DiskLimit(folder / "limit", self._total)
        self._share_bytes = share_bytes

    def of_saves(self) -> Turn:
        """Copy what each rank stages; then rank 0 writes what all ranks have."""
        dist.barrier()
        taken = {"limit_copy_s": self._copy.measure(), "staged_bytes": float(self._share_bytes)}
        dist.barrier()
        if dist.get_rank() == 0:
            taken["limit_write_s"] = self._file.write()
            taken["limit_over_s"] = self._file.write_over()
            taken["limit_crc_s"] = crc_seconds(self._total)
        dist.barrier()
        return taken

    def of_loads(self) -> Turn:
        """Read in each rank what it needs of a file, at the same time as the others, and copy as much in memory.

        Cold, a file is read for the first time, as the checkpoint is.
        """
        taken = {}
        if dist.get_rank() == 0:
            drop_cache(list(self._file.paths.values()))
            taken["limit_cached_share"] = cached_share(list(self._file.paths.values()))
        for name, direct in (("direct", True), ("cold", False), ("warm", False)):
            dist.barrier()
            taken[f"limit_read_{name}_s"] = self._file.read(self._first, self._first + self._needed_bytes, direct)
            dist.barrier()
        return taken | {"limit_copy_needed_s": self._copy_needed.measure(), "needed_bytes": float(self._needed_bytes)}

    def close(self) -> None:
        """Free threads and pinned memory."""
        self._copy.close()
        self._copy_needed.close()


@dataclass
class _Job:
    """A job in this rank.

    `failures` are systems that raised on any rank: they get no more turns. `counts` says whether the present round is
    one of those that are reported.
    """

    spec: JobSpec
    temporary: Path
    tools: Tools
    progress: TextIO
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    counts: bool = True

    def rounds(self, turn: Callable[[str, Path], Turn]) -> None:
        """Give every system its turn in every round; each round begins with another one."""
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
        except Exception as error:  # a system that cannot do this here: the others go on
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
    """Measure limits, saves, training, memory and loads of a transformer."""
    state = _state(job.spec)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    limits = _Limits(job.spec, state, share_of(state, rank, world_size), Path(job.spec.folder))
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
    """Count files, bytes and calls of fsync of a steady save of a transformer."""
    state = _state(job.spec)
    counter = Path(os.environ["BENCH_FSYNCS"])

    def turn(name: str, folder: Path) -> Turn:
        system = SystemTurn(name, _place(job, folder), state, job.tools)
        taken = system.counts(counter)
        system.close()
        return taken

    job.rounds(turn)


def small(job: _Job) -> None:
    """Save very many small tensors, and the same bytes in one; count their files."""
    states = {"many": make_many_small(job.spec.count), "one": make_one_large(job.spec.count)}

    def turn(name: str, folder: Path) -> Turn:
        taken: Turn = {}
        for which, state in states.items():
            place = _place(job, folder / which)
            place.folder.mkdir()
            system = SystemTurn(name, place, state, job.tools)
            saved = system.saves()
            taken |= {f"{which}_{key}": saved[key] for key in ("stall_s", "durable_s")}
            taken[f"{which}_files"] = system.files_of_last()
            system.close()
        return taken

    job.rounds(turn)


def reshard_save(job: _Job) -> None:
    """Save one checkpoint of each system for another job."""
    state = _state(job.spec)

    def turn(name: str, folder: Path) -> Turn:
        system = SystemTurn(name, _place(job, folder), state, job.tools)
        taken = system.saves()
        system.close()
        return taken

    job.rounds(turn)


def reshard_load(job: _Job) -> None:
    """Load what another number of ranks saved, in turns with what this number saved."""
    state = _state(job.spec)

    def turn(name: str, folder: Path) -> Turn:
        own = SystemTurn(name, _place(job, folder), state, job.tools)
        own.saves()
        own.close()
        taken = {f"same_{key}": value for key, value in own.loads(warm=False).items()}
        other = SystemTurn(name, _place(job, Path(job.spec.earlier) / f"{name}-0"), state, job.tools, last_step=2)
        return taken | {f"other_{key}": value for key, value in other.loads(warm=False).items()}

    job.rounds(turn)


_KINDS = {function.__name__: function for function in (saving, counting, small, reshard_save, reshard_load)}


def _state(spec: JobSpec) -> State:
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
    warnings.simplefilter("ignore")  # of other libraries
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
        Tools(MemoryRequest(int(fd)) if rank == 0 else None, spec.most_steps),
        os.fdopen(int(progress_fd), "w"),
    )
    _KINDS[spec.kind](job)
    answer = {"turns": job.turns, "failures": job.failures}
    Path(temporary, f"rank_{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
