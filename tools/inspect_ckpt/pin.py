"""`pin`: keep published steps, whatever the policy of the job says."""

from __future__ import annotations

import argparse

from .output import CannotReadError, Exit, Output
from .root import any_root

HELP = "keep published steps: neither the job nor `rm` removes them until `unpin`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("steps", metavar="STEP", nargs="+", type=int, help="the number of a published step")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    steps = list(dict.fromkeys(arguments.steps))
    published = root.steps()
    for step in steps:
        if step not in published:
            raise CannotReadError(f"{root.path} has no published step {step}; `inspect_ckpt ls` lists what there is")
    for step in steps:
        root.pin_step(step)
        output.line(f"step {step}: pinned")
    output.json({"root": root.path, "pinned": steps})
    return Exit.WHOLE
