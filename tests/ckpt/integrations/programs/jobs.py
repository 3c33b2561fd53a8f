"""Runs training jobs one after the other, as forks of one process: importing a framework takes longer than a job.

A program calls `run_jobs(main)` with the path of a plan as its argument, a JSON list of jobs. Each is a dict: `name`,
`ranks`, `args` for `main`. The exit codes of its ranks go to ``<plan>.<name>``.
"""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import free_port

_LIMIT_S = 60.0


def run_jobs(main: Callable[..., object]) -> None:
    plan = Path(sys.argv[1])
    for job in json.loads(plan.read_text()):
        codes = _run_job(main, job)
        Path(f"{plan}.{job['name']}").write_text(json.dumps(codes))


def strike(words: tuple[str, ...], event: str, step: int) -> None:
    """Kill this process if the words say so: ``<event>:<step>`` for all ranks, ``<event>:<step>@<rank>`` for one."""
    if {f"{event}:{step}", f"{event}:{step}@{os.environ['RANK']}"} & set(words):
        os.kill(os.getpid(), signal.SIGKILL)


def await_save_before_strike(words: tuple[str, ...], root: Path, step: int, save_every: int) -> None:
    """Before a rank is killed at `step`, wait until the save before that is published."""
    before = root / f"step_{(step - 1) // save_every * save_every:08d}"
    if any(re.fullmatch(rf"kill(-saving)?:{step}(@.)?", word) for word in words):
        deadline = time.monotonic() + _LIMIT_S / 2
        while not before.is_dir():
            assert time.monotonic() < deadline, f"{before} was not published"
            time.sleep(0.01)


def _run_job(main: Callable[..., object], job: dict[str, Any]) -> list[int]:
    print(f"---- {job['name']}", flush=True)
    print(f"---- {job['name']}", file=sys.stderr, flush=True)
    ranks = job["ranks"]
    port = str(free_port())
    pids = [_fork(main, job["args"], rank, ranks, port) for rank in range(ranks)]
    deadline = time.monotonic() + _LIMIT_S
    codes: dict[int, int] = {}
    while len(codes) < ranks:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _fork(main: Callable[..., object], args: list[Any], rank: int, ranks: int, port: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_PORT=port
        )
        main(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
