"""The launcher of a node of a fleet, forked from the nursery as a rank is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from inprocess.fault_tolerance.launcher import command
from tests.inprocess.nodes.journal import Journal

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch(journal: Journal, arguments: Sequence[str]) -> None:
    """Run `ckpt_launcher` with these arguments in this process; SystemExit with its exit code if that is not 0."""
    for name in _OF_RANKS:  # a launcher is no rank
        os.environ.pop(name, None)
    os.environ["FLEET_LAUNCHER"] = str(os.getpid())
    sys.path[:0] = [place for place in os.environ.get("PYTHONPATH", "").split(":") if place not in sys.path]
    code = command.run(arguments)
    if code != 0:
        raise SystemExit(code)
