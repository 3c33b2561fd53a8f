"""The code blocks of a page, and how each kind is executed.

    python     executed one after the other, in one namespace with the names that the page assumes
    console    commands after `$ `, each followed by its output; `...` stands for any number of lines
    bash       a shell script
    json       parsed

A block whose first line is `# NAME.py` or `# NAME.yaml` is written to that file, for a console block below it.

Everything runs in a folder of its own, and `/data/` or `/tmp/` in a block is that folder. The output of a command is
compared with the page word for word, except numbers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.template import quick_python

REPOSITORY = Path(__file__).resolve().parents[2]

# Commands that other tests run, or that change the machine. Of `make`, only that the target exists is checked.
_NOT_RUN = (r"pip install", r"make ", r"\.venv/bin/")


@dataclass(frozen=True)
class Block:
    """A fenced block with a language."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Return all blocks of a page that name a language."""
    text = (REPOSITORY / page).read_text()
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


class Runner:
    """Executes blocks in `folder`, which also holds the repository's examples."""

    def __init__(self, folder: Path, names: dict[str, Any]) -> None:
        self.folder = folder
        self.names = names
        self.executed: list[str] = []
        (folder / "examples").symlink_to(REPOSITORY / "examples")
        (folder / "tools").symlink_to(REPOSITORY / "tools")

    def run(self, block: Block) -> None:
        """Execute a block, or write it to its file. Errors have the page and line in a note."""
        text = re.sub(r"/(data|tmp)/", f"{self.folder}/", block.text)
        if (file := re.match(r"# (\w+\.(?:py|yaml))\n", text)) is not None:
            (self.folder / file[1]).write_text(text)
            return
        try:
            match block.language:
                case "python":
                    exec(compile(text, str(block), "exec"), self.names)
                    self.executed.append(str(block))
                case "console":
                    for command, printed in commands_of(text):
                        self._run_command(command, printed)
                case "bash":
                    self.shell(text)
                case "json":
                    json.loads(text)
                case _:
                    raise AssertionError(f"no way to execute a block of {block.language!r}")
        except BaseException as error:
            error.add_note(f"in the block at {block}")
            raise

    def shell(self, script: str, timeout_s: float = 150.0, may_fail: bool = False) -> str:
        """Run a shell script; return its output. AssertionError if it fails."""
        python = quick_python()
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(python).parent), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHON_EXEC": python,  # of torchrun for its ranks
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "COLUMNS": "120",
        }
        done = subprocess.run(
            ["bash", "-ec", script], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert may_fail or done.returncode == 0, f"{script}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _run_command(self, command: str, printed: str) -> None:
        if re.match(r"make ([\w-]+)", command):
            subprocess.run(["make", "-n", command.split()[1]], cwd=REPOSITORY, check=True, capture_output=True)
        if any(re.search(pattern, command) for pattern in _NOT_RUN):
            return
        found = self.shell(command, may_fail=bool(printed.strip()))
        assert matches(printed, found), f"$ {command}\nprints\n{found}\nand not\n{printed}"
        self.executed.append(command)


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return each command of a console block with its output on the page."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with a command"
    found = []
    for part in parts[1:]:
        command, _, printed = part.partition("\n")
        while command.endswith("\\"):
            more, _, printed = printed.partition("\n")
            command = f"{command}\n{more}"
        found.append((re.sub(r"\s+# .*$", "", command), printed))
    return found


def matches(expected: str, found: str) -> bool:
    """Whether `found` is the output on the page, except numbers and spacing. Empty matches everything."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(_shape(line)) + r"\n" for line in expected.splitlines()
    )
    return (
        not expected.strip() or re.fullmatch(pattern, "".join(f"{_shape(x)}\n" for x in found.splitlines())) is not None
    )


def _shape(line: str) -> str:
    """Return a line without the numbers and spacing that differ between runs."""
    line = re.sub(r"\b\d+(\.\d+)? (s|ms|min|h|kB|MB|GB|B|MB/s|GB/s)\b", "#", line)
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())
