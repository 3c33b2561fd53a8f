"""Run commands: in this process for their output, in another process for the memory that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.inspect_ckpt.__main__ import main

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
    """Runs commands in this process. `out` and `err` are the output of the last one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        """Run a command that exits with `code`; return its output."""
        got = self._run(*arguments)
        assert got == code, (got, self.out, self.err)
        assert "\x1b" not in self.out, "no escape codes unless on a terminal"
        return self.out

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        """Run a command; return the JSON document that it prints."""
        return json.loads(self(*arguments, "--json", code=code))

    def refused(self, *arguments: str | Path, code: int = 2) -> str:
        """Run a command that fails; return the one line on stderr."""
        self(*arguments, code=code)
        self._check_one_line()
        return self.err

    def exit_code(self, *arguments: str | Path) -> int:
        """Run a command that may fail or not; return its exit code. If it fails, stderr has one line, else none."""
        code = self._run(*arguments)
        if code:
            self._check_one_line()
        else:
            assert not self.err
        return code

    def _run(self, *arguments: str | Path) -> int:
        code = main([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        return code

    def _check_one_line(self) -> None:
        assert self.err.startswith("inspect_ckpt: "), self.err
        assert self.err.count("\n") == 1, "one line"
        assert "Traceback" not in self.err


def peak_growth(*commands: tuple[str | Path, ...], imports: tuple[str, ...] = ()) -> tuple[int, bool]:
    """Run commands in a process of their own, after `imports`.

    Return by how many bytes the peak of its resident memory grew, and whether it imported torch.
    """
    about = json.dumps([imports, [[str(argument) for argument in arguments] for arguments in commands]])
    command = [sys.executable, "-W", "error", "-c", _MEASURE, about]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=150)
    assert answer.returncode == 0, answer.stderr
    codes, grown, has_torch = json.loads(answer.stdout.splitlines()[-1])
    assert codes == [0] * len(commands), answer.stderr
    return grown, has_torch
