"""Forks ranks from one process that has imported torch and initialised nothing: an import takes more than a second.

    tests                                     nursery (own process)             rank
    Nursery.spawn  -- one line of JSON -->    fork  ----------------------->    rank.live, or another entry
                   <- pid ------------
    Nursery.reap   -- pid ------------->      waitpid
                   <- status ---------

Ranks die with the nursery, which ends when the tests close their end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tests.support.template import quick_python

_REPOSITORY = Path(__file__).resolve().parents[3]
_PR_SET_PDEATHSIG = 1


class Nursery:
    """The nursery, as the tests use it. Any thread.

    `entry` is the function that a rank calls, with the arguments of `rank.live`; its module is imported before the
    first fork.
    """

    def __init__(self, entry: str = "tests.inprocess.faults.rank:live") -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [quick_python(), "-m", "tests.inprocess.faults.nursery", entry],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )

    def spawn(self, program: str, arguments: Sequence[Any], env: Mapping[str, str], folder: Path) -> int:
        """Start a rank; see `rank.live`. Returns its pid."""
        order = {"program": program, "arguments": list(arguments), "env": dict(env), "folder": str(folder)}
        return int(self._ask(order))

    def reap(self, pid: int) -> int:
        """Return the exit code of a rank that has ended, or minus the signal."""
        return os.waitstatus_to_exitcode(int(self._ask({"reap": pid})))

    def close(self) -> None:
        """End the nursery and all ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, order: Mapping[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the nursery has ended"
        return answer


def main(entry: str, orders: TextIO, answers: TextIO) -> None:
    """Fork and reap as ordered."""
    import torch.distributed  # noqa: F401

    import inprocess.store
    import inprocess.wrap  # noqa: F401

    module, _, name = entry.partition(":")
    live: Callable[..., int] = getattr(importlib.import_module(module), name)
    # A collection in a rank would otherwise look at, and so copy, every object of torch.
    gc.collect()
    gc.freeze()
    for line in orders:
        order = json.loads(line)
        if "reap" in order:
            print(os.waitpid(order["reap"], 0)[1], file=answers, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become_rank(live, order)
        print(pid, file=answers, flush=True)


def _become_rank(live: Callable[..., int], order: Mapping[str, Any]) -> None:
    """Run a rank in the forked child; never return into the code of the nursery."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
        code = live(order["program"], order["arguments"], order["env"], Path(order["folder"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin, sys.stdout)
