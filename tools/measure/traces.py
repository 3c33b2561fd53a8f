"""The functions of both libraries that a save and a restore pass, in this process. A program: prints JSON.

    python tools/measure/traces.py TREE     with TREE in PYTHONPATH

It is the program of a process of its own, and imports nothing of its folder, so that it can trace older trees, too.
Counted are functions of `ckpt` and `inprocess` that the calling thread, or a thread that it starts, enters at least
once. The work of the writer process is the same code, run in this process by `AsyncRequest.execute_sync`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_WARM_SAVES = 4  # afterwards all slots have been used, and lazy imports are done
_RESTORES = 4  # the smallest one counts: others may collect garbage, or find processes that have not ended yet


class Trace:
    """The functions that were entered while it was on."""

    def __init__(self, tree: Path) -> None:
        self._folders = tuple(f"{tree / package}/" for package in ("ckpt", "inprocess"))
        self._codes: set[CodeType] = set()
        self._is_on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._is_on = True
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._is_on = False  # threads that were started meanwhile still have the function

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._is_on:
            self._codes.add(frame.f_code)

    def figures(self) -> dict[str, int]:
        """Return the number of functions and of their files."""
        # A comprehension or a lambda is part of its function, and the body of a module is none.
        own = {code for code in self._codes if code.co_filename.startswith(self._folders) and code.co_name[0] != "<"}
        return {"functions": len(own), "files": len({code.co_filename for code in own})}


def measure(tree: Path, folder: str) -> dict[str, dict[str, int]]:
    """Return the figures of one steady save and restore of eight small parameters below `folder`."""
    import torch

    from ckpt import Checkpointer

    def state() -> dict[str, Any]:
        return {"model": {f"parameter_{number}": torch.ones(64) for number in range(8)}}

    staged, whole = Trace(tree), Trace(tree)
    restores = [Trace(tree) for _ in range(_RESTORES)]
    root = f"{folder}/root"
    with Checkpointer(root) as checkpointer:
        for step in range(_WARM_SAVES):
            checkpointer.save(state(), step)
        checkpointer.save_request(state(), _WARM_SAVES).execute_sync()
        with staged():
            checkpointer.async_save(state(), _WARM_SAVES + 1)
        checkpointer.maybe_finalize(blocking=True)
        with whole():
            checkpointer.save(state(), _WARM_SAVES + 2)
            checkpointer.save_request(state(), _WARM_SAVES + 3).execute_sync()
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state())
    for restored in restores:
        with Checkpointer(root) as checkpointer, restored():
            checkpointer.restore(state())
    restore = min((trace.figures() for trace in restores), key=lambda figures: figures["functions"])
    return {"async_save": staged.figures(), "whole save": whole.figures(), "restore": restore}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="measure-") as name:
        found = measure(Path(sys.argv[1]).resolve(), name)
    print(json.dumps(found))
