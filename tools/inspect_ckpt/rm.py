"""`rm`: remove steps: published ones, and those that were moved aside."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from ckpt.storage.interface import MovedStep, Root
from ckpt.validation import validate

from .output import CannotReadError, Exit, Output, plural, size
from .root import any_root, confirmed, find_moved_step, owned, steps_of

HELP = "remove steps: published ones by their number, superseded and damaged ones by the name that `ls --all` shows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", help="a checkpoint root")
    parser.add_argument("names", metavar="STEP", nargs="+", help="a published step, or the name of one moved aside")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--force", action="store_true", help="remove even the last whole step")


@dataclass(frozen=True)
class _Chosen:
    """A step to remove. `moved` is None for a published one."""

    name: str
    path: str
    step: int
    nbytes: int
    moved: MovedStep | None


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    root = any_root(arguments.root)
    chosen = [_chosen(root, name) for name in dict.fromkeys(arguments.names)]
    published = [one.step for one in chosen if one.moved is None]
    for step in root.pinned_steps().intersection(published):
        raise CannotReadError(f"step {step} of {root.path} is pinned; `inspect_ckpt unpin {root.path} {step}` first")
    if published and not arguments.force:
        _check_one_is_left(root, published)
    total = sum(one.nbytes for one in chosen)
    for one in chosen:
        output.line(f"{one.path}: {'published' if one.moved is None else one.moved.why}")
    removed: list[str] = []
    if not arguments.yes and not confirmed(f"Remove {plural(len(chosen), 'step')}, {size(total)}? [y/N] ", output):
        output.line("nothing was removed")
    else:
        removed = _remove(root, chosen, arguments.force)
        output.line(f"removed {plural(len(removed), 'step')}, {size(total)}")
    output.json({"root": root.path, "removed": removed, "freed_bytes": total if removed else 0})
    return Exit.WHOLE


def _chosen(root: Root, name: str) -> _Chosen:
    if name.isascii() and name.isdigit() and int(name) in steps_of(root):
        source = root.source_of(int(name))
        nbytes = 0 if os.path.islink(source.path) else source.usage()[0]  # of a link only the link is removed
        return _Chosen(name, source.path, int(name), nbytes, None)
    if (found := find_moved_step(root, name)) is not None:
        return _Chosen(found.name, found.source.path, found.step, found.source.usage()[0], found)
    raise CannotReadError(f"{root.path} has no step {name!r}; `inspect_ckpt ls --all` lists what there is")


def _check_one_is_left(root: Root, removed: list[int]) -> None:
    """CannotReadError if no whole step would be left, as far as metadata and sizes tell."""
    for step in reversed([step for step in steps_of(root) if step not in removed]):
        if validate(root.source_of(step), quick=True).restorable:
            return
    raise CannotReadError(f"{root.path} would have no whole step left; --force removes it all the same")


def _remove(root: Root, chosen: list[_Chosen], force: bool) -> list[str]:
    """Remove the steps and return their names. Only removing a published one needs ownership of the root.

    Published ones are removed first: that can be refused, also because others were removed during the question.
    """
    removed = []
    published = [one for one in chosen if one.moved is None]
    if published:
        with owned(root) as token:
            if not force:
                _check_one_is_left(root, [one.step for one in published])
            for one in published:
                root.ownership.check(token)
                if not root.remove_step(one.step, token):
                    raise CannotReadError(f"{one.path} is being read, or was just pinned; it was not removed")
                removed.append(one.name)
    for one in chosen:
        if one.moved is not None:
            root.remove_moved(one.name)
            removed.append(one.name)
    return removed
