"""A control group with a limit on memory, of either version."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.inprocess.nodes.cgroups import Group

EATS_MEMORY = "held = [bytearray(b'x' * (1 << 20)) for _ in range(4096)]"
"""Python code that takes 4 GiB of memory and writes into all of it."""


class MemoryGroup(Group):
    """A group; processes are added to it by id."""

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A new group whose processes have `limit` bytes together. Skips the test where none can be made."""
    try:
        group = MemoryGroup(_hierarchy() / f"ckpt-test-{uuid.uuid4().hex[:8]}")
        group.make()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        is_second = (group.path / "memory.events").exists()
        names = ("memory.max", "memory.swap.max") if is_second else ("memory.limit_in_bytes",)
        for name in names:
            if (group.path / name).exists():
                (group.path / name).write_text("0" if "swap" in name else str(limit))
        yield group
    finally:
        os.rmdir(group.path)


def _hierarchy() -> Path:
    """Return where groups with limits on memory can be made. OSError if nowhere."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(folder)
        if kind == "cgroup2" and "memory" in Path(folder, "cgroup.subtree_control").read_text().split():
            return Path(folder)
    raise OSError("no hierarchy has the controller of memory")
