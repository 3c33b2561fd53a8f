"""`validate`: check that a step, or every published step of a root, is whole."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.storage.commit import CheckpointRoot
from ckpt.validation import Problem, Report
from ckpt.validation import validate as validate_step

from .output import CannotReadError, Exit, Output, duration, plural, size
from .root import steps_of
from .step import protected, step_path

__all__ = ["HELP", "add_arguments", "problem_line", "run"]

HELP = "check that a step, or every step of a root, is whole"

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH_OR_ROOT", help="a step, or a checkpoint root: then all its steps")
    parser.add_argument("--quick", action="store_true", help="check metadata, names and sizes only")
    parser.add_argument("--jobs", type=_positive, default=8, metavar="N", help="files to read at once (default 8)")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    path = arguments.path
    newest = step_path(path)
    is_root = newest != path
    paths = [CheckpointRoot(path).step_path(step) for step in steps_of(path)] if is_root else [path]
    checks = [_check_one_of_many(where, arguments, output) for where in paths] if is_root else []
    checks = checks or [_check(path, arguments, output)]
    whole = [check.report.step for check in checks if check.whole]
    if is_root:
        found = f"newest whole step: {whole[-1]}" if whole else "no step is whole"
        output.line(found, "bold" if whole else "bold red")
    document: dict[str, Any] = {"path": path, "quick": arguments.quick, "steps": [check.document() for check in checks]}
    output.json({**document, "whole": len(whole) == len(checks), "newest_whole": whole[-1] if whole else None})
    if any(check.error is None and not check.whole for check in checks):
        return Exit.DAMAGED
    return Exit.WHOLE if len(whole) == len(checks) else Exit.CANNOT_READ


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


def _check_one_of_many(path: str, arguments: argparse.Namespace, output: Output) -> _Check:
    """Check a step of a root. An error becomes a result, so that the other steps are checked, too."""
    begin = time.perf_counter()
    try:
        return _check(path, arguments, output)
    except (CheckpointError, CannotReadError) as error:
        output.line(f"{os.path.basename(path)}: cannot be checked: {error}", "bold red")
        return _Check(Report(path), time.perf_counter() - begin, str(error))


def _check(path: str, arguments: argparse.Namespace, output: Output) -> _Check:
    begin = time.perf_counter()
    with protected(path), output.meter(os.path.basename(os.path.abspath(path))) as meter:
        report = validate_step(path, quick=arguments.quick, jobs=arguments.jobs, progress=meter)
    seconds = time.perf_counter() - begin
    name = os.path.basename(os.path.abspath(path))
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
