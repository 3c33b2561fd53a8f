"""Memory of this process and all it has started, with what is shared counted once."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Memory", "measure_memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes. `total` is of all processes together, shared pages counted once. `background` has the resident bytes of
    each process but this one, without shared memory: the server process and the writers."""

    total: int
    background: list[int]


def measure_memory() -> Memory:
    me = psutil.Process()
    total, background = 0, []
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            total += _sizes(process.pid, "smaps_rollup")["Pss"]  # a page of n processes counts 1/n in each
            if process.pid != me.pid:
                resident = _sizes(process.pid, "status")
                background.append(resident["RssAnon"] + resident["RssFile"])
    return Memory(total, background)


def _sizes(pid: int, name: str) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}
