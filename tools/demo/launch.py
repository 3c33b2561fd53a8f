"""Start one process per rank and, unlike torchrun, let the others go on when one dies.

    python -m tools.demo.launch --ranks 3 --may-die 1 -- COMMAND ...

The exit code is that of all ranks, but for as many as may be killed. If they differ it is 1. Unless it is 0, a line
names each rank and its code.
"""

import argparse
import os
import signal
import subprocess
import sys

from tools.bench.processes import free_port


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo.launch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--may-die", type=int, default=0, help="how many may be ended by SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = [word for number, word in enumerate(options.command) if number or word != "--"]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(options.ranks)}
    processes = [
        subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.ranks)
    ]
    codes = {rank: process.wait() for rank, process in enumerate(processes)}
    killed = [rank for rank, code in codes.items() if code == -signal.SIGKILL]
    others = {rank: code for rank, code in codes.items() if rank not in killed[: options.may_die]}
    for rank, code in others.items():
        if code:
            print(f"rank {rank} ended with {code}")
    return others.popitem()[1] if len(set(others.values())) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
