"""Run commands of the tool: in this process for what they say, in another for the memory they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.inspect_ckpt.__main__ import main

__all__ = ["Commands", "peak_growth"]

REPOSITORY = Path(__file__).resolve().parents[3]

_MEASURE = """
import json, resource, sys
from importlib import import_module
imports, commands = json.loads(sys.argv[1])
for name in imports:
    import_module(name)
from tools.inspect_ckpt.__main__ import main
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
codes = [main(arguments) for arguments in commands]
print(json.dumps([codes, peak() - before, "torch" in sys.modules]))
"""


class Commands:
    """Runs commands and keeps what they said: `out` and `err`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        got = main([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        assert got == code, (got, self.out, self.err)
        return self.out

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def refused(self, *arguments: str | Path, code: int = 2) -> str:
        """The one line on stderr of a command that fails."""
        self(*arguments, code=code)
        assert self.err.startswith("inspect_ckpt: "), self.err
        assert self.err.count("\n") == 1, "one line"
        assert "Traceback" not in self.err
        return self.err


def peak_growth(*commands: tuple[str | Path, ...], imports: tuple[str, ...] = ()) -> tuple[int, bool]:
    """By how many bytes the peak of the resident memory of a process grows while commands run in it, and whether it has
    imported torch. `imports` are loaded before."""
    about = json.dumps([imports, [[str(argument) for argument in arguments] for arguments in commands]])
    command = [sys.executable, "-W", "error", "-c", _MEASURE, about]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=150)
    assert answer.returncode == 0, answer.stderr
    codes, grown, has_torch = json.loads(answer.stdout.splitlines()[-1])
    assert codes == [0] * len(commands), answer.stderr
    return grown, has_torch
