"""A process that has imported torch once and forks ranks: `rank_server.py SOCKET_FD`. See `forked_ranks`.

It has one thread, and never runs an operation of torch, so that its children can.
"""

import os
import socket
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Job:
    """Run `call.pickle` in the folder on so many ranks."""

    folder: str
    world_size: int
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Forked:
    """The processes of a job, by rank."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A process has ended; the code is negative if a signal ended it."""

    pid: int
    returncode: int


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    import pytest  # noqa: F401  # so that the modules of tests load quickly
    import torch.distributed
    import torch.nn.parallel

    import inprocess.store
    import inprocess.wrap  # noqa: F401

    torch.set_num_threads(1)
    while packet := end.recv(MAX_BYTES):
        job = cloudpickle.loads(packet)
        function, args = cloudpickle.loads((Path(job.folder) / "call.pickle").read_bytes())
        pids = [_fork(job, rank, function, args, end) for rank in range(job.world_size)]
        end.send(cloudpickle.dumps(Forked(tuple(pids))))
        for _ in pids:
            pid, status = os.waitpid(-1, 0)
            end.send(cloudpickle.dumps(Ended(pid, os.waitstatus_to_exitcode(status))))


def _fork(job: Job, rank: int, function: Any, args: tuple[Any, ...], end: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        end.close()
        _rank_main(job, rank, function, args)
    return pid


def _rank_main(job: Job, rank: int, function: Any, args: tuple[Any, ...]) -> NoReturn:
    """As a process of its own would: exit code, traceback, standard streams."""
    code = 1
    try:
        os.setsid()
        folder = Path(job.folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            fd = os.open(folder / f"rank_{rank:05d}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(fd, number)
            os.close(fd)
        os.environ.update(job.env, RANK=str(rank))
        value = cloudpickle.dumps(function(rank, job.world_size, *args))
        partial = folder / f"rank_{rank:05d}.partial"
        partial.write_bytes(value)
        partial.rename(folder / f"rank_{rank:05d}.result")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from tests.support import rank_server  # under its own name, so that both sides know the same classes

    rank_server.main()
