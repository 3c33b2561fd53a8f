"""The code blocks of a page: what they say, and how each kind is executed.

    python     executed, one after the other, in one namespace of names that the page takes for granted; a block whose
               first line is `# NAME.py` is a script for a console block below it
    console    commands after `$ `, below each what it prints; `...` stands for any lines
    bash       a shell script
    json       parsed

Everything runs in a folder of its own, and `/data/` or `/tmp/` in a block is that folder. What a command prints is
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

REPOSITORY = Path(__file__).resolve().parents[2]

# Commands that other tests run, or that change the machine: only the targets of make are looked at here.
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
        """Execute a block. AssertionError or the block's own exception, with the page and line in a note."""
        text = re.sub(r"/(data|tmp)/", f"{self.folder}/", block.text)
        try:
            match block.language:
                case "python":
                    self._run_python(block, text)
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
        """Run a shell script; return what it prints. AssertionError if it fails."""
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
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

    def _run_python(self, block: Block, text: str) -> None:
        script = re.match(r"# (\w+\.py)\n", text)
        if script is None:
            exec(compile(text, str(block), "exec"), self.names)
            self.executed.append(str(block))
        else:
            (self.folder / script[1]).write_text(text)

    def _run_command(self, command: str, printed: str) -> None:
        if re.match(r"make ([\w-]+)", command):
            subprocess.run(["make", "-n", command.split()[1]], cwd=REPOSITORY, check=True, capture_output=True)
        if any(re.search(pattern, command) for pattern in _NOT_RUN):
            return
        found = self.shell(command, may_fail=bool(printed.strip()))
        assert said(printed, found), f"$ {command}\nprints\n{found}\nand not\n{printed}"
        self.executed.append(command)


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return each command of a console block with what the block says it prints."""
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


def said(expected: str, found: str) -> bool:
    """Whether `found` is what the page says, apart from numbers, units and columns; nothing expected is everything."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(_shape(line)) + r"\n" for line in expected.splitlines()
    )
    return (
        not expected.strip() or re.fullmatch(pattern, "".join(f"{_shape(x)}\n" for x in found.splitlines())) is not None
    )


def _shape(line: str) -> str:
    """Return a line without what differs from run to run."""
    line = re.sub(r"\b\d+(\.\d+)? (s|ms|min|h|kB|MB|GB|B|MB/s|GB/s)\b", "#", line)
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())
