"""What the programs share: a journal for each process, and the faults that a test has planned.

The training functions know nothing of restarts. How often they were called is counted here.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import inprocess

PROCESS = int(os.environ.get("RANK", "0"))  # at the start of the job
_FOLDER = Path(os.environ.get("TEST_FOLDER", "."))
_calls = -1


def note(event: str, **values: Any) -> None:
    """Append a line to the journal of this process."""
    line = json.dumps({"event": event, "pid": os.getpid(), "call": _calls, **values}) + "\n"
    with open(_FOLDER / f"journal_{PROCESS}.jsonl", "a") as file:
        file.write(line)


def begin(**values: Any) -> None:
    """The training function is called, from the caller of this function.

    TEST_FAULT_AT holds `process:seconds:kind`: a fault so long after the first call.
    """
    global _calls
    _calls += 1
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    note("begin", **{name: os.environ.get(name) for name in names}, **values)
    process, _, planned = os.environ.get("TEST_FAULT_AT", "").partition(":")
    if _calls == 0 and process == str(PROCESS) and _is_first(planned):
        seconds, kind = planned.split(":")
        strike_at(float(seconds), kind)


def strike(step: int) -> None:
    """The fault that is planned for this process, this call of the function and this step, if there is one.

    TEST_FAULTS holds `call:process:step:kind`, separated by blanks.
    """
    for fault in os.environ.get("TEST_FAULTS", "").split():
        *place, kind = fault.split(":")
        if place != [str(_calls), str(PROCESS), str(step)] or not _is_first(fault):
            continue
        note("fault", kind=kind)
        if kind == "exception":
            raise ValueError("a planned fault")
        if kind == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first(fault: str) -> bool:
    """Return whether no process had this fault before.

    The replacement of a process that died of it has the same number, and a call 0, too.
    """
    try:
        (_FOLDER / f"struck_{fault.replace(':', '_')}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def strike_at(seconds: float, kind: str) -> None:
    """Let this process fail after so many seconds, at the line it executes then, if the training function still runs.

    Imports are left to end: one that the program itself breaks off cannot always be done again.
    """

    def fails(number: int, frame: FrameType | None) -> None:
        codes = [each.f_code for each, _ in traceback.walk_stack(frame)]
        if "train" not in {code.co_name for code in codes if code.co_filename.endswith(".md")}:
            return
        if any(code.co_filename.startswith("<frozen importlib") for code in codes):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            return
        note("fault", kind=kind)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a planned fault")

    signal.signal(signal.SIGALRM, fails)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A checksum over all bytes of the tensors, in the order of their names."""
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        checksum.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return checksum.hexdigest()


def run(train: Callable[[], str]) -> None:
    """Call `train` in the wrapper, and write down what it returns."""
    wrapper = inprocess.Wrapper(
        soft_timeout=timedelta(seconds=4),
        hard_timeout=timedelta(seconds=25),
        heartbeat_timeout=timedelta(seconds=15),
        barrier_timeout=timedelta(seconds=40),
        progress_watchdog_interval=timedelta(milliseconds=200),
        monitor_thread_interval=timedelta(milliseconds=200),
        monitor_process_interval=timedelta(milliseconds=200),
        monitor_process_logfile=str(_FOLDER.absolute() / "monitor_{rank}.log"),
    )
    note("done", weights=wrapper(train)())
