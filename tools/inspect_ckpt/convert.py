"""`convert`: make a step out of another format, or a torch.distributed.checkpoint (DCP) directory out of a step.

Both directions read and write in blocks of bounded memory. A step is published as every save is. Afterwards both sides
are read again, and compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.loading.fetch import Fetch
from ckpt.paths import Path, display
from ckpt.storage.commit import CheckpointRoot

from .formats.ckpt_step import TensorLeaf, dotted, tensor_leaves, unique_names, value_leaves, write_step
from .formats.files import check_outside
from .formats.safetensors import SUFFIX, is_safetensors_directory, looks_like_safetensors, open_directory, open_file
from .formats.state import LazyState, LazyTensor, UnsafeError
from .output import CannotReadError, Exit, Output, byte_counter, duration, first_few, plural, size
from .root import root_of
from .step import Step, block_boxes, open_step, same_value, step_path

if TYPE_CHECKING:
    from .formats.dcp_writer import Values

__all__ = ["HELP", "add_arguments", "run"]

HELP = "make a step out of torch.distributed.checkpoint, torch.save or safetensors, or a DCP directory out of a step"

_STEPS = 10**18
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="FROM",
        help="a torch.distributed.checkpoint directory, a torch.save file, a safetensors file or directory; with "
        "--to dcp a step, or a checkpoint root: then its newest step",
    )
    parser.add_argument("target", metavar="TO", help="a checkpoint root, new or not; with --to dcp a new directory")
    parser.add_argument("--to", choices=("ckpt", "dcp"), default="ckpt", help="what TO becomes (default ckpt)")
    parser.add_argument("--step", type=_step_number, default=0, metavar="N", help="number of the new step (default 0)")
    parser.add_argument("--under", default="", metavar="KEY", help="put the state under this key: model, or a/b")
    parser.add_argument("--string-keys", action="store_true", help="DCP: keys that read like numbers stay strings")
    parser.add_argument(
        "--skip-unsafe", action="store_true", help="leave out what cannot be loaded without running code"
    )
    parser.add_argument("--follow-links", action="store_true", help="read files that are links out of FROM")
    parser.add_argument("--no-verify", action="store_true", help="do not read both sides again to compare them")


def run(arguments: argparse.Namespace, output: Output) -> Exit:
    if arguments.to == "dcp":
        if _kind(arguments.source) != "ckpt":
            raise CannotReadError(f"{arguments.source} is not a step of ckpt; --to dcp converts only those")
        with open_step(arguments.source) as step:
            check_outside(arguments.target, step.path)
            return _to_dcp(step, arguments, output)
    return _to_step(arguments, output)


def _kind(path: str) -> str:
    """Tell what is at `path`: dcp, torch, safetensors, safetensors-directory, or ckpt.

    CannotReadError, NotPublishedError.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CannotReadError(f"{path}: there is no such file or directory") from None
    except ValueError as error:
        raise CannotReadError(f"{path!r}: {error}") from None
    if stat.S_ISDIR(status.st_mode):
        if os.path.lexists(os.path.join(path, ".metadata")):
            return "dcp"
        if is_safetensors_directory(path) and not os.path.lexists(os.path.join(path, "zarr.json")):
            return "safetensors-directory"
        step_path(path)
        return "ckpt"
    if not stat.S_ISREG(status.st_mode):
        raise CannotReadError(f"{path} is neither a file nor a directory")
    with open(path, "rb") as stream:
        start = stream.read(16)
    if path.endswith(SUFFIX) or looks_like_safetensors(start):
        return "safetensors"
    if start[:4] == b"PK\3\4" or start[:1] == b"\x80":
        return "torch"
    hint = "; give the directory that contains it" if path.endswith((".index.json", ".metadata", ".distcp")) else ""
    raise CannotReadError(f"{path} is neither a safetensors file nor one of torch.save{hint}")


# -- to a step ---------------------------------------------------------------------------------------------------------


def _to_step(arguments: argparse.Namespace, output: Output) -> Exit:
    begin = time.perf_counter()
    state = _open(arguments)
    check_outside(arguments.target, arguments.source)
    root = _target_root(arguments.target, arguments.step)
    if arguments.under:
        state = state.under(_prefix(arguments.under))
    with output.meter("convert") as meter:
        path = write_step(state, root, arguments.step, byte_counter(meter, state.nbytes))
    seconds = time.perf_counter() - begin
    what = f"{plural(len(state.tensors), 'tensor')}, {plural(len(state.values), 'value')}, {size(state.nbytes)}"
    output.line(f"converted {what} from {state.kind} to {path} ({duration(seconds)})", "bold")
    for note in state.notes:
        output.line(note)
    problems = None if arguments.no_verify else _verify_step(path, state, output)
    return _report(arguments, path, problems, state.notes, output)


def _open(arguments: argparse.Namespace) -> LazyState:
    path = arguments.source
    match _kind(path):
        case "safetensors":
            return open_file(path)
        case "safetensors-directory":
            return open_directory(path, arguments.follow_links)
        case "torch":
            from .formats.torch_file import open_torch_file

            return open_torch_file(path, arguments.skip_unsafe)
        case "dcp":
            from .formats.dcp_reader import open_dcp, state_of_dcp

            opened = open_dcp(path, arguments.follow_links)
            return state_of_dcp(opened, string_keys=arguments.string_keys, skip_unsafe=arguments.skip_unsafe)
    raise CannotReadError(f"{path} is already a checkpoint of ckpt; --to dcp converts it, `export` writes safetensors")


def _target_root(path: str, step: int) -> str:
    """Return `path`. CannotReadError if the step cannot be written to a root there."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise CannotReadError(f"{path} is a file; give a checkpoint root, or a new directory")
    if os.path.isdir(path) and os.listdir(path):
        root_of(path)
    if os.path.lexists(CheckpointRoot(path).step_path(step)):
        raise CannotReadError(f"step {step} is already in {path}; give another --step")
    return path


def _prefix(text: str) -> Path:
    if "" in (keys := text.split("/")):
        raise CannotReadError(f"--under {text!r}: a key is empty")
    return tuple(keys)


def _verify_step(path: str, state: LazyState, output: Output) -> list[str]:
    with open_step(path) as step, output.meter("verify") as meter:
        leaves = {leaf.path: leaf for leaf in tensor_leaves(step.index) if leaf.alias_of is None}
        problems = _different_names({*leaves, *step.index.values}, {*state.tensors, *state.values})
        if step.index.aliases != state.aliases:
            problems.append("the tied names are not the same")
        for name, value in state.values.items():
            if name in step.index.values and not same_value(step.index.values[name], value):
                problems.append(f"{display(name)} is {step.index.values[name]!r} here, {value!r} there")
        pairs = [(leaf, state.tensors[name]) for name, leaf in leaves.items() if name in state.tensors]
        return problems + _different_tensors(step, pairs, byte_counter(meter, state.nbytes))


# -- to DCP ------------------------------------------------------------------------------------------------------------


def _to_dcp(step: Step, arguments: argparse.Namespace, output: Output) -> Exit:
    from .formats.dcp_writer import write_dcp

    begin = time.perf_counter()
    leaves = tensor_leaves(step.index)
    tensors = unique_names(((leaf.dotted, leaf) for leaf in leaves), step.path)
    values, notes = _dcp_values(step, tensors)
    tied = [leaf.label for leaf in leaves if leaf.alias_of is not None]
    if tied:
        notes.append(f"tied tensors were written once for each name: {first_few(tied)}")
    total = sum(leaf.nbytes for leaf in leaves)
    with output.meter("convert") as meter:
        write_dcp(arguments.target, tensors, values, Fetch(step.index), byte_counter(meter, total))
    seconds = time.perf_counter() - begin
    what = f"{plural(len(tensors), 'tensor')}, {plural(len(values), 'value')}, {size(total)}"
    output.line(f"converted {what} from {step.path} to {arguments.target} ({duration(seconds)})", "bold")
    for note in notes:
        output.line(note)
    problems = None
    if not arguments.no_verify:
        with output.meter("verify") as meter:
            problems = _verify_dcp(step, arguments.target, tensors, values, byte_counter(meter, total))
    return _report(arguments, arguments.target, problems, notes, output)


def _dcp_values(step: Step, tensors: dict[str, TensorLeaf]) -> tuple[Values, list[str]]:
    """Return the values to write, flattened as DCP does it, and notes about the others."""
    from .formats.dcp_writer import flat_values
    from .formats.torch_file import loads_without_code

    values: Values = {}
    empty, own, unsafe = [], [], []
    for leaf in value_leaves(step.index):
        if leaf.rank is not None:
            own.append(leaf.label)
            found: list[tuple[Path, Any]] = [((leaf.dotted,), leaf.value)]
        else:
            found = list(flat_values(tuple(map(str, leaf.path)), leaf.value))
            if not found:
                empty.append(leaf.label)
        for keys, value in found:
            name = dotted(keys)
            if not loads_without_code(value):
                unsafe.append(f"{leaf.label} ({type(value).__name__})")
                continue
            if name in values or name in tensors:
                raise CannotReadError(f"{step.path}: two leaves would both be named {name!r}")
            values[name] = (keys, value)
    notes = [f"left out, because DCP cannot represent an empty dict: {first_few(empty)}"] if empty else []
    if unsafe:
        notes.append(f"left out, because torch.load(weights_only=True) does not load them: {first_few(unsafe)}")
    own += [leaf.label for leaf in tensors.values() if leaf.rank is not None]
    if own:
        notes.append(f"what belongs to single ranks is under the names that `show` lists: {first_few(own)}")
    return values, notes


def _verify_dcp(
    step: Step, path: str, tensors: dict[str, TensorLeaf], values: Values, progress: Callable[[int], None]
) -> list[str]:
    from .formats.dcp_reader import open_dcp

    opened = open_dcp(path, False)
    problems = _different_names({*tensors, *values}, {*opened.tensors, *opened.objects})
    for name, (_, value) in values.items():
        try:
            if name in opened.objects and not same_value(value, opened.load_object(name)):
                problems.append(f"{name} is {value!r} here, another value there")
        except UnsafeError as error:
            problems.append(f"{name}: {error}")
    pairs = [(leaf, opened.tensors[name]) for name, leaf in tensors.items() if name in opened.tensors]
    return problems + _different_tensors(step, pairs, progress)


# -- comparing both sides ----------------------------------------------------------------------------------------------


def _different_tensors(
    step: Step, pairs: Iterable[tuple[TensorLeaf, LazyTensor]], progress: Callable[[int], None]
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


def _different_names(here: set[Any], there: set[Any]) -> list[str]:
    """Return a line for each name (or path) that only one side has."""

    def shown(name: Any) -> str:
        return name if isinstance(name, str) else display(name)

    only = [f"{shown(name)} is missing there" for name in sorted(here - there, key=str)]
    return only + [f"{shown(name)} is missing here" for name in sorted(there - here, key=str)]


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
