"""Speed of `inspect_ckpt validate`, beside plain reads of the same files, and of commands on very many tensors."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckpt import Checkpointer
from tools.bench.harness import (
    Row,
    add_disk_option,
    add_size_options,
    at_least,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.limits import ReadLimit, drop_cache
from tools.bench.processes import REPOSITORY
from tools.bench.workload import make_state

_TARGET = 0.8
_JOBS = 8  # what `validate` does unless told otherwise
_TENSORS_OF_STATE = 404
_ONE_NAME = "model/layers.0.3.weight"

COMMANDS = {
    "ls": ("ls",),
    "show": ("show",),
    "validate": ("validate",),
    "validate --quick": ("validate", "--quick"),
    "stats of one tensor": ("stats",),
    "timeline": ("timeline",),
}


class _EveryByte:
    """Full validations of one step of about `total_bytes`; `bytes` and `files` are those of its pack."""

    def __init__(self, total_bytes: float, folder: Path) -> None:
        self._step = _save(folder / "full", make_state(total_bytes))
        self._files = [path for path in self._step.rglob("*") if path.is_file()]
        sizes = [path.stat().st_size for path in self._files if "packs" in path.parts]
        self.bytes, self.files = sum(sizes), len(sizes)
        self._limit = ReadLimit(self._files, _JOBS)
        self._turns: dict[str, Callable[[], float]] = {
            "read": lambda: self._cold(self._limit.measure),
            "validate": lambda: self._cold(self._validate),
            "read_direct": lambda: self._cold(lambda: self._limit.measure(direct=True)),
            "validate_again": lambda: self._cold(self._validate),
            "read_warm": self._limit.measure,
            "validate_warm": self._validate,
            "quick": lambda: self._validate("--quick"),
        }

    def round(self, validate_first: bool) -> dict[str, float]:
        """Return the seconds of all turns, each cold one right after its files were dropped from the page cache."""
        names = ["read", "validate", "read_direct", "validate_again"]
        if validate_first:
            names = ["validate", "read", "validate_again", "read_direct"]
        self._limit.measure()
        seconds = {name: self._turns[name]() for name in names}
        self._limit.measure()  # into the page cache
        return seconds | {name: self._turns[name]() for name in ("read_warm", "validate_warm", "quick")}

    def _cold(self, measure: Callable[[], float]) -> float:
        drop_cache(self._files)
        return measure()

    def _validate(self, *options: str) -> float:
        """Return the seconds that the command reports: without the start of its process."""
        output = _command("validate", str(self._step), "--json", "--jobs", str(_JOBS), *options)
        (checked,) = json.loads(output)["steps"]
        assert checked["whole"], checked["problems"]
        assert options or checked["bytes_read"] == self.bytes
        return float(checked["seconds"])


class _ManyTensors:
    """Commands that only read, on a checkpoint of `count` tensors of 1 KiB."""

    def __init__(self, count: int, folder: Path) -> None:
        self._root = folder / f"many-{count}"
        tensors = {f"layers.{number // 8}.{number % 8}.weight": torch.full((16, 16), 1.0) for number in range(count)}
        _save(self._root, {"model": tensors})

    def round(self) -> dict[str, float]:
        """Return the seconds of each command, the start of Python included."""
        return {name: self._timed(command) for name, command in COMMANDS.items()}

    def _timed(self, command: tuple[str, ...]) -> float:
        names = (_ONE_NAME,) if command[0] == "stats" else ()
        begin = time.perf_counter()
        _command(*command, str(self._root), *names)
        return time.perf_counter() - begin


def _command(*arguments: str) -> bytes:
    """Return what `inspect_ckpt` prints; CalledProcessError if it finds the checkpoint damaged."""
    line = [sys.executable, "-m", "tools.inspect_ckpt", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout


def _save(root: Path, state: object) -> Path:
    """Save `state`, and return the folder of its step."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(state, 1)
    return root / "step_00000001"


def _rows(total_bytes: int, taken: list[dict[str, float]], commands: dict[int, dict[str, list[float]]]) -> list[Row]:
    """Return the speeds of the full validation, and the seconds of the rest."""

    def speeds(*names: str) -> list[float]:
        """Bytes per second, by round; of several turns in a round their mean."""
        return [len(names) * total_bytes / sum(seconds[name] for name in names) for seconds in taken]

    read, direct, both = speeds("read"), speeds("read_direct"), speeds("validate", "validate_again")
    rows = [
        Row("limit: read, page cache cold", read, show=_rate),
        Row("limit: read with O_DIRECT", direct, show=_rate),
        Row("validate, page cache cold", both, read, _TARGET, _rate, at_least=True),
        Row("  the same, to O_DIRECT", both, direct, show=_rate),
        Row("limit: read, page cache warm", speeds("read_warm"), show=_rate),
        Row("validate, page cache warm", speeds("validate_warm"), speeds("read_warm"), show=_rate),
        Row("validate --quick", [seconds["quick"] for seconds in taken]),
    ]
    for count, of_command in commands.items():
        rows += [Row(f"{count} tensors: {name}", seconds) for name, seconds in of_command.items()]
    return rows


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add_size_options(parser, rounds=9)
    help_text = "of the checkpoints of many tensors (default: 5000 10000)"
    parser.add_argument("--tensors", type=at_least(8), nargs="*", default=[5000, 10000], metavar="N", help=help_text)
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure in rounds, and print a table."""
    taken: list[dict[str, float]] = []
    commands: dict[int, dict[str, list[float]]] = {}
    with temporary_folder(options.folder) as folder:
        every_byte = _EveryByte(1e9 * options.gb, folder)
        for counts in rounds(options.rounds):
            seconds = every_byte.round(validate_first=len(taken) % 2 == 1)
            taken += [seconds] if counts else []
        for count in options.tensors:
            many = _ManyTensors(count, folder)
            found = [many.round() for _ in rounds(options.rounds, f"{count} tensors, round")][1:]
            commands[count] = {name: [seconds[name] for seconds in found] for name in COMMANDS}
    rows = _rows(every_byte.bytes, taken, commands)
    title = (
        f"{every_byte.bytes / 1e9:.2f} GB in {every_byte.files} files, {len(taken)} rounds; "
        "ratio: median (min-max) of the rounds, to the limit in the same round"
    )
    print_report(title, rows)
    size = {"bytes": every_byte.bytes, "files": every_byte.files, "tensors": _TENSORS_OF_STATE}
    write_json(options.json, {"rows": rows, **size, "rounds": taken, "commands": commands})
