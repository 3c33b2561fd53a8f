"""`restore-branch`: make a step of another branch the newest one again."""

from __future__ import annotations

import argparse

from ckpt.storage.interface import MovedStep, Root

from .output import CannotReadError, Exit, Output
from .root import any_root, branch_of, find_moved_step, owned

HELP = (
    "publish a superseded step again, with those it continues; newer steps of the current branch are superseded instead"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("name", metavar="STEP", help="the superseded step, as `ls --all` names it, or its number")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be moved")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    if arguments.dry_run:
        away, back = _moves(root, arguments.name)
    else:
        with owned(root) as token:
            away, back = _moves(root, arguments.name)
            for step in away:
                root.move_aside(step, token, "superseded")
            for one in back:
                root.publish_again(one.name, token)
    doing = "would be " if arguments.dry_run else ""
    for step in away:
        output.line(f"step {step}: {doing}superseded")
    for one in back:
        output.line(f"step {one.step}: {doing}published again ({one.name})")
    moved = {"superseded": away, "published": [one.step for one in back], "dry_run": arguments.dry_run}
    output.json({"root": root.path, **moved})
    return Exit.WHOLE


def _moves(root: Root, name: str) -> tuple[list[int], list[MovedStep]]:
    """Return the steps to supersede, newest first, and those to publish again, oldest first."""
    tip = find_moved_step(root, name, ("superseded",))
    if tip is None:
        raise CannotReadError(f"{root.path} has no superseded step {name!r}; `inspect_ckpt ls --all` lists them")
    back, base = branch_of(root, tip)
    return [step for step in reversed(root.steps()) if step > base], back
