"""`unpin`: let the policy of the job decide about pinned steps again."""

from __future__ import annotations

import argparse

from .output import CannotReadError, Exit, Output, first_few, plural
from .root import any_root, confirmed

HELP = "let the job remove pinned steps again, as its policy says"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("steps", metavar="STEP", nargs="+", type=int, help="the number of a pinned step")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    steps = list(dict.fromkeys(arguments.steps))
    pinned = root.pinned_steps()
    for step in steps:
        if step not in pinned:
            known = first_few([str(each) for each in sorted(pinned)]) if pinned else "none"
            raise CannotReadError(f"step {step} of {root.path} is not pinned; pinned steps: {known}")
    done: list[int] = []
    if arguments.yes or confirmed(f"Unpin {plural(len(steps), 'step')}, which the job may remove then? [y/N] ", output):
        done = [step for step in steps if root.unpin_step(step)]
    output.line(f"unpinned {plural(len(done), 'step')}")
    output.json({"root": root.path, "unpinned": done})
    return Exit.WHOLE
