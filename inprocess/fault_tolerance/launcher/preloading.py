"""Worker processes that are started in advance, and have imported modules when a cycle begins (`--ft-preload`).

    launcher                                   process for local rank 0, 1, ...   (`preloaded_worker`)
      fill     ── starts ────────────────────▶   imports the modules, and waits
      take     ── program, environment, files ─▶ becomes the worker: same process id, in a session of its own
      close    ── kills ─────────────────────▶

What modules read from the environment while they are imported must be right: if variables differ for a worker that are
not torchrun's and ours, its process is started as usual.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import api as torchs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from inprocess.ipc.deadline import Deadline
from inprocess.ipc.process import end_process

_log = logging.getLogger(__name__)
_PROGRAM = str(Path(__file__).with_name("preloaded_worker.py"))
_DEFAULTS_OF_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
_OF_WORKERS = ("GROUP_", "INPROCESS_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE", "FT_")


@dataclass(frozen=True)
class _Waiting:
    process: subprocess.Popen[bytes]
    order: socket.socket
    environment: Mapping[str, str]

    def close(self) -> None:
        self.order.close()
        end_process(self.process, Deadline(0.0))  # it may hang in an import from a file system that does not answer


class PreloadedWorkers:
    """Processes that have imported `modules`, one for each of `count` local ranks; none without modules. Main thread.

    They end when this process does.
    """

    def __init__(self, modules: Sequence[str], count: int) -> None:
        self._modules = list(modules)
        self._count = count
        self._waiting: dict[int, _Waiting] = {}

    def fill(self, delay_s: float = 0.0) -> None:
        """Start a process for each local rank that has none; it begins to import after `delay_s`."""
        for local_rank in range(self._count if self._modules else 0):
            waiting = self._waiting.get(local_rank)
            if waiting is not None and waiting.process.poll() is None:
                continue
            if waiting is not None:
                code = waiting.process.returncode
                _log.warning("the process that waited for local rank %d has ended with %d", local_rank, code)
                waiting.close()
            ours, theirs = socket.socketpair()
            environment = {**_DEFAULTS_OF_TORCHRUN, **os.environ}
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-u", _PROGRAM, str(theirs.fileno()), str(delay_s), *self._modules],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._waiting[local_rank] = _Waiting(process, ours, environment)

    @contextlib.contextmanager
    def used_by_torch(self) -> Iterator[None]:
        """Have torch take these processes for the workers that it starts."""
        if not self._modules:
            yield
            return
        module: Any = torchs
        original, module.get_subprocess_handler = module.get_subprocess_handler, self.handler
        try:
            yield
        finally:
            module.get_subprocess_handler = original

    def handler(self, **options: Any) -> SubprocessHandler:
        """Return torch's handler of a worker, in the process that waits for its local rank, if that is possible."""
        preloaded = self

        class Handler(SubprocessHandler):
            def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
                outputs = {fd: file for fd, file in ((1, self._stdout), (2, self._stderr)) if file is not None}
                found = preloaded._take(self.local_rank_id, args, env, outputs)
                return super()._popen(args, env) if found is None else found

        return Handler(**options)

    @property
    def pids(self) -> list[int]:
        """Process ids of those that wait."""
        return [waiting.process.pid for waiting in self._waiting.values()]

    def close(self) -> None:
        """End the processes that wait. Idempotent."""
        while self._waiting:
            self._waiting.popitem()[1].close()

    def _take(
        self, local_rank: int, command: Sequence[str], environment: Mapping[str, str], outputs: Mapping[int, IO[Any]]
    ) -> subprocess.Popen[bytes] | None:
        """Return the process that runs this command from now on; None if there is none that can."""
        waiting = self._waiting.pop(local_rank, None)
        if waiting is None:
            return None
        differs = sorted(
            name
            for name in {*environment, *waiting.environment}
            if environment.get(name) != waiting.environment.get(name) and not name.startswith(_OF_WORKERS)
        )
        if list(command[:2]) != [sys.executable, "-u"]:
            differs = [f"the command {command[0]}"]
        if differs:
            _log.warning("local rank %d begins without --ft-preload, as it has its own %s", local_rank, differs)
            waiting.close()
            return None
        order = {"arguments": command[2:], "environment": dict(environment), "outputs": list(outputs)}
        with waiting.order, tempfile.TemporaryFile("w") as file:
            json.dump(order, file)
            file.flush()
            try:
                socket.send_fds(waiting.order, [b"o"], [file.fileno(), *(each.fileno() for each in outputs.values())])
            except OSError as error:
                _log.warning("the process that waited for local rank %d has ended: %s", local_rank, error)
                waiting.close()
                return None
        return waiting.process
