"""`convert`: make a step out of another format. `export` is the other direction.

It reads and writes in blocks of bounded memory. The step is published as every save is. Afterwards both sides are read
again, and compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable

import numpy as np

from ckpt.exporting.selection import StepTensor, same_value, tensor_leaves
from ckpt.formats.foreign_files import check_outside, foreign_file
from ckpt.formats.foreign_state import open_foreign
from ckpt.formats.lazy_state import FileTensor, LazyState
from ckpt.formats.step_writer import write_step
from ckpt.loading.fetch import Fetch
from ckpt.paths import Path, display
from ckpt.storage.interface import Root
from ckpt.storage.root import CheckpointRoot
from ckpt.storage.roots import is_object_url, own_directory, own_root

from .output import CannotReadError, Exit, Output, byte_counter, duration, plural, size
from .root import owned, root_of
from .step import Step, block_boxes, open_step, step_path

HELP = "make a step out of torch.distributed.checkpoint, torch.save, safetensors, Orbax or Zarr"

_STEPS = 10**18
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="FROM",
        help="a torch.distributed.checkpoint directory, a torch.save file, a safetensors file or directory, a "
        "checkpoint of Orbax, a directory or an OCDBT database of Zarr arrays",
    )
    parser.add_argument("target", metavar="TO", help="a checkpoint root, new or not; may be a URL")
    parser.add_argument("--step", type=_step_number, default=0, metavar="N", help="number of the new step (default 0)")
    parser.add_argument("--under", default="", metavar="KEY", help="put the state under this key: model, or a/b")
    parser.add_argument("--string-keys", action="store_true", help="DCP: keys that read like numbers stay strings")
    parser.add_argument(
        "--skip-unsafe", action="store_true", help="leave out what cannot be loaded without running code"
    )
    parser.add_argument("--follow-links", action="store_true", help="read files that are links out of FROM")
    parser.add_argument("--no-verify", action="store_true", help="do not read both sides again to compare them")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    begin = time.perf_counter()
    state = _open(arguments)
    if not is_object_url(arguments.target):
        check_outside(arguments.target, arguments.source)
    root = _target_root(arguments.target, arguments.step)
    if arguments.under:
        state = state.under(_prefix(arguments.under))
    with output.meter("convert") as meter, owned(root) as token:
        path = write_step(state, root, arguments.step, token, byte_counter(meter, state.nbytes))
    seconds = time.perf_counter() - begin
    what = f"{plural(len(state.tensors), 'tensor')}, {plural(len(state.values), 'value')}, {size(state.nbytes)}"
    output.line(f"converted {what} from {state.kind} to {path} ({duration(seconds)})", "bold")
    for note in state.notes:
        output.line(note)
    problems = None if arguments.no_verify else _verify(path, state, output)
    return _report(arguments, path, problems, state.notes, output)


def _open(arguments: argparse.Namespace) -> LazyState:
    path = arguments.source
    if is_object_url(path):
        raise CannotReadError(f"{path}: other formats are read from local files only; copy it to a disk first")
    try:
        state = open_foreign(
            path,
            string_keys=arguments.string_keys,
            skip_unsafe=arguments.skip_unsafe,
            follow_links=arguments.follow_links,
        )
    except (FileNotFoundError, NotADirectoryError):
        raise CannotReadError(f"{path}: there is no such file or directory") from None
    except ValueError as error:
        raise CannotReadError(f"{path!r}: {error}") from None
    if state is not None:
        return state
    if os.path.isdir(path):
        step_path(path)
        raise CannotReadError(f"{path} is already a checkpoint of ckpt; `export` writes other formats")
    if (what := foreign_file(path)) is not None:
        raise CannotReadError(f"{path} is {what}")
    hint = "; give the directory that contains it" if path.endswith((".index.json", ".metadata", ".distcp")) else ""
    raise CannotReadError(f"{path} is neither a safetensors file nor one of torch.save{hint}")


def _target_root(path: str, step: int) -> Root:
    """Return the root at a path or URL. CannotReadError if the step cannot be written to it."""
    if is_object_url(path):
        root = own_root(path)
        if step in root.steps():
            raise CannotReadError(f"step {step} is already in {path}; give another --step")
        return root
    if os.path.lexists(path) and not os.path.isdir(path):
        raise CannotReadError(f"{path} is a file; give a checkpoint root, or a new directory")
    if os.path.isdir(path) and os.listdir(path):
        root_of(path)
    own_directory(os.path.abspath(path), "a checkpoint root")
    directory = CheckpointRoot(path)
    if os.path.lexists(directory.step_path(step)):
        raise CannotReadError(f"step {step} is already in {path}; give another --step")
    return directory


def _prefix(text: str) -> Path:
    if "" in (keys := text.split("/")):
        raise CannotReadError(f"--under {text!r}: a key is empty")
    return tuple(keys)


def _verify(path: str, state: LazyState, output: Output) -> list[str]:
    with open_step(path) as step, output.meter("verify") as meter:
        leaves = {leaf.path: leaf for leaf in tensor_leaves(step.index) if leaf.alias_of is None}
        problems = _different_names({*leaves, *step.index.values}, {*state.tensors, *state.values})
        if step.index.aliases != state.aliases:
            problems.append("the tied names are not the same")
        if step.index.containers != state.containers:
            problems.append("the lists and other containers are not the same")
        for name, value in state.values.items():
            if name in step.index.values and not same_value(step.index.values[name], value):
                problems.append(f"{display(name)} is {step.index.values[name]!r} here, {value!r} there")
        pairs = [(leaf, state.tensors[name]) for name, leaf in leaves.items() if name in state.tensors]
        return problems + _different_tensors(step, pairs, byte_counter(meter, state.nbytes))


def _different_tensors(
    step: Step, pairs: Iterable[tuple[StepTensor, FileTensor]], progress: Callable[[int], None]
) -> list[str]:
    """Compare tensors of the step with others, in blocks. Return a line for each that differs."""
    fetch = Fetch(step.index)
    problems = []
    for leaf, other in pairs:
        tensor = leaf.tensor
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            problems.append(
                f"{leaf.label} is {tensor.dtype} {list(tensor.shape)} here, {other.dtype} {list(other.shape)} there"
            )
            continue
        for box in block_boxes(tensor):
            here = np.ascontiguousarray(fetch.array(leaf.label, tensor, box)).reshape(-1).view(np.uint8)
            there = np.empty((*box.shape, other.itemsize), np.uint8)
            other.read(box, there)
            progress(here.nbytes)
            if not np.array_equal(here, there.reshape(-1)):
                problems.append(f"{leaf.label} differs in the box at {list(box.offset)} of {list(box.shape)}")
                break
    return problems


def _different_names(here: set[Path], there: set[Path]) -> list[str]:
    """Return a line for each path that only one side has."""
    only = [f"{display(path)} is missing there" for path in sorted(here - there, key=str)]
    return only + [f"{display(path)} is missing here" for path in sorted(there - here, key=str)]


def _report(
    arguments: argparse.Namespace, path: str, problems: list[str] | None, notes: list[str], output: Output
) -> Exit:
    """Print the result of the comparison (`problems`; None: not verified), and return the exit code."""
    if problems is None:
        output.line("not verified")
    elif not problems:
        output.line("verified: both sides were read again, all bits are equal", "green")
    else:
        output.line(f"{path} is NOT equal to {arguments.source}:", "bold red")
        for problem in problems[:_SHOWN]:
            output.line(f"  {problem}")
    document = {"from": arguments.source, "to": path, "notes": notes, "problems": problems}
    output.json({**document, "verified": None if problems is None else not problems})
    return Exit.DIFFERENT if problems else Exit.WHOLE


def _step_number(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
    if not 0 <= number < _STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number")
    return number
