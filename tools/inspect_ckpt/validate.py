"""`validate`: check that a step, or every published step of a root, is whole."""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.storage.names import step_name
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import is_object_url, open_root
from ckpt.storage.step_source import StepSource
from ckpt.validation import Problem, Report
from ckpt.validation import validate as validate_step

from .output import CannotReadError, Exit, Output, duration, plural, size
from .root import steps_of
from .step import add_step, at_step, held_objects, protected, step_path

HELP = "check that a step, or every step of a root, is whole"

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH_OR_ROOT", help="a step, or a checkpoint root: then all its steps")
    add_step(parser, repeated=True)
    parser.add_argument("--quick", action="store_true", help="check metadata, names and sizes only")
    parser.add_argument("--jobs", type=_positive, default=8, metavar="N", help="files to read at once (default 8)")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    path = arguments.path
    if arguments.step:
        targets = [target for step in arguments.step for target in _targets(at_step(path, step))[0]]
        is_root = len(targets) > 1
    else:
        targets, is_root = _targets(path)
    checks = [_check_one_of_many(target, arguments, output) for target in targets] if is_root else []
    checks = checks or [_check(targets[0], arguments, output)]
    whole = [check.report.step for check in checks if check.whole]
    if is_root:
        found = f"newest whole step: {whole[-1]}" if whole else "no step is whole"
        output.line(found, "bold" if whole else "bold red")
    document: dict[str, Any] = {"path": path, "quick": arguments.quick, "steps": [check.document() for check in checks]}
    output.json({**document, "whole": len(whole) == len(checks), "newest_whole": whole[-1] if whole else None})
    if any(check.error is None and not check.whole for check in checks):
        return Exit.DAMAGED
    return Exit.WHOLE if len(whole) == len(checks) else Exit.CANNOT_READ


@dataclass(frozen=True)
class _Target:
    """A step to check. `hold` keeps it from being removed, and gives what is to be validated."""

    name: str
    path: str
    hold: Callable[[], AbstractContextManager[str | StepSource]]


def _targets(path: str) -> tuple[list[_Target], bool]:
    """Return what is to be checked, and whether `path` is a root."""
    if is_object_url(path):
        steps = open_root(path).steps()
        found = [_Target(step_name(step), path, functools.partial(held_objects, path, step)) for step in steps]
        return found or [_Target(path, path, functools.partial(held_objects, path))], bool(steps)
    is_root = step_path(path) != path
    paths = [CheckpointRoot(path).step_path(step) for step in steps_of(CheckpointRoot(path))] if is_root else [path]
    return [
        _Target(os.path.basename(os.path.abspath(each)), each, _directory(each)) for each in paths or [path]
    ], is_root


def _directory(path: str) -> Callable[[], AbstractContextManager[str]]:
    @contextmanager
    def hold() -> Iterator[str]:
        with protected(path):
            yield path

    return hold


def problem_line(problem: Problem) -> str:
    """Format a problem: where it is, which rank wrote it, and what is wrong."""
    about = []
    if problem.tensor is not None:
        about.append(f"tensor {problem.tensor}")
    if problem.chunk is not None:
        about.append(f"chunk {problem.chunk}")
    if problem.rank is not None:
        about.append(f"written by rank {problem.rank}")
    where = " ".join(filter(None, (problem.file, f"({', '.join(about)})" if about else "")))
    return f"{where}: {problem.message}" if where else problem.message


@dataclass(frozen=True)
class _Check:
    """The result of checking one step. `error` says why it could not be checked, if so."""

    report: Report
    seconds: float
    error: str | None = None

    @property
    def whole(self) -> bool:
        return self.error is None and self.report.whole

    def document(self) -> dict[str, Any]:
        report = self.report
        problems = [
            {
                "file": problem.file,
                "tensor": problem.tensor,
                "chunk": problem.chunk,
                "rank": problem.rank,
                "message": problem.message,
                "fatal": problem.fatal,
            }
            for problem in report.problems
        ]
        return {
            "path": report.path,
            "step": report.step,
            "whole": self.whole,
            "restorable": self.error is None and report.restorable,
            "error": self.error,
            "files": report.files,
            "bytes_read": report.bytes_read,
            "seconds": round(self.seconds, 4),
            "problems": problems,
        }


def _check_one_of_many(target: _Target, arguments: argparse.Namespace, output: Output) -> _Check:
    """Check a step of a root. An error becomes a result, so that the other steps are checked, too."""
    begin = time.perf_counter()
    try:
        return _check(target, arguments, output)
    except (CheckpointError, CannotReadError) as error:
        output.line(f"{target.name}: cannot be checked: {error}", "bold red")
        return _Check(Report(target.path), time.perf_counter() - begin, str(error))


def _check(target: _Target, arguments: argparse.Namespace, output: Output) -> _Check:
    begin = time.perf_counter()
    name = target.name
    with target.hold() as step, output.meter(name) as meter:
        report = validate_step(step, quick=arguments.quick, jobs=arguments.jobs, progress=meter)
    seconds = time.perf_counter() - begin
    what = f"{plural(report.files, 'file')}, metadata only" if arguments.quick else plural(report.files, "file")
    if not arguments.quick:
        what += f", {size(report.bytes_read)} read at {size(report.bytes_read / max(seconds, 1e-9))}/s"
    if report.whole:
        output.line(f"{name}: whole ({what}, {duration(seconds)})", "green")
        return _Check(report, seconds)
    restorable = "; all tensors can still be restored" if report.restorable else ""
    output.line(f"{name}: DAMAGED, {plural(len(report.problems), 'problem')}{restorable}", "bold red")
    for problem in report.problems[:_SHOWN]:
        output.line(f"  {problem_line(problem)}")
    if len(report.problems) > _SHOWN:
        output.line(f"  and {len(report.problems) - _SHOWN} more (--json lists all)")
    return _Check(report, seconds)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
