"""This tree beside another checkout of this code, in turns, to show that a change is no slower.

Each turn is a new process with one of the trees first in its path (`tree_turn`), in alternating order, on one rank and
on two that share the state. A ratio is that of this tree to the other one in the same turn. The other tree needs its
compiled library, `ckpt/native/*.so`: where it has none, the one of this tree is used if their sources are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tools.bench.harness import (
    Row,
    add_disk_option,
    at_least,
    milliseconds,
    print_report,
    rounds,
    temporary_folder,
    write_json,
)
from tools.bench.processes import REPOSITORY

_WORLDS = (1, 2)
_TARGET = 1.03
_TIMEOUT_S = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    parser.add_argument("--other", type=Path, required=True, metavar="TREE", help="the other checkout")
    help_text = "turns that count, after one that does not (default: 9)"
    parser.add_argument("--rounds", type=at_least(1), default=9, metavar="N", help=help_text)
    add_disk_option(parser)


def run(options: argparse.Namespace) -> None:
    """Measure in turns, and print a table."""
    other = options.other.resolve()
    if not (other / "ckpt" / "__init__.py").is_file():
        raise SystemExit(f"--other: {other} has no package ckpt; name a checkout, such as one by git worktree")
    _lend_library(other)
    figures: dict[tuple[int, str], dict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
    with temporary_folder(options.folder) as folder:
        for number, counts in enumerate(rounds(options.rounds)):
            trees = (REPOSITORY, other) if number % 2 else (other, REPOSITORY)
            for world_size in _WORLDS:
                for tree in trees:
                    found = _turn(tree, world_size, folder)
                    for name, value in found.items() if counts else ():
                        figures[world_size, name][tree].append(value)
    rows = [
        Row(
            f"{world_size} rank{'s' * (world_size > 1)}, {name}",
            by_tree[REPOSITORY],
            by_tree[other],
            _TARGET,
            _show(name),
        )
        for (world_size, name), by_tree in figures.items()
    ]
    print_report(f"this tree, {options.rounds} turns; ratio: to {other} in the same turn, median (min-max)", rows)
    write_json(options.json, {"rows": rows, "other": str(other)})


def _turn(tree: Path, world_size: int, folder: Path) -> dict[str, float]:
    """Return the figures of one tree, from a process of its own."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    place = folder / "turn"
    place.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("tree_turn.py")), str(place), str(world_size)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S
    )
    shutil.rmtree(place)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _lend_library(other: Path) -> None:
    """Copy the compiled libraries of this tree to one that has none; SystemExit if its sources differ."""
    for own in (*REPOSITORY.glob("ckpt/native/*.so"), *REPOSITORY.glob("inprocess/unblock/*.so")):
        theirs = other / own.relative_to(REPOSITORY)
        if theirs.exists() or not theirs.parent.is_dir():
            continue
        for source in own.parent.glob("*.[ch]"):
            if (theirs.parent / source.name).read_bytes() != source.read_bytes():
                raise SystemExit(f"--other: build {theirs} first; its source {source.name} is not that of this tree")
        shutil.copy2(own, theirs)


def _show(name: str) -> Callable[[float], str]:
    return _mebibytes if "memory of" in name else lambda seconds: milliseconds(seconds, 1)


def _mebibytes(value: float) -> str:
    return f"{value:.1f} MiB"
