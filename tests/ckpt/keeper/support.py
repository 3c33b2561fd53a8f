"""What keepers leave: processes and files, of one folder for temporary files."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.inprocess.coordination.helpers import eventually
from tests.support import launch_ranks


def keepers_of(runtime: Path) -> list[psutil.Process]:
    """Return the keepers that were started with this folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE or "ckpt.keeper" not in process.cmdline():
                continue
            is_worker = process.name().startswith("ckpt-") and process.name() != "ckpt-keeper"
            if not is_worker and process.environ().get("TMPDIR") == str(runtime):
                found.append(process)
    return found


def files_of(runtime: Path) -> list[str]:
    """Return the files of keepers."""
    return sorted(name for _, _, names in os.walk(runtime) for name in names if name.startswith("linger-"))


def held_memory(runtime: Path) -> set[int]:
    """Return the inodes of the memory that keepers keep."""
    found = set()
    for process in keepers_of(runtime):
        with contextlib.suppress(OSError, psutil.Error):
            for fd in os.listdir(f"/proc/{process.pid}/fd"):
                if os.readlink(f"/proc/{process.pid}/fd/{fd}").startswith("/memfd:ckpt-slot"):
                    found.add(os.stat(f"/proc/{process.pid}/fd/{fd}").st_ino)
    return found


def no_keepers_are_left(runtime: Path) -> None:
    """Fail unless all have ended, or end soon, and have removed their files."""
    # Both: a process that is just being started has no command line to be found by.
    eventually(lambda: not keepers_of(runtime) and not files_of(runtime))


def end_keepers(runtime: Path) -> None:
    """End what a test that failed has left."""
    for process in keepers_of(runtime):
        with contextlib.suppress(psutil.Error):
            process.kill()


def starts(
    stack: contextlib.ExitStack,
    runtime: Path,
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    **options: Any,
) -> list[list[Any]]:
    """Run one start of a job, and return what its ranks began with. What it leaves stays until the stack is closed.

    All ranks must end like the arguments say: by SIGKILL unless `end` is something else.
    """
    env = {"TMPDIR": str(runtime), **options.pop("env", {})}
    call = functools.partial(function, **options)
    group = stack.enter_context(launch_ranks(Call(call, args), world_size, env=env, init_process_group=world_size > 1))
    killed = options.get("end", args[2] if len(args) > 2 else "kill") == "kill"
    results = group.wait(returncodes=dict.fromkeys(range(world_size), -signal.SIGKILL if killed else 0))
    found = [re.findall(r"^began (.*)$", result.stdout, re.MULTILINE) for result in results]
    return [ast.literal_eval(line) for lines in found for line in lines]


@dataclass(frozen=True)
class Call:
    """A function with its arguments, as ranks are called."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self, rank: int, world_size: int) -> Any:
        tempfile.tempdir = None  # what the process that this one was forked from has found is not that of TMPDIR
        return self.function(rank, world_size, *self.args)
