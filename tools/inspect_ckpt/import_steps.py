"""`import`: take in the steps of a root whose files were copied one by one between a directory and an object store.

Each step is read, checked against its checksums and published as a save is, under the number and the save that it says.
What is copied stays where it is.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

from ckpt.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointNotFoundError
from ckpt.loading.consistency import read_index
from ckpt.mirroring.step_copy import StepCopy, Throttle
from ckpt.storage.interface import Root
from ckpt.storage.names import SaveId, parse_save_name
from ckpt.storage.roots import is_object_url, open_root
from ckpt.storage.step_source import StepSource

from .output import CannotReadError, Exit, Output, duration, size
from .root import check_directory, owned

__all__ = ["HELP", "add_arguments", "run"]

HELP = "take in the steps of a root that was copied file by file into a bucket, or from one to a disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help="where the files are: a directory, or the URL of a prefix")
    parser.add_argument("target", metavar="ROOT", help="a checkpoint root, new or not; may be FROM, and may be a URL")
    parser.add_argument("--step", type=int, action="append", metavar="N", help="only this step; may be repeated")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    sources = _sources(arguments.source, arguments.step)
    root = _target(arguments.target)
    saves, damaged = _saves(sources, output)
    imported, present = [], []
    with owned(root, above=max((save.owner for save in saves.values()), default=0)) as token:
        there = root.saves().values()
        for step, save in sorted(saves.items()):
            if save.name in there:
                output.line(f"step {step}: is in {root.path} already")
                present.append(step)
            elif _copy(sources[step], step, root, token, output):
                imported.append(step)
            else:
                damaged.append(step)
    output.line(f"{root.path} has the steps {root.steps()}", "bold")
    output.json({"root": root.path, "imported": imported, "present": present, "damaged": sorted(damaged)})
    return Exit.DAMAGED if damaged else Exit.WHOLE


def _saves(sources: dict[int, StepSource], output: Output) -> tuple[dict[int, SaveId], list[int]]:
    """Return the saves that the steps are of, and the damaged steps, which are left out."""
    saves: dict[int, SaveId] = {}
    damaged = []
    for step, source in sources.items():
        try:
            save = parse_save_name(str(read_index(source).summary["save"]))
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            output.line(f"step {step}: is left out: {error}", "red")
            damaged.append(step)
        else:
            if save is not None:
                saves[step] = save
    return saves, damaged


def _copy(source: StepSource, step: int, root: Root, token: int, output: Output) -> bool:
    """Copy a step, and return whether it is whole."""
    begin = time.perf_counter()
    copy = StepCopy(source, root, token, Throttle(None, threading.Event()))
    try:
        copy.run(lambda: None)
    except CheckpointExistsError as error:
        raise CannotReadError(f"{error}; import the steps into another root") from None
    except CheckpointCorruptError as error:
        output.line(f"step {step}: is left out: {error}", "red")
        return False
    output.line(f"step {step}: {size(copy.nbytes)} from {source.path} ({duration(time.perf_counter() - begin)})")
    return True


def _sources(path: str, steps: list[int] | None) -> dict[int, StepSource]:
    """Return the steps whose files lie at a path or URL, by the numbers that their places have."""
    if not is_object_url(path):
        check_directory(path)
    root = open_root(path)
    found = root.copied_steps()
    if not found and root.steps():
        raise CannotReadError(f"{root.path} is a checkpoint root already: nothing has to be imported")
    if not found:
        raise CannotReadError(f"{root.path} has no files of steps in the layout of {root.other_layout}")
    missing = sorted(set(steps or ()) - found.keys())
    if missing:
        raise CannotReadError(f"{root.path} has no files of step {missing[0]}; it has those of {sorted(found)}")
    return {number: source for number, source in found.items() if steps is None or number in steps}


def _target(path: str) -> Root:
    root = open_root(path)
    if is_object_url(path) and root.path != path.rstrip("/"):
        raise CannotReadError(f"{path} is a step, not a checkpoint root; give {root.path}")
    if not is_object_url(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise CannotReadError(f"{path} is a file; give a checkpoint root, or a new directory")
    return root
