"""The program of the process that forks ranks, and of each rank: `template_main SOCKET_FD`. See `template`.

It has one thread, and never runs an operation of torch, so that its children can.
"""

import atexit
import contextlib
import os
import random
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import cloudpickle

from tests.support.template import MAX_BYTES, Fork


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    _import_what_ranks_need()
    while packet := end.recv(MAX_BYTES):
        request = cloudpickle.loads(packet)
        if isinstance(request, Fork):
            answer = os.fork()
            if answer == 0:
                end.close()
                _become_rank(Path(request.folder), request.environment)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1])
        end.send(cloudpickle.dumps(answer))


def _import_what_ranks_need() -> None:
    # ruff: noqa: F401
    import pytest
    import tensorstore
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel

    import ckpt.restart
    import inprocess.store
    import inprocess.wrap


def _become_rank(folder: Path, environment: dict[str, str]) -> NoReturn:
    """As a program of its own, but for the end: taking all modules apart would take most of a second."""
    code = 1
    try:
        _run_rank(folder, environment)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_rank(folder: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(folder / f"rank_{rank:05d}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    import torch.distributed as dist

    with_group = bool(os.environ["TEST_RANKS_INIT"])
    if with_group:
        # A file store: unlike a port it cannot be taken by somebody else between choosing and using it.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    function, args = cloudpickle.loads((folder / "call.pickle").read_bytes())
    value = function(rank, world_size, *args)
    partial = folder / f"rank_{rank:05d}.partial"
    partial.write_bytes(cloudpickle.dumps(value))
    partial.rename(folder / f"rank_{rank:05d}.result")
    if with_group and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
