"""`index`: make a published step a database of tensorstore, if the save has not done that."""

from __future__ import annotations

import argparse

from ckpt.errors import CheckpointCorruptError
from ckpt.saving.for_readers import database_files
from ckpt.storage.documents import well_formed
from ckpt.storage.names import MANIFEST, NODES, pack_file
from ckpt.storage.step_source import LocalStep
from ckpt.storage.store_step import StoreStep
from ckpt.storage.zarr_entries import Hierarchy
from ckpt.validation import validate
from ckpt.validation.checks import compressed_places

from .output import CannotReadError, Exit, Output, size
from .step import add_step, at_step, open_step
from .validate import problem_line

HELP = "make a step a database of tensorstore, for a step with more chunks than a save makes one of"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a step, or a checkpoint root: then its newest step")
    add_step(parser)


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    with open_step(at_step(arguments.path, arguments.step)) as step:
        index, source = step.index, step.index.source
        if not isinstance(source, LocalStep | StoreStep):
            raise CannotReadError(f"{step.path} cannot be written to")
        found, _ = source.scan()
        missing = [name for name in (pack_file(*place) for place in index.packs.files()) if name not in found]
        if missing:
            raise CannotReadError(
                f"{step.path} has no {missing[0]}: a database needs all pack files below one place. If they are on the "
                "disks of nodes, index a copy of the step in a mirror"
            )
        fatal = [problem for problem in validate(source, quick=True).problems if problem.fatal]
        if fatal:
            raise CheckpointCorruptError(f"{step.path} is damaged: {problem_line(fatal[0])}; nothing was written")
        with well_formed(f"{step.path}/parts"):
            files = database_files(Hierarchy.of(index.packs), compressed_places(index))
        # Not the root: readers take a step with another root for another step. The manifest last: it needs the nodes.
        for name in (NODES, MANIFEST):
            source.write(name, files[name])
    nbytes = sum(len(data) for data in files.values())
    output.line(f"{step.path}: {MANIFEST} and {NODES} written, {size(nbytes)}", "green")
    output.json({"path": step.path, "bytes": nbytes})
    return Exit.WHOLE
