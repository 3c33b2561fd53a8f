"""The node of a process: its network, its names, and its control group."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class Place:
    """The properties of the processes of a node.

    `binds` are files that they see instead of others, `disks` the sizes of empty disks that are at these paths. Without
    a `control_group` they stay in that of their parent.
    """

    hostname: str
    network_namespace: str
    control_group: str
    binds: dict[str, str]
    disks: dict[str, int] = field(default_factory=dict)

    def enter(self) -> None:
        """Move this process, which has one thread, and all that it will start. OSError if that is not allowed."""
        if self.control_group:
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


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
