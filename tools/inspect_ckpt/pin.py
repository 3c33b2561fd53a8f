"""`pin`: keep published steps, whatever the policy of the job says."""

from __future__ import annotations

import argparse

from ckpt.storage.pins import pin_step

from .output import CannotReadError, Exit, Output
from .root import root_of

__all__ = ["HELP", "add_arguments", "run"]

HELP = "keep published steps: neither the job nor `rm` removes them until `unpin`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("steps", metavar="STEP", nargs="+", type=int, help="the number of a published step")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = root_of(arguments.root)
    steps = list(dict.fromkeys(arguments.steps))
    published = root.steps()
    for step in steps:
        if step not in published:
            raise CannotReadError(f"{root.path} has no published step {step}; `inspect_ckpt ls` lists what there is")
    for step in steps:
        pin_step(root.path, step)
        output.line(f"step {step}: pinned")
    output.json({"root": root.path, "pinned": steps})
    return Exit.WHOLE
