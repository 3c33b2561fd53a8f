"""How a rank starts another Python process that runs the same code, and shares nothing else with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ["child_environment", "start_module"]


def child_environment() -> dict[str, str]:
    """Return the environment of a child that runs the same code: the directory of this package comes first."""
    ours = str(Path(__file__).resolve().parents[1])
    rest = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([ours, rest]) if rest else ours}


def start_module(module: str, *arguments: str, pass_fds: Sequence[int] = (), **pipes: Any) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments...` in a session of its own, in "/". Streams that `pipes` does not name lead
    nowhere."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process: Any = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        start_new_session=True,
        pass_fds=pass_fds,
        cwd="/",
        env=child_environment(),
        **(streams | pipes),
    )
    return cast("subprocess.Popen[bytes]", process)
