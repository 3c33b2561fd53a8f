"""A process with memory that is kept after its death; it does what it reads, and answers each line.

    trainer.py NAME LINGER_S [BASE ...]

NAME is that of the job. The memory of earlier processes at the addresses BASE is given up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from ckpt.keeper.lingering import LingeringMemory
from ckpt.keeper.messages import MemoryRecord
from ckpt.keeper.takeover import Job, KeeperAddress, Taken
from ckpt.keeper.trainer_side import Keeper
from inprocess.ipc.deadline import Deadline
from inprocess.ipc.shared_memory import SharedMemory

SIZE = 1 << 16
_PR_SET_PDEATHSIG = 1
RECORD = MemoryRecord(7, None, 3, [[0, 5], [2, 4]])


def main(name: str, linger_s: float, *bases: str) -> None:
    """Keep one region, and another one with each "hold"."""
    keeper = Keeper()
    lingering = LingeringMemory(keeper, Job(name, "/root", "a node"), linger_s)
    regions: list[SharedMemory] = []
    taken = [Taken(KeeperAddress(base), RECORD, ()) for base in bases]

    def hold() -> None:
        region = SharedMemory.create(f"ckpt-slot-{len(regions)}", SIZE)
        region.buffer[:4] = len(regions).to_bytes(4, "little")
        regions.append(region)

    hold()
    lingering.settle(1, RECORD, regions, taken)
    print(keeper.pid, flush=True)
    for line in sys.stdin:
        match line.strip():
            case "hold":
                hold()
                lingering.hold(regions)
            case "drop":
                regions.pop(0).close()
                lingering.hold(regions)
            case "fork":
                if os.fork() == 0:
                    sys.stdin.read()
                    os._exit(0)
            case "fork in foreign code":
                libc = ctypes.PyDLL(None)  # Python notices nothing of it
                if libc.fork() == 0:
                    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    libc.pause()
            case "leave":
                lingering.leave()
                keeper.release()
            case "drop the keeper":
                keeper.release()
            case "close":
                lingering.close()
                keeper.close(Deadline(30.0))
        print(keeper.pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
