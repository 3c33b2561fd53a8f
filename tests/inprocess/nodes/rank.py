"""One rank, forked from the nursery: move to its node, run a program, and end with the exit code of a script."""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed  # noqa: F401 - here, it is imported before the first fork

import ckpt.restart  # noqa: F401
import inprocess  # noqa: F401
import tests.inprocess.nodes.fleet_launcher
import tests.inprocess.nodes.program
import tests.inprocess.nodes.replicas_program  # noqa: F401
from tests.inprocess.faults.rank import redirect
from tests.inprocess.nodes.journal import Journal
from tests.inprocess.nodes.place import Place

PLACE = "LAB_RANK_PLACE"  # a name by which ranks may differ: see `coordination.claims`


def live(program: str, arguments: Sequence[Any], env: Mapping[str, str], folder: Path) -> int:
    """Call `program` ("module:function") on the node of `env`, with a journal and the arguments.

    The last line of the journal is "done", or says with which exception it left; then the exit code is that of the
    SystemExit, or 1.
    """
    os.environ.update(env)
    process = int(env["RANK"])
    redirect(folder / f"{process}.output", "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s")
    Place(**json.loads(env[PLACE])).enter()
    journal = Journal(folder, process)
    module, _, name = program.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    try:
        function(journal, *arguments)
    except BaseException as error:
        traceback.print_exc()
        journal.note(f"left {type(error).__name__}")
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    journal.note("done")
    return 0
