"""The rounds of the benchmark of validation: raw reads of the files and validations of the step take turns."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt import Checkpointer
from tools.bench.reading import ReadLimit, drop_cache
from tools.bench.state import make_state

__all__ = ["COMMANDS", "CheckResults", "FullBenchmark", "ManyBenchmark"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_JOBS = 8  # what `validate` does unless told otherwise
_ONE_NAME = "model/layers.0.3.weight"

COMMANDS = {
    "ls": ("ls",),
    "show": ("show",),
    "validate": ("validate",),
    "validate --quick": ("validate", "--quick"),
    "stats of one tensor": ("stats",),
    "timeline": ("timeline",),
}


@dataclass
class CheckResults:
    """Seconds of each round by what took them; bytes and files are those of the chunks.

    `commands` are by number of tensors, then by command: of the whole process, start of Python included.
    """

    bytes: int
    files: int
    tensors: int
    rounds: list[dict[str, float]] = field(default_factory=list)
    commands: dict[int, dict[str, list[float]]] = field(default_factory=dict)


class FullBenchmark:
    """Validates every byte of one step of about `total_bytes`, on the disk of `folder`."""

    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._step = _save(folder / "full", make_state(total_bytes))
        self._files = [path for path in self._step.rglob("*") if path.is_file()]
        chunks = [path for path in self._files if path.name.split(".")[0] == "c"]
        self._limit = ReadLimit(self._files, _JOBS)
        sizes = [path.stat().st_size for path in chunks]
        self.results = CheckResults(sum(sizes), len(sizes), tensors=404)
        self._turns: dict[str, Callable[[], float]] = {
            "read": lambda: self._cold(self._limit.measure),
            "validate": lambda: self._cold(self._validate),
            "read_direct": lambda: self._cold(lambda: self._limit.measure(direct=True)),
            "validate_again": lambda: self._cold(self._validate),
            "read_warm": self._limit.measure,
            "validate_warm": self._validate,
            "quick": lambda: self._validate("--quick"),
        }

    def round(self, count: bool = True) -> None:
        """All turns, each cold one right after its files were dropped; every other round begins with the second."""
        names = ["read", "validate", "read_direct", "validate_again"]
        if len(self.results.rounds) % 2:
            names = ["validate", "read", "validate_again", "read_direct"]
        self._limit.measure()
        seconds = {name: self._turns[name]() for name in names}
        self._limit.measure()  # into the page cache
        seconds |= {name: self._turns[name]() for name in ("read_warm", "validate_warm", "quick")}
        if count:
            self.results.rounds.append(seconds)

    def _cold(self, measure: Callable[[], float]) -> float:
        drop_cache(self._files)
        return measure()

    def _validate(self, *options: str) -> float:
        """Seconds that the command says it took: without the start of its process."""
        output = _command("validate", str(self._step), "--json", "--jobs", str(_JOBS), *options)
        (checked,) = json.loads(output)["steps"]
        assert checked["whole"], checked["problems"]
        assert options or checked["bytes_read"] == self.results.bytes
        return float(checked["seconds"])


class ManyBenchmark:
    """Runs the commands that only read on a checkpoint of `count` tensors of 1 KiB, each an array with one file."""

    def __init__(self, count: int, folder: Path) -> None:
        self._root = folder / f"many-{count}"
        tensors = {f"layers.{number // 8}.{number % 8}.weight": torch.full((16, 16), 1.0) for number in range(count)}
        _save(self._root, {"model": tensors}, pack_below_bytes=0)
        self.seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}

    def round(self, count: bool = True) -> None:
        for name, (command, *options) in COMMANDS.items():
            names = (_ONE_NAME,) if command == "stats" else ()
            begin = time.perf_counter()
            _command(command, *options, str(self._root), *names)
            if count:
                self.seconds[name].append(time.perf_counter() - begin)


def _command(*arguments: str) -> bytes:
    """What `inspect_ckpt` prints; CalledProcessError if it does not find the checkpoint whole."""
    line = [sys.executable, "-m", "tools.inspect_ckpt", *arguments]
    return subprocess.run(line, cwd=_REPOSITORY, stdout=subprocess.PIPE, check=True).stdout


def _save(root: Path, state: object, **options: Any) -> Path:
    """The durable step of `state` in `root`."""
    root = root.resolve()
    with Checkpointer(root, **options) as checkpointer:
        checkpointer.save(state, 1)
    return root / "step_00000001"
