"""One rank, forked from the nursery: run a program, and record how it ended and what it left in this process."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import tests.inprocess.faults.long_programs
import tests.inprocess.faults.program  # noqa: F401 - here, they are imported before the first fork
from tests.inprocess.faults.events import Journal

_SETTLE_S = 3.0


def live(program: str, arguments: Sequence[Any], env: Mapping[str, str], folder: Path) -> int:
    """Call `program` ("module:function") with the arguments and a journal; the last event says how it ended.

    Returns the exit code: 0 also if the program raised, which then is in the journal.
    """
    os.environ.update(env)
    process = int(env["RANK"])
    redirect(folder / f"{process}.output", "%(relativeCreated)d %(levelname)s %(threadName)s %(name)s %(message)s")
    journal = Journal(folder, process)
    module, _, name = program.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # the first one creates two permanent pipes
    before = _holdings()
    details: dict[str, Any]
    try:
        value = function(*arguments, journal)
    except BaseException as error:
        logging.getLogger("rank").exception("the program ends")
        name, details = "raised", {"type": type(error).__name__, "text": str(error)}
    else:
        name, details = "returned", {"value": value}
    journal.note(name, None, **details, left=_left(before))  # the exception does not exist any more
    return 0


def redirect(output: Path, log_format: str) -> None:
    """Write both standard streams, the log, and the stacks of a crash to a file."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable()
    logging.basicConfig(level=logging.DEBUG, format=log_format)


def _holdings() -> dict[str, str]:
    """File descriptors and threads, those of C++ code as well."""
    gc.collect()
    found = {f"thread {thread.name}": "" for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        try:
            found[f"task {task}"] = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.endswith("/fd"):  # the descriptor of this listing
            found[f"fd {fd}"] = target
    return found


def _left(before: Mapping[str, str]) -> list[str]:
    """Return what is new, once that no longer decreases: threads and processes need a moment to end."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        left = [f"{key} {value}" for key, value in _holdings().items() if before.get(key) != value]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
