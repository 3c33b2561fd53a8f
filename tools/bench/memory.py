"""Memory of a process tree, with what is shared counted once."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Memory", "measure_memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes. `total` is of all processes, shared pages once; `background` of all but this one, without shared memory;
    `writers` are the processes behind that, `largest` the largest of them."""

    total: int
    background: int
    largest: int
    writers: int


def measure_memory() -> Memory:
    """This process and all it has started: the server process and the writers."""
    total = background = largest = count = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            sizes = _proportional(process.pid)
            total += sizes["Pss"]
            if process.pid != me.pid:
                resident = process.memory_info()
                private = resident.rss - resident.shared_memory if False else sizes["Pss_Anon"] + sizes["Pss_File"]
                background += private
                largest = max(largest, private)
                count += 1
    return Memory(total, background, largest, max(0, count - 1))


def _proportional(pid: int) -> dict[str, int]:
    """The sizes of /proc/<pid>/smaps_rollup, where a page of n processes counts 1/n in each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in map(str.split, lines)}
