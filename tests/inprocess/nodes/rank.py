"""One rank, forked from the nursery: move to its node, run a program, and end with the exit code of a script."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed  # noqa: F401 - here, it is imported before the first fork

import ckpt.restart  # noqa: F401
import inprocess  # noqa: F401
import tests.inprocess.nodes.fleet_launcher
import tests.inprocess.nodes.program
import tests.inprocess.nodes.replicas_program  # noqa: F401
from tests.inprocess.faults.rank import redirect
from tests.inprocess.nodes.journal import Journal

PLACE = "LAB_RANK_PLACE"  # a name by which ranks may differ: see `coordination.claims`
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class Place:
    """The properties of the processes of a node.

    `binds` are files that they see instead of others, `disks` the sizes of empty disks that are at these paths.
    """

    hostname: str
    network_namespace: str
    control_group: str
    binds: dict[str, str]
    disks: dict[str, int]

    def enter(self) -> None:
        """Move this process, which has one thread, and all that it will start. OSError if that is not allowed."""
        Path(self.control_group, "cgroup.procs").write_text("0")
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(self.network_namespace, os.O_RDONLY | os.O_CLOEXEC)
        _check(libc.setns(namespace, _CLONE_NEWNET), "setns")
        os.close(namespace)
        _check(libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS), "unshare")
        socket.sethostname(self.hostname)
        _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        for target, source in self.binds.items():
            _check(libc.mount(source.encode(), target.encode(), None, _MS_BIND, None), f"mount over {target}")
        for target, size in self.disks.items():
            options = f"size={size}".encode()
            _check(libc.mount(b"disk", target.encode(), b"tmpfs", 0, options), f"mount at {target}")


def live(program: str, arguments: Sequence[Any], env: Mapping[str, str], folder: Path) -> int:
    """Call `program` ("module:function") on the node of `env`, with a journal and the arguments.

    The last line of the journal is "done", or says with which exception it left; then the exit code is that of the
    SystemExit, or 1.
    """
    os.environ.update(env)
    process = int(env["RANK"])
    redirect(folder / f"{process}.output", "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s")
    Place(**json.loads(env[PLACE])).enter()
    journal = Journal(folder, process)
    module, _, name = program.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    try:
        function(journal, *arguments)
    except BaseException as error:
        traceback.print_exc()
        journal.note(f"left {type(error).__name__}")
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    journal.note("done")
    return 0


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
