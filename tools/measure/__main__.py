"""Print the figures by which the size of this code is judged: counts of the sources, traces of a save, processes.

    python -m tools.measure [TREE] [--trace] [--processes] [--json]

TREE is a checkout, by default this one; nothing of it is imported, so an older one can be compared. With `--trace` a
process runs a save and a restore with the code of TREE, and counts the functions that they pass; with `--processes` two
ranks run with everything on, and the processes beside each are counted. Both need torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.measure import sources
from tools.measure.sources import Module

REPOSITORY = Path(__file__).resolve().parents[2]
_TRACE_LIMIT_S = 120


@dataclass(frozen=True)
class Figure:
    """One line: a name, its value, what is wanted (empty: nothing), and the items that were counted, if few."""

    name: str
    value: int | float | None
    wanted: str = ""
    items: tuple[str, ...] = ()


def figures(tree: Path) -> list[Figure]:
    """Return the figures of a tree, from its sources, without running them."""
    ckpt, inprocess = (sources.modules_of(tree, package) for package in ("ckpt", "inprocess"))
    tests = sources.modules_of(tree, "tests")
    operations, backends = sources.store_files(ckpt)
    adapters = sources.adapter_imports(ckpt)
    words = sources.words_of_architecture(tree)
    messages = {module.path.as_posix(): len(sources.message_classes(module)) for module in ckpt}
    names = sources.public_methods(ckpt, "Checkpointer")
    modules, classes = sources.repeated_modules(ckpt + inprocess), sources.repeated_classes(ckpt + inprocess)
    long = sources.long_files(ckpt + inprocess)
    return [
        *_size("ckpt", ckpt, ("33000", "175", "420")),
        *_size("inprocess", inprocess, ("", "", "")),
        Figure("abstract methods of ckpt", sum(len(sources.abstract_methods(module)) for module in ckpt), "40"),
        Figure("message classes of ckpt", sum(messages.values()), "25", _counts(messages)),
        Figure("arguments of Checkpointer", _arguments(ckpt), "14"),
        Figure("public names of a Checkpointer", len(names), "", tuple(names)),
        Figure("operations of a store", len(operations) or None, "10", tuple(operations)),
        Figure("lines of the longest backend", max(backends.values(), default=None), "450", _counts(backends)),
        Figure("files above 450 lines, ckpt and inprocess", len(long), "0", _counts(long)),
        Figure("files above 450 lines, tests", len(sources.long_files(tests))),
        Figure("adapters with internal imports", len(adapters), "0", _counts({k: len(v) for k, v in adapters.items()})),
        Figure("words in architecture.md", len(words), "30"),
        Figure("module names of several modules", len(modules), "0", tuple(sorted(modules))),
        Figure("class names of several classes", len(classes), "0", tuple(sorted(classes))),
        *_density("ckpt", ckpt),
        *_density("inprocess", inprocess),
        Figure("lines of tests", sum(module.lines for module in tests), "48000"),
    ]


def traces(tree: Path) -> list[Figure]:
    """Return the functions and files that a save and a restore pass. RuntimeError if they failed."""
    found: dict[str, dict[str, int]] = _run("traces.py", tree, "the traced save")
    wanted = {"async_save": (100, 22), "whole save": (260, 38), "restore": (300, 40)}
    return [
        Figure(f"{what} of {call}", found[call][what], str(most))
        for call, limits in wanted.items()
        for what, most in zip(("functions", "files"), limits, strict=True)
    ]


def processes(tree: Path) -> list[Figure]:
    """Return the processes beside a trainer with everything on. RuntimeError if its job failed."""
    helpers: list[tuple[str, bool, float]] = _run("helpers.py", tree, "the job of two ranks")
    named = {f"{name}{' (exec)' if is_exec else ''}": memory for name, is_exec, memory in helpers}
    started = {name for name, is_exec, _ in helpers if is_exec}
    return [
        Figure("kinds of process started by exec", len(started), "1"),
        Figure("helpers per rank", len(helpers), "4"),
        Figure(
            "private memory of the helpers in MiB",
            round(sum(memory for _, _, memory in helpers)),
            "45",
            tuple(f"{name} {memory:.0f}" for name, memory in named.items()),
        ),
    ]


def _run(program: str, tree: Path, what: str) -> Any:
    """Run a program of this folder with the code of a tree; return what it prints. RuntimeError if it fails."""
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name(program)), str(tree)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TRACE_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{what} failed with exit code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _size(package: str, modules: list[Module], wanted: tuple[str, str, str]) -> list[Figure]:
    values = (sum(m.lines for m in modules), len(modules), sum(len(m.classes) for m in modules))
    return [
        Figure(f"{what} of {package}", value, most)
        for what, value, most in zip(("lines", "files", "classes"), values, wanted, strict=True)
    ]


def _density(package: str, modules: list[Module]) -> list[Figure]:
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for module in modules for f in module.functions]
    words, code = (sum(column) for column in zip(*(module.prose_and_code() for module in modules), strict=True))
    return [
        Figure(f"median lines of a function of {package}", statistics.median(lengths) if lengths else None),
        Figure(f"words of prose per line of code of {package}", round(words / code, 2) if code else None),
    ]


def _arguments(modules: list[Module]) -> int | None:
    found = sources.method(modules, "Checkpointer", "__init__")
    if found is None:
        return None
    return len(found.args.posonlyargs + found.args.args + found.args.kwonlyargs) - 1  # without `self`


def _counts(counted: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"{name} {count}" for name, count in sorted(counted.items()) if count)


def _table(rows: list[Figure]) -> str:
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}}  {'now':>8}  {'wanted':>8}"]
    for row in rows:
        value = "-" if row.value is None else f"{row.value:,}"
        lines.append(f"{row.name:{width}}  {value:>8}  {f'<= {int(row.wanted):,}' if row.wanted else '':>8}".rstrip())
        lines += [f"    {', '.join(row.items)}"] if 0 < len(row.items) <= 16 else []
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", nargs="?", type=Path, default=REPOSITORY, help="a checkout (default: this one)")
    parser.add_argument("--trace", action="store_true", help="also run a save and a restore, and count their functions")
    parser.add_argument("--processes", action="store_true", help="also run two ranks, and count their processes")
    parser.add_argument("--json", action="store_true", help="print a list of objects, with all items")
    options = parser.parse_args(arguments)
    tree = options.tree.resolve()
    if not (tree / "ckpt" / "__init__.py").is_file():
        parser.error(f"{tree} is no checkout of this repository: it has no ckpt/__init__.py")
    rows = [*figures(tree), *(traces(tree) if options.trace else []), *(processes(tree) if options.processes else [])]
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else _table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
