"""Starts one process per rank and, unlike torchrun, lets the others go on when one dies.

python -m tools.demo.launch --ranks 3 --may-die 1 -- COMMAND ...

Ends with 0 when all ranks have, but for as many as may be killed; else with 1 and a line for each that did not.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys

__all__ = ["port_with_next"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo.launch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--may-die", type=int, default=0, help="so many may be ended by SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = [word for number, word in enumerate(options.command) if number or word != "--"]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_with_next()), "WORLD_SIZE": str(options.ranks)}
    processes = [
        subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.ranks)
    ]
    codes = {rank: process.wait() for rank, process in enumerate(processes)}
    killed = [rank for rank, code in codes.items() if code == -signal.SIGKILL]
    wrong = {rank: code for rank, code in codes.items() if code and rank not in killed[: options.may_die]}
    for rank, code in wrong.items():
        print(f"rank {rank} ended with {code}")
    return 1 if wrong else 0


def port_with_next() -> int:
    """Two free ports in a row; the number of the first."""
    while True:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            second.bind(("127.0.0.1", port + 1))
            return port


if __name__ == "__main__":
    sys.exit(main())
